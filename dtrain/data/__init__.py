"""Where examples come from, and which of them make batch k."""
