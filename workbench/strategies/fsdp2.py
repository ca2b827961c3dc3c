"""FSDP2 over every process, on CUDA or on CPU."""

from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.optim import Optimizer

from workbench.errors import UserError
from workbench.strategies.checkpoint_io import AtomicCheckpointIO, is_intact, unsafe_refused


class FSDP2Strategy(ModelParallelStrategy):
    """Shards parameters, gradients and optimizer states over all data-parallel processes (FSDP2, ``fully_shard``).

    Checkpoints are one file with whole tensors, so that a run resumes on another number of processes or under another strategy.

    Args:
        data_parallel_size: processes to shard over; ``auto``: all of them.
        tensor_parallel_size: processes that split each layer; the method must define how.
        process_group_backend: null: NCCL on CUDA, gloo on CPU.
        reshard_after_forward: free gathered weights between forward and backward (less memory, one more gather).
        timeout_minutes: after which a stuck collective fails.
    """

    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        process_group_backend: str | None = None,
        reshard_after_forward: bool = True,
        timeout_minutes: int = 30,
    ) -> None:
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timedelta(minutes=timeout_minutes),
        )
        self.fsdp_kwargs: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
        self._checkpoint_io: CheckpointIO = AtomicCheckpointIO()

    def setup_environment(self) -> None:
        if self._data_parallel_size == "auto":
            self._data_parallel_size = self.num_nodes * self.num_processes // int(self._tensor_parallel_size)
        super().setup_environment()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a whole-tensor checkpoint into the shards.

        Raises:
            UserError: the file is damaged, or holds other objects than tensors and plain values.
        """
        if not is_intact(checkpoint_path):
            raise UserError(f"The checkpoint {checkpoint_path} is damaged; resume from another one in its folder.")
        with unsafe_refused(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only=True)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors on rank 0, trained parameters only (frozen ones come from the base model again)."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        return get_model_state_dict(self.model, options=options)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole tensors on rank 0, keyed by parameter name, as `Method` keeps them under every strategy."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        optimizer = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_optimizer_state_dict(self.model, optimizer, options=options)

    def gather(self, model: nn.Module) -> dict[str, Any]:
        """The whole state of a sharded model, on rank 0 (empty elsewhere); every rank must call it."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
