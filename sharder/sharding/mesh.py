"""The device mesh (data, fsdp, tensor) and how many devices each axis gets."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from sharder.config import ParallelConfig, UserError

AXES = ("data", "fsdp", "tensor")
REPLICA_AXES = ("data", "fsdp")
"""Mesh axes that the batch is divided over."""


@dataclass(frozen=True)
class MeshShape:
    """Number of devices along each mesh axis."""

    data: int
    fsdp: int
    tensor: int

    @property
    def num_replicas(self) -> int:
        return self.data * self.fsdp

    @property
    def num_devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    def size(self, axis: str) -> int:
        return getattr(self, axis)


def resolve_mesh_shape(parallel: ParallelConfig, num_devices: int, num_local_devices: int) -> MeshShape:
    """Fills in what the user left open: fsdp = all replicas, then data = devices / (fsdp x tensor).

    Raises UserError where the degrees do not multiply to the number of devices, or a tensor group would
    leave its host.
    """
    tensor = parallel.tensor
    if num_local_devices % tensor:
        fits = [d for d in range(1, num_local_devices + 1) if num_local_devices % d == 0]
        raise UserError(
            f"--parallel.tensor is {tensor}, but must divide the {num_local_devices} devices of a process,"
            f" so that a tensor group stays inside one host: use one of {fits}."
        )
    replicas = num_devices // tensor
    fsdp = parallel.fsdp or (replicas // parallel.data if parallel.data and replicas % parallel.data == 0 else replicas)
    data = parallel.data or max(replicas // fsdp, 1)
    if data * fsdp * tensor != num_devices:
        raise UserError(
            f"--parallel.data {data} x --parallel.fsdp {fsdp} x --parallel.tensor {tensor} = {data * fsdp * tensor}"
            f" devices, but there are {num_devices}: change a degree, or leave data and fsdp out to use all {replicas}"
            " replicas."
        )
    return MeshShape(data, fsdp, tensor)


def make_group_mesh(devices: tuple[jax.Device, ...]) -> Mesh:
    """Mesh of one replica: all its devices along tensor."""
    return Mesh(np.array(devices).reshape(1, 1, -1), AXES, axis_types=(AxisType.Auto,) * 3)


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh over these devices, by default all of all processes, tensor fastest, so that a tensor group is inside one process."""
    devices = sorted(devices or jax.devices(), key=lambda d: (d.process_index, d.id))
    grid = np.array(devices).reshape(shape.data, shape.fsdp, shape.tensor)
    # jax.make_mesh would choose Explicit axes in new releases, and another device order.
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)
