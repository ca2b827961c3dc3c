"""DeepSpeed on CPU processes: our strategy without the checks for CUDA (ZeRO 1 and 2 run; the engine itself is the real one)."""

import os

import torch
from lightning.pytorch.strategies.ddp import DDPStrategy

from workbench.strategies.deepspeed import DeepSpeed


class DeepSpeedOnCPU(DeepSpeed):
    """For proofs alone: slower than DDP.

    Args:
        stage: ZeRO stage, 1 or 2.
    """

    def __init__(self, stage: int) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed.comm.torch

        deepspeed.comm.torch.build_shm_op = lambda: None  # gloo does; its own kernel takes a minute to compile
        super().__init__(stage=stage, process_group_backend="gloo")

    @property
    def root_device(self) -> torch.device:
        """The CPU, with the index that DeepSpeed asks for."""
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        """Past the check for CUDA."""
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """Past the device's index."""
        self.set_world_ranks()
        self._init_deepspeed_distributed()
