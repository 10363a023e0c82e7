import pytest

from dtrain.parallel.mesh import Mesh
from dtrain.parallel.pmap import Pmap
from dtrain.parallel.rules import Layout


@pytest.mark.parametrize(
    ("mesh", "processes", "reason"),
    [
        (Mesh(data=2, fsdp=2, tensor=2), 1, "fsdp = 2, tensor = 2"),
        (Mesh(data=8), 2, "this run has 2"),
        (Mesh(data=8), 1, ""),
    ],
)
def test_pmap_refuses_other_axes_and_several_processes(mesh: Mesh, processes: int, reason: str) -> None:
    refusal = Pmap().refusal(Layout(mesh.given, mesh.table(), {}), processes)
    assert reason in refusal
    assert bool(refusal) == bool(reason)
