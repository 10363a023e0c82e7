import pytest

from dtrain.errors import FieldError
from dtrain.parallel.mesh import Mesh


def test_the_open_axis_takes_what_is_left() -> None:
    assert Mesh(data=-1, fsdp=2, tensor=2).sizes(8) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert Mesh().sizes(1) == {"data": 1, "fsdp": 1, "tensor": 1}


def test_a_mesh_that_does_not_fit_shows_the_arithmetic() -> None:
    with pytest.raises(FieldError, match=r"data 3 x fsdp 1 x tensor 2: 6 != 8 devices"):
        Mesh(data=3, tensor=2).sizes(8)
    with pytest.raises(FieldError, match=r"data -1 x fsdp 3 x tensor 1: 3 does not divide 8 devices"):
        Mesh(fsdp=3).sizes(8)


def test_two_open_axes_and_empty_axes_are_refused() -> None:
    with pytest.raises(FieldError, match="only one axis may be -1"):
        Mesh(data=-1, fsdp=-1)
    with pytest.raises(FieldError, match="at least one device"):
        Mesh(tensor=0)
