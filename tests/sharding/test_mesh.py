import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from sharder.config import ParallelConfig, UserError
from sharder.sharding.mesh import MeshShape, make_mesh, resolve_mesh_shape


@pytest.mark.parametrize(
    "asked, found",
    [
        ({}, MeshShape(1, 8, 1)),
        ({"fsdp": 2}, MeshShape(4, 2, 1)),
        ({"data": 2}, MeshShape(2, 4, 1)),
        ({"tensor": 2}, MeshShape(1, 4, 2)),
        ({"fsdp": 2, "tensor": 2}, MeshShape(2, 2, 2)),
        ({"data": 4, "tensor": 2}, MeshShape(4, 1, 2)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, MeshShape(2, 2, 2)),
        ({"data": 8}, MeshShape(8, 1, 1)),
        ({"tensor": 8}, MeshShape(1, 1, 8)),
    ],
    ids=str,
)
def test_what_is_left_open_is_filled_in(asked, found):
    assert resolve_mesh_shape(ParallelConfig(**asked), 8, 8) == found


DEGREES = st.none() | st.integers(1, 12)


@given(DEGREES, DEGREES, st.integers(1, 4), st.integers(1, 3), st.integers(1, 8))
def test_a_mesh_has_all_devices_and_what_was_asked_for(data, fsdp, tensor, num_processes, num_local):
    num_devices = num_processes * num_local
    try:
        shape = resolve_mesh_shape(ParallelConfig(data=data, fsdp=fsdp, tensor=tensor), num_devices, num_local)
    except UserError:
        return
    assert shape.num_devices == num_devices
    assert shape.tensor == tensor and shape.data == (data or shape.data) and shape.fsdp == (fsdp or shape.fsdp)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.booleans(), st.booleans())
def test_degrees_that_fit_are_never_refused(data, fsdp, tensor, give_data, give_fsdp):
    asked = ParallelConfig(data=data if give_data else None, fsdp=fsdp if give_fsdp else None, tensor=tensor)
    shape = resolve_mesh_shape(asked, data * fsdp * tensor, fsdp * tensor)
    assert shape.num_devices == data * fsdp * tensor


def test_degrees_that_do_not_multiply_to_the_devices_are_named():
    with pytest.raises(UserError) as error:
        resolve_mesh_shape(ParallelConfig(data=3, fsdp=2, tensor=2), 8, 8)
    degrees = "--parallel.data 3 x --parallel.fsdp 2 x --parallel.tensor 2 = 12 devices, but there are 8"
    assert degrees in str(error.value) and "all 4 replicas" in str(error.value)


def test_tensor_group_may_not_leave_its_process():
    with pytest.raises(UserError, match=r"--parallel.tensor is 4, but must divide the 2 devices of a process.*\[1, 2\]"):
        resolve_mesh_shape(ParallelConfig(tensor=4), 8, 2)


def test_devices_stand_in_order_with_tensor_fastest():
    mesh = make_mesh(MeshShape(2, 2, 2))
    assert [d.id for d in mesh.devices.flat] == list(range(8)) and mesh.axis_names == ("data", "fsdp", "tensor")


def test_devices_of_a_process_are_neighbours(monkeypatch):
    # jax.devices() of several processes need not be sorted, nor are ids.
    class Device:
        platform = "cpu"

        def __init__(self, process_index, id):
            self.process_index, self.id = process_index, id

    devices = [Device(i % 2, id) for i, id in enumerate([7, 3, 2, 6, 0, 9, 1, 4])]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    captured = {}
    monkeypatch.setattr("sharder.sharding.mesh.Mesh", lambda grid, *rest, **more: captured.update(grid=grid))
    make_mesh(MeshShape(2, 2, 2))
    assert [(d.process_index, d.id) for d in captured["grid"].flat] == sorted((d.process_index, d.id) for d in devices)


def test_axis_types_are_auto():
    assert make_mesh(MeshShape(1, 8, 1)).axis_types == (AxisType.Auto,) * 3


def test_shape_of_the_mesh_is_the_shape_asked_for():
    assert np.shape(make_mesh(MeshShape(4, 1, 2)).devices) == (4, 1, 2)
