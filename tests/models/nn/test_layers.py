"""The losses that models share refuse what they cannot compute."""

import jax.numpy as jnp
import pytest

from dtrain.core.errors import RecipeError
from dtrain.models.nn import layers
from dtrain.models.nn.single_device import SingleDeviceContext


def test_numbers_as_labels_of_classes_are_refused_with_the_loss_for_them() -> None:
    batch = {"label": jnp.ones(4, jnp.float32)}
    with pytest.raises(RecipeError, match="the labels are numbers") as refused:
        layers.classify(jnp.zeros((4, 3)), batch, SingleDeviceContext())
    assert "layers.regress" in refused.value.hint
