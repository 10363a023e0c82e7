"""Shared foundations without JAX: errors, field types, the chip table, the run folder and its lease."""
