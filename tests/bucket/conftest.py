"""Fixtures of tests/train/test_faults.py: its recipe, and the run without faults."""

from tests.train.test_faults import recipe, undisturbed

__all__ = ["recipe", "undisturbed"]
