"""Early stopping on any metric by its printed name."""

from typing import Any, Literal

from lightning.pytorch.callbacks import EarlyStopping as LightningEarlyStopping

from workbench.errors import UserError, check_at_least, check_choice, nearest


class EarlyStopping(LightningEarlyStopping):
    """Lightning's early stopping, checked after every validation (before the checkpoint of that step is written), with
    its one error in one line.

    Args:
        monitor: metric by its printed name, such as ``val/loss``.
        mode: whether a low or a high metric is good.
        patience: how many validations without improvement are tolerated.
        min_delta: least change that counts as an improvement.
        stopping_threshold: stop as soon as the metric is this good.
        divergence_threshold: stop as soon as it is this bad.
        check_finite: stop if it is NaN or infinite.
        verbose: say at each validation what was decided.
    """

    def __init__(
        self,
        monitor: str = "val/loss",
        mode: Literal["min", "max"] = "min",
        patience: int = 3,
        min_delta: float = 0.0,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_finite: bool = True,
        verbose: bool = True,
    ) -> None:
        check_choice("mode", mode, ("min", "max"))
        check_at_least(0, patience=patience)
        super().__init__(
            monitor,
            mode=mode,
            patience=patience,
            min_delta=min_delta,
            stopping_threshold=stopping_threshold,
            divergence_threshold=divergence_threshold,
            check_finite=check_finite,
            verbose=verbose,
            check_on_train_epoch_end=False,
            log_rank_zero_only=True,
        )

    def _validate_condition_metric(self, logs: dict[str, Any]) -> bool:
        if self.monitor not in logs:
            names = sorted(name for name in logs if name not in ("step", "epoch"))
            raise UserError(
                f"early stopping monitor={self.monitor!r} is not among the metrics.{nearest(self.monitor, names)} "
                f"Available: {', '.join(names)}."
            )
        return True
