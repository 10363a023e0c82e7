"""Programs that XLA's CPU compiler of some versions computes wrongly, or crashes on, are right as dtrain runs them.

They are those of the reports that dtrain/parallel/devices.py names, computed by NumPy beside them.
"""

import subprocess
import sys

import pytest

from tests.conftest import bare_environment

PROGRAMS = {
    "a product with each row, and the sum of its squares": """
rows = np.stack([np.arange(32769), np.zeros(32769), np.zeros(32769)], 1).astype("float32")
f = lambda x: jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))(x)
compare(jax.jit(f)(rows), (rows ** 2).sum(1))
""",
    "a product and a sum of arrays with eight dims": """
a, b = np.ones((10, 4, 6), "float32"), np.random.default_rng(0).random((10, 4, 6, 9, 9, 9, 9, 9), "float32")
f = lambda a, b: jnp.sum(a[..., None, None, None, None, None] * b, axis=2)
compare(jax.jit(f)(a, b), b.sum(2))
""",
    "a product and a sum of arrays with a dim of one": """
draw = np.random.default_rng(0)
a, b = (draw.random((3, 1, 2, 2, 8, 8, 8), "float32") for _ in range(2))
compare(jax.jit(lambda a, b: jnp.sum(a * b, axis=3))(a, b), (a * b).sum(3))
""",
}
START = """
from dtrain.parallel.devices import configure_environment
configure_environment()
import jax, jax.numpy as jnp, numpy as np
compare = lambda found, expected: np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", PROGRAMS)
def test_the_program_is_right(what: str) -> None:
    command = [sys.executable, "-c", START + PROGRAMS[what]]
    environment = bare_environment() | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
