"""Random decoders that are exported give the same logits in `transformers`, in two of its major versions."""

import os

import pytest

from tests.models.random_decoders import VARIABLES, Exported, draw, exported

pytestmark = pytest.mark.slow
COUNT, SEED = 40, 624


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return exported([draw(number, SEED) for number in range(COUNT)], SEED, tmp_path_factory.mktemp("exported"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "variable",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(not os.environ.get(name), reason=f"{name} names no Python with transformers")
        )
        for name in VARIABLES
    ],
)
def test_what_is_exported_gives_the_same_logits_in_transformers(variable: str, made: Exported) -> None:
    assert len(made.draws) >= COUNT / 4
    assert len(set(made.kinds.values())) >= 8
    wrong = made.reasons(os.environ[variable])
    assert not wrong, "\n".join(f"{made.kinds[name]}: {why}\n  {made.draws[name]}" for name, why in wrong.items())
