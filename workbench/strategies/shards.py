"""A parameter and this rank's part of it, the same thing where nothing is sharded."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter; writing to it writes to the parameter."""
    return parameter.data.to_local() if isinstance(parameter, DTensor) else parameter.data


def whole(weight: Tensor, parameter: Tensor) -> Tensor:
    """The whole tensor, on the CPU, that ``weight`` is this rank's part of; empty on other ranks than the first. A collective."""
    if not isinstance(parameter, DTensor):
        return weight.cpu()
    shard = DTensor.from_local(
        weight.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    full = shard.full_tensor()
    return full.cpu() if torch.distributed.get_rank() == 0 else torch.empty(0)


def shard_like(full: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a whole tensor."""
    if not isinstance(parameter, DTensor):
        return full
    return distribute_tensor(full.to(parameter.device), parameter.device_mesh, parameter.placements).to_local()
