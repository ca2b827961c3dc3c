"""A small run that behaves like a method: K micro-batches per step, metrics per step, resume by step."""

import lightning as L
import torch

from workbench.callbacks.checkpoint import Checkpoint
from workbench.methods.resume import rewrite_position
from workbench.strategies.checkpoint_io import AtomicCheckpointIO


class Loader:
    """Micro-batches that are a function of (epoch, index) and start where the trainer stands."""

    def __init__(self, module, batches: int) -> None:
        self.module, self.batches = module, batches

    def __len__(self) -> int:
        return self.batches

    def __iter__(self):
        trainer = self.module.trainer
        for index in range(trainer.fit_loop.epoch_loop.batch_progress.current.ready, self.batches):
            yield torch.tensor([1.0 + 0.1 * trainer.current_epoch, 0.3 * index - 1.0])


class SmallModule(L.LightningModule):
    """Two weights; ``steps`` optimizer steps of ``accumulate`` micro-batches make an epoch."""

    def __init__(self, accumulate: int = 2, steps: int = 4, val_batches: int = 2, val_losses=None, on_batch=None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.tensor([[0.5, -0.25]]))
            self.layer.bias.fill_(0.1)
        self.accumulate, self.steps, self.val_batches = accumulate, steps, val_batches
        self.val_losses = dict(val_losses or {})
        self.on_batch = on_batch
        self.step_metrics: dict[str, float] = {}
        self.seen: list[int] = []
        self.trained: list[tuple[int, int]] = []
        self.validated: list[int] = []

    def train_dataloader(self):
        return Loader(self, self.accumulate * self.steps)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(self.val_batches))

    def training_step(self, batch, batch_idx):
        self.trained.append((self.trainer.current_epoch, batch_idx))
        if self.on_batch is not None:
            self.on_batch(self, batch_idx)
        loss = (self.layer(batch) - 1).square().sum()
        self._loss = loss.item()
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.step_metrics = {"train/loss": self._loss, "train/grad_norm": self.layer.weight.grad.norm().item()}
        self.log_dict({**self.step_metrics, "step": float(self.trainer.global_step + 1)}, batch_size=1)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(self.trainer.global_step)

    def validation_step(self, batch, batch_idx):
        step = self.trainer.global_step
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.validated.append(step)
        loss = self.val_losses.get(step, 10.0 - step)
        self.log_dict({"val/loss": loss, "val/accuracy": -loss, "step": float(step)}, batch_size=1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_load_checkpoint(self, checkpoint):
        if self.trainer.state.fn == "fit":
            rewrite_position(checkpoint, self.steps, self.accumulate)

    def weights(self) -> list[float]:
        return [*self.layer.weight.flatten().tolist(), *self.layer.bias.tolist()]


def trainer(folder, *callbacks, module=None, **options) -> L.Trainer:
    """A quiet CPU trainer in ``folder``."""
    settings = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "accumulate_grad_batches": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, Checkpoint) for c in callbacks),
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "plugins": [AtomicCheckpointIO()],
        "default_root_dir": str(folder),
    }
    return L.Trainer(callbacks=list(callbacks), **(settings | options))
