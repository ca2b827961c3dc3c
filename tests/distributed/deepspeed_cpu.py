"""DeepSpeed on CPU processes: our strategy without the checks for CUDA (ZeRO 1 and 2 run; the engine itself is the real one)."""

import torch
from lightning.pytorch.strategies.ddp import DDPStrategy

from workbench.strategies.deepspeed import DeepSpeed


class DeepSpeedOnCPU(DeepSpeed):
    """For tests alone."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage=stage, process_group_backend="gloo")

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()
