"""Runs on other machines: brought up, watched, stopped and taken down. Nothing here imports JAX."""
