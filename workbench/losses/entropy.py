"""The entropy of the policy: which tokens have much of it, and a bonus that keeps it up."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import UserError


@torch.no_grad()
def entropy_threshold(entropy: Tensor, weights: Tensor, quantile: float) -> Tensor:
    """The entropy that a share ``quantile`` of the tokens reaches or exceeds, a scalar; infinity where there are no tokens.

    Args:
        entropy: of the policy at the tokens ``[T]``, nats.
        weights: ``[T]``; a token of weight 0 is none.
        quantile: share of the tokens, in (0, 1]; at least one token is taken.

    Raises:
        UserError: ``quantile`` is not in (0, 1].
    """
    if not 0 < quantile <= 1:
        raise UserError(f"method.top_entropy_quantile={quantile} must lie above 0 and be at most 1; 1 takes all tokens.")
    kept = entropy[weights != 0]
    if not kept.numel():
        return entropy.new_tensor(math.inf)
    # 0.1 * 30 is a little above 3; that must not take a fourth token.
    count = max(1, math.ceil(round(quantile * kept.numel(), 6)))
    return kept.topk(count).values[-1]


@torch.no_grad()
def top_entropy_mask(entropy: Tensor, weights: Tensor, quantile: float, threshold: Tensor | float | None = None) -> Tensor:
    """Whether a token is among those with the highest entropy, where the policy gradient does its work (Wang et al. 2025, "Beyond
    the 80/20 rule", arXiv:2506.01939) ``[T]``.

    Args:
        entropy: of the policy at the tokens ``[T]``, nats.
        weights: ``[T]``; tokens of weight 0 are not among them.
        quantile: share of the tokens, in (0, 1].
        threshold: as `entropy_threshold` gives it for more than these tokens; None: for these.
    """
    if threshold is None:
        threshold = entropy_threshold(entropy, weights, quantile)
    return (weights != 0) & (entropy >= threshold)


@dataclass
class EntropyController:
    """Weight of the entropy bonus, a constant or one that follows a target (Skywork-OR1, arXiv:2505.22312).

    The bonus is the plain mean of the entropy over tokens, whatever the loss.

    Args:
        coef: weight of the bonus, at first.
        adaptive: whether it follows the target.
        target: nats per token. At or below it the weight rises and the bonus acts; above it it falls and the bonus does
            not act.
        delta: change of the weight per optimizer step.
        min: its smallest value.
        max: its largest.
    """

    coef: float = 0.0
    adaptive: bool = False
    target: float = 0.2
    delta: float = 0.005
    min: float = 0.0
    max: float = 1.0

    @property
    def active(self) -> bool:
        """Whether there can be a bonus at all."""
        return self.adaptive or self.coef != 0

    def applied(self, entropy: float) -> float:
        """The weight of the bonus in a step whose policy has this entropy, nats per token."""
        return self.coef if not self.adaptive or entropy <= self.target else 0.0

    def update(self, entropy: float) -> None:
        """Once per optimizer step, with the entropy of its policy."""
        if self.adaptive:
            step = self.delta if entropy <= self.target else -self.delta
            self.coef = min(max(self.coef + step, self.min), self.max)

    def state_dict(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """From a checkpoint; a constant stays as configured."""
        if self.adaptive:
            self.coef = float(state["coef"])
