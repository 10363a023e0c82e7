"""Save and restore the state of a run."""
