"""DeepSpeed ZeRO through Lightning."""

import importlib.util
from typing import Any, Literal

from lightning.pytorch.strategies import DeepSpeedStrategy

from workbench.errors import UserError


class DeepSpeed(DeepSpeedStrategy):
    """ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): shards optimizer states (stage 1), gradients (2), parameters (3).

    Its engine owns clipping, the number of accumulated micro-batches and the checkpoint's format (a directory).

    Args:
        stage: ZeRO stage.
        offload_optimizer: keep optimizer states in CPU memory.
        offload_parameters: keep parameters in CPU memory (stage 3).
        process_group_backend: None: NCCL.
        config: a DeepSpeed config as a mapping or a path, instead of the options above.
    """

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        process_group_backend: str | None = None,
        config: dict[str, Any] | str | None = None,
    ) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise UserError("strategy=deepspeed needs the package: pip install 'workbench[deepspeed]'.")
        if offload_parameters and stage != 3:
            raise UserError(f"strategy.offload_parameters=true needs strategy.stage=3 (it is {stage}).")
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            process_group_backend=process_group_backend,
            config=config,
        )

    def setup_environment(self) -> None:
        if self.accelerator.name() != "cuda":
            raise UserError("strategy=deepspeed_stage_* needs CUDA; on a CPU use strategy=ddp or strategy=fsdp2.")
        super().setup_environment()

    def _auto_select_batch_size(self) -> int:
        # DeepSpeed wants a micro-batch size for its own throughput log alone; ours vary.
        return 1
