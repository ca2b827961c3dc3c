"""What a Lightning strategy means for plans and reductions."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy, Strategy
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from workbench.errors import UserError


class DataParallel(NamedTuple):
    """World size and rank among the data-parallel processes (tensor-parallel ones share theirs)."""

    world_size: int
    rank: int


def data_parallel(strategy: Strategy) -> DataParallel:
    """Data-parallel size and rank of a set-up strategy."""
    kwargs = getattr(strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
    return DataParallel(kwargs["num_replicas"], kwargs["rank"])


def data_parallel_mesh(strategy: Strategy) -> DeviceMesh | None:
    """The mesh over which FSDP2 shards, or None under other strategies."""
    return strategy.device_mesh["data_parallel"] if isinstance(strategy, ModelParallelStrategy) else None


def data_parallel_group(strategy: Strategy) -> ProcessGroup | None:
    """The process group of the data-parallel ranks; None is the default group."""
    mesh = data_parallel_mesh(strategy)
    return None if mesh is None else mesh.get_group()


def is_deepspeed(strategy: Strategy) -> bool:
    """True for DeepSpeed, which divides by the number of micro-batches a second time and owns clipping."""
    return isinstance(strategy, DeepSpeedStrategy)


def backward_divisor(strategy: Strategy, num_micro: int) -> float:
    """What the backward pass divides a loss by beyond K x ranks: DeepSpeed's engine divides by K again."""
    return float(num_micro) if is_deepspeed(strategy) else 1.0


def gather(value: object, strategy: Strategy) -> list[object]:
    """``value`` of every data-parallel rank, on every rank."""
    size = data_parallel(strategy).world_size
    if size == 1:
        return [value]
    values: list[object] = [None] * size
    torch.distributed.all_gather_object(values, value, group=data_parallel_group(strategy))
    return values


@contextmanager
def failing_together(strategy: Strategy) -> Iterator[None]:
    """What fails on one data-parallel rank within the block fails on all: the others would wait for it. Every rank must enter."""
    fault: Exception | None = None
    try:
        yield
    except Exception as error:
        fault = error
    told = None if fault is None else str(fault) if isinstance(fault, UserError) else f"another process failed: {fault!r}"
    found = next((text for text in gather(told, strategy) if text is not None), None)
    if fault is not None:
        raise fault
    if found is not None:
        raise UserError(found)


def sum_over_ranks(value: torch.Tensor, strategy: Strategy) -> torch.Tensor:
    """The sum of ``value`` over the data-parallel ranks, on each of them."""
    if data_parallel(strategy).world_size > 1:
        value = value.clone()
        torch.distributed.all_reduce(value, group=data_parallel_group(strategy))
    return value
