"""Rows whose prompt and completion come from different rows, for an estimate of how far the policy is from its reference.

In an order of rows, row i keeps its prompt and takes the completion of row i - 1; the first takes that of the last. The order is
the step's canonical one, or that of an evaluation set, neither of which depends on micro-batches or ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.data.batch import MicroBatch, Role
from workbench.data.plan import StepPlan
from workbench.losses.reduce import Normalisers, Scope

Row = dict[str, Any]


@dataclass(frozen=True)
class Mismatch:
    """Makes the mismatched rows that accompany micro-batches.

    Args:
        limit: longest row in tokens, as for the rows themselves; None: any.
        keep_end: a longer one keeps its end and not its start.
        scope: ``step``: a step's first micro-batch carries those of all micro-batches of its rank, in the order of the step;
            ``micro_batch``: each carries its own, within which completions are exchanged.
    """

    limit: int | None = None
    keep_end: bool = False
    scope: Scope = "step"

    def row(self, row: Row, before: Row) -> Row:
        """The prompt of ``row`` with the completion of ``before``, cut to the limit."""
        prompt = row["input_ids"][: _boundary(row)]
        completion, weights = (before[name][_boundary(before) :] for name in ("input_ids", "weights"))
        if not self.keep_end:
            completion, weights = [*completion, *before["tail_ids"]], [*weights, *before["tail_weights"]]
        excess = 0 if self.limit is None else max(0, len(prompt) + len(completion) - self.limit)
        if self.keep_end:
            from_prompt = min(excess, len(prompt))
            prompt = prompt[from_prompt:]
            completion, weights = completion[excess - from_prompt :], weights[excess - from_prompt :]
        else:  # a prompt that fills the limit alone has lost its own completion, and its row with it
            kept = len(completion) - excess
            completion, weights = completion[:kept], weights[:kept]
        segments = [(len(completion), 0, Role.KL)] if len(prompt) else [(len(completion), -1, Role.KL)]
        segments = [(len(prompt), -1, Role.PROMPT), *segments] if len(prompt) else segments
        lengths, parents, roles = zip(*segments, strict=True)
        return {
            "input_ids": [*prompt, *completion],
            "weights": [0.0] * len(prompt) + [*weights],
            "lengths": [*lengths],
            "parents": [*parents],
            "roles": [int(role) for role in roles],
        }

    def batches(
        self, rows: Callable[[int], Row], order: Sequence[int], micro: Sequence[Sequence[int]], norm: Normalisers, step: int = 0
    ) -> list[MicroBatch]:
        """Mismatched rows for each of several micro-batches, an empty one for an empty one.

        Args:
            rows: a prepared row by its index.
            order: all rows among which completions are exchanged.
            micro: the rows of each micro-batch.
            norm: normalisers of the step.
            step: the step within the epoch.
        """
        before = dict(zip(order, [*order[-1:], *order[:-1]], strict=True))
        return [
            MicroBatch.from_rows([self.row(rows(i), rows(before[i])) for i in index], index, norm, step=step, k=k)
            for k, index in enumerate(micro)
        ]

    def companions(self, rows: Callable[[int], Row], plan: StepPlan, rank: int, k: int, step: int) -> list[MicroBatch]:
        """What micro-batch ``k`` of a rank's share of a step carries."""
        micro = plan.micro[rank]
        if self.scope == "micro_batch":
            return self.batches(rows, micro[k], micro[k : k + 1], plan.norm, step)
        return self.batches(rows, plan.rows, micro, plan.norm, step) if k == 0 else []


def _boundary(row: Row) -> int:
    """Tokens before the completion, the last segment."""
    return len(row["input_ids"]) - row["lengths"][-1]
