"""`Window`: the completions that an online method trains on until it writes new ones.

Every rank holds all of it (token ids and a few numbers a token), so that the plan alone says which rank trains what, a checkpoint
needs one rank, and a resumed run may have another number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.data.batch import MicroBatch, Role
from workbench.data.plan import StepPlan
from workbench.data.prompts import PromptPlanner
from workbench.losses.reduce import Normalisers

Ragged = list[np.ndarray]


@dataclass
class Window:
    """N completions in plan order: those of a prompt lie together.

    Args:
        number: which window of the run.
        first: optimizer step of the epoch at which it begins.
        group: the prompt of each ``[N]``, counted from 0.
        prompt_ids: tokens of the prompts, one entry a group.
        token_ids: tokens of the completions ``[N]``.
        truncated: whether each was cut at the bound ``[N]``.
        trained: whether each takes part in the loss ``[N]``.
        counted: whether each takes part in means over completions ``[N]``.
        advantages: ``[N]``, fp64; 0 for those that nobody scored.
        sampler_logps: of the sampler, per token, NaN where it gives none; None: of no token.
        old_logps: of the policy at the start of the window, per token; None: not kept, as one step uses it up.
        ref_logps: of the reference, per token; None: there is none.
        old_entropy: of the policy at the start, per token; None: nothing asks for it.
        support: per completion the tokens that could be drawn at its positions, end to end, and how many each has; None: all.
        order: completions in the order in which steps take them; None: as they lie.
        version: of the weights that wrote it.
    """

    number: int
    first: int
    group: np.ndarray
    prompt_ids: Ragged
    token_ids: Ragged
    truncated: np.ndarray
    trained: np.ndarray
    counted: np.ndarray
    advantages: np.ndarray
    sampler_logps: Ragged | None = None
    old_logps: Ragged | None = None
    ref_logps: Ragged | None = None
    old_entropy: Ragged | None = None
    support: list[tuple[np.ndarray, np.ndarray]] | None = None
    order: list[int] | None = None
    version: int = 0
    plans: list[StepPlan] = field(default_factory=list)

    PER_TOKEN = ("sampler_logps", "old_logps", "ref_logps", "old_entropy")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each completion ``[N]``."""
        return np.array([len(ids) for ids in self.token_ids])

    def plan(self, planner: PromptPlanner, longest: int) -> None:
        """Deals the completions to steps, ranks and micro-batches; ``longest`` is the bound on a completion."""
        order, size = self.order or list(range(len(self))), planner.geometry.batch_size
        lengths = self.lengths
        tokens = [len(self.prompt_ids[g]) + n for g, n in zip(self.group.tolist(), lengths.tolist(), strict=True)]
        options = {
            "tokens": tokens,
            "weight": np.where(self.trained, lengths, 0).tolist(),
            "group": self.group.tolist(),
            "counted": self.counted.tolist(),
            "longest": longest,
        }
        self.plans = [planner.plan_step(order[i : i + size], **options) for i in range(0, len(order), size)]

    # -- micro-batches ----------------------------------------------------------------------------------------------

    def micro_batch(self, offset: int, rank: int, k: int) -> MicroBatch:
        """Micro-batch ``k`` of a rank's share of the window's step ``offset`` (of a sweep), with what is known per token."""
        plan = self.plans[offset % len(self.plans)]
        return self.batch_of(plan.micro[rank][k], plan.norm, offset, k)

    def batch_of(self, rows: Sequence[int], norm: Normalisers, step: int = 0, k: int = 0) -> MicroBatch:
        """Completions, those of a prompt that follow one another on one copy of it.

        The batch's ``row`` is the completion's index (a prompt's that of its first one); ``extras`` hold per output (``[T]``,
        fp64) what is known of tokens, and per segment ``advantages`` and ``counted`` ``[S]``.
        """
        if not len(rows):
            batch = MicroBatch.empty(norm, step=step, k=k)
            known = (*self._known(), "advantages", "counted")
            batch.extras = {name: torch.zeros(1, dtype=torch.float64) for name in known}
            return batch
        tokens, weights, parent, row, role = [], [], [], [], []
        group, prompt = None, -1
        for index in rows:
            if self.group[index] != group:
                group, prompt = self.group[index], len(row)
                tokens.append(self.prompt_ids[group])
                weights.append(np.zeros(len(tokens[-1]), dtype=np.float32))
                parent.append(-1), row.append(index), role.append(int(Role.PROMPT))
            if not len(self.token_ids[index]):
                continue  # an empty completion has no token to learn from
            tokens.append(self.token_ids[index])
            weights.append(np.full(len(tokens[-1]), float(self.trained[index]), dtype=np.float32))
            parent.append(prompt), row.append(index), role.append(int(Role.COMPLETION))
        batch = MicroBatch(
            tokens=torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
            weights=torch.from_numpy(np.concatenate(weights)),
            starts=torch.from_numpy(np.cumsum([0, *map(len, tokens)])),
            parent=torch.tensor(parent),
            row=torch.tensor(row),
            role=torch.tensor(role),
            norm=norm,
            step=step,
            k=k,
        )
        trained = self.trained_rows(batch)
        batch.extras = {name: _joined([getattr(self, name)[i] for i in trained]) for name in self._known()}
        completion = np.array(role) == int(Role.COMPLETION)
        batch.extras["advantages"] = torch.from_numpy(np.where(completion, self.advantages[row], 0.0))
        batch.extras["counted"] = torch.from_numpy(np.where(completion, self.counted[row], False).astype(np.float64))
        return batch

    def trained_rows(self, batch: MicroBatch) -> list[int]:
        """Completions that the outputs of a micro-batch belong to, in their order; none where nothing is trained."""
        completions = batch.row[batch.role == int(Role.COMPLETION)].tolist()
        return [row for row in completions if self.trained[row]]

    def _known(self) -> list[str]:
        return [name for name in self.PER_TOKEN if getattr(self, name) is not None]

    def support_of(self, batch: MicroBatch) -> tuple[Tensor, Tensor] | None:
        """The support of a micro-batch's outputs: token ids end to end, and how many each output has ``[T]``."""
        if self.support is None:
            return None
        rows = self.trained_rows(batch)
        if not rows:
            return torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
        ids, counts = zip(*(self.support[r] for r in rows), strict=True)
        return torch.from_numpy(np.concatenate(ids).astype(np.int64)), torch.from_numpy(np.concatenate(counts).astype(np.int64))

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, for a checkpoint."""
        state: dict[str, Any] = {"number": self.number, "first": self.first, "version": self.version, "order": self.order}
        for name in ("group", "truncated", "trained", "counted", "advantages"):
            state[name] = torch.from_numpy(getattr(self, name))
        for name in ("prompt_ids", "token_ids", *self._known()):
            state[name] = _flat(getattr(self, name))
        if self.support is not None:
            state["support"] = [_flat([ids for ids, _ in self.support]), _flat([counts for _, counts in self.support])]
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Window":
        """The inverse of `state_dict`; `plan` comes after it."""
        fields = {name: state[name] for name in ("number", "first", "version", "order")}
        fields |= {name: state[name].numpy() for name in ("group", "truncated", "trained", "counted", "advantages")}
        ragged = ("prompt_ids", "token_ids", *(name for name in cls.PER_TOKEN if name in state))
        fields |= {name: _ragged(state[name]) for name in ragged}
        if "support" in state:
            fields["support"] = list(zip(*map(_ragged, state["support"]), strict=True))
        return cls(**fields)


def _joined(parts: Ragged) -> Tensor:
    """Per-token numbers of a micro-batch's outputs; one zero where none is trained, as `MicroBatch.outputs` has one then."""
    return torch.from_numpy(np.concatenate(parts).astype(np.float64)) if parts else torch.zeros(1, dtype=torch.float64)


def _flat(parts: Ragged) -> dict[str, Tensor]:
    values = np.concatenate(parts) if parts else np.zeros(0)
    return {"values": torch.from_numpy(values), "lengths": torch.tensor([len(part) for part in parts])}


def _ragged(flat: dict[str, Tensor]) -> Ragged:
    lengths = flat["lengths"].numpy()
    return np.split(flat["values"].numpy(), np.cumsum(lengths)[:-1]) if len(lengths) else []
