"""The recipe of the faults, and the run that nothing happened to."""

from tests.train.test_faults import recipe, undisturbed

__all__ = ["recipe", "undisturbed"]
