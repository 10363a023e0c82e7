"""Optimizers and schedules: recipe sections that become optax transformations."""
