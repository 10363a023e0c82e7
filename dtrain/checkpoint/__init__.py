"""Saving the state of a run and getting it back."""
