from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jax.sharding import AxisType

from dtrain.parallel.mesh import Mesh
from dtrain.parallel.pmap import Pmap
from dtrain.parallel.rules import Layout


@pytest.mark.parametrize(
    ("mesh", "reason"), [(Mesh(data=2, fsdp=2, tensor=2), "fsdp = 2, tensor = 2"), (Mesh(data=8), "")]
)
def test_pmap_refuses_other_axes(mesh: Mesh, reason: str) -> None:
    refusal = Pmap().refusal(Layout(mesh.given, mesh.table(), {}))
    assert reason in refusal
    assert bool(refusal) == bool(reason)


def test_devices_of_one_process_are_adjacent_in_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snake through a torus visits the chips of a host in two parts; `jax.pmap` refuses that."""
    devices = [SimpleNamespace(id=i, process_index=process) for i, process in enumerate((0, 1, 1, 0))]
    mesh: Any = SimpleNamespace(devices=np.array(devices, object), axis_names=("data",), axis_types=(AxisType.Auto,))
    made = lambda grid, *_: [device.id for device in grid]  # noqa: E731
    monkeypatch.setattr("dtrain.parallel.pmap.Mesh", made)
    assert Pmap().arranged(mesh) == [0, 3, 1, 2]
