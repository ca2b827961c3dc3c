"""Trains with averages on two FSDP2 processes: ``python averaged_run.py FOLDER STEPS``, run by test_averaging.py."""

import sys
from pathlib import Path

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parent))
from small_run import SmallModule, trainer

from workbench.callbacks.averaging import BEMA, EMA
from workbench.callbacks.checkpoint import Checkpoint, resolve_checkpoint


class Sharded(SmallModule):
    def __init__(self) -> None:
        super().__init__(val_batches=0)
        del self.frozen

    def configure_model(self) -> None:
        if not hasattr(self.layer, "reshard"):
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def on_before_optimizer_step(self, optimizer) -> None:
        pass


def main(folder: str, steps: int) -> None:
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False, process_group_backend="gloo"
    )
    averages = [EMA(decay=0.8, apply_at_end=False), BEMA(update_freq=2, lag=1, device="cpu", apply_at_end=False)]
    run = trainer(
        folder,
        *averages,
        Checkpoint(every_n_steps=1),
        devices=2,
        strategy=strategy,
        plugins=None,
        max_steps=steps,
        use_distributed_sampler=False,
    )
    module = Sharded()
    run.fit(module, ckpt_path=resolve_checkpoint("auto", folder))
    states = [average.state_dict() for average in averages]
    weights = {name: p.full_tensor().detach() for name, p in module.named_parameters()}
    with averages[0].applied():
        applied = {name: p.full_tensor().detach() for name, p in module.named_parameters()}
    after = {name: p.full_tensor().detach() for name, p in module.named_parameters()}
    if run.is_global_zero:
        torch.save([*states, weights, applied, after], Path(folder) / "result.pt")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
