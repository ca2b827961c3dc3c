"""Random draws under a seed of their own."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def local_rng(seed: int) -> Iterator[None]:
    """Seeds torch's generators inside and puts their states back after, so that nobody else's draws move.

    CUDA is left alone where it has not been initialised: touching it would bind this process to a device.
    """
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        for device in cuda:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield
