"""Data sources, and the selection of the examples of each batch."""
