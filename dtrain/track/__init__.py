"""Outputs of a run: console, log, metrics, trackers, notifications and summary."""
