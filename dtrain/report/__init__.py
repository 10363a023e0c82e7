"""From what a run wrote down to what a person wants to know."""
