"""`MicroBatch`: what one forward pass gets, ragged and free of any layout."""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.losses.reduce import Normalisers


class Role(IntEnum):
    """What a segment of a row is."""

    TEXT = 0
    PROMPT = 1
    COMPLETION = 2
    CHOSEN = 3
    REJECTED = 4
    KL = 5
    GOLD = 6
    STEP = 7


# Columns of a prepared row that hold its segments, and what was cut off the last of them; every other column of numbers becomes
# one of `MicroBatch.extras`.
SEGMENT_COLUMNS = ("input_ids", "weights", "lengths", "parents", "roles")
TAIL_COLUMNS = ("tail_ids", "tail_weights")
# What counts the trained tokens of single completions in `Normalisers`, and the roles it counts where the first one is there. A
# pair's prompt, if it is trained at all, goes before its chosen completion.
NORMALISED_ROLES = {"chosen": (Role.CHOSEN, Role.PROMPT), "gold": (Role.GOLD,)}


class MicroBatch:
    """A forest of token segments.

    No dataclass: Lightning's half-precision plugins cast every float tensor of one, which would round weights and
    log-probabilities.

    N tokens in S segments of R rows. A segment with a parent continues the parent's context (a completion its prompt); one
    without starts a sequence. Tokens of a segment lie together, in order.

    Args:
        tokens: token ids ``[N]``.
        weights: weight of predicting each token ``[N]``; 0 = not trained. A root segment's first token has no context: always 0.
        starts: segment s holds tokens ``starts[s]:starts[s + 1]``, ``[S + 1]``.
        parent: the segment that each one continues, or -1, ``[S]``; always an earlier one.
        row: the plan row (index in the data set) of each segment ``[S]``; -1 in an empty micro-batch.
        role: `Role` of each segment ``[S]``.
        extras: per-row tensors ``[R]``, in the order of the rows (label, margin, advantages ...), numbers in fp64; columns of
            lists lie end to end (the labels of steps: one per `Role.STEP` segment).
        norm: normalisers of the optimizer step that this belongs to.
        step: index of that step within the epoch.
        k: which of the step's ``norm.num_micro`` micro-batches on this rank.
        companions: further micro-batches that a method runs beside it (see `workbench.data.mismatched`).
        is_empty: True for the stand-in that keeps ranks in step: two untrained tokens, no row. Said here and not read from
            ``row``, which may lie on a device that the host would have to wait for.
    """

    def __init__(
        self,
        *,
        tokens: Tensor,
        weights: Tensor,
        starts: Tensor,
        parent: Tensor,
        row: Tensor,
        role: Tensor,
        norm: Normalisers,
        step: int = 0,
        k: int = 0,
        extras: dict[str, Tensor] | None = None,
        companions: Sequence["MicroBatch"] = (),
        is_empty: bool = False,
    ) -> None:
        self.tokens = tokens
        self.weights = weights
        self.starts = starts
        self.parent = parent
        self.row = row
        self.role = role
        self.norm = norm
        self.step = step
        self.k = k
        self.extras = extras or {}
        self.companions = list(companions)
        self.is_empty = is_empty

    @property
    def closes_step(self) -> bool:
        """True for the step's last micro-batch on this rank."""
        return self.k == self.norm.num_micro - 1

    @property
    def num_tokens(self) -> int:
        """Real tokens in it (0 if empty)."""
        return 0 if self.is_empty else len(self.tokens)

    @property
    def num_rows(self) -> int:
        """Rows in it (0 if empty)."""
        return 0 if self.is_empty else len(torch.unique_consecutive(self.row))

    @property
    def trained(self) -> Tensor:
        """Indices into ``tokens`` of the trained ones ``[T]``, the order in which `Policy` returns log-probabilities."""
        return self.weights.nonzero().squeeze(-1)

    @property
    def outputs(self) -> Tensor:
        """Indices into ``tokens`` of those that `Policy` gives outputs for: `trained`, or one token of weight 0 where none is, so
        that the head runs in any case."""
        trained = self.trained
        return trained if len(trained) else trained.new_ones(1)

    def segments_of(self, role: Role) -> Tensor:
        """The segments of one role, in the order of the rows."""
        return (self.role == int(role)).nonzero().squeeze(-1)

    def ends(self) -> Tensor:
        """Index of the last token of every sequence: of each segment that none continues, in order."""
        leaf = torch.ones_like(self.parent, dtype=torch.bool)
        leaf[self.parent[self.parent >= 0]] = False
        return self.starts[1:][leaf] - 1

    @property
    def segment(self) -> Tensor:
        """The segment of each token ``[N]``."""
        return torch.repeat_interleave(torch.arange(len(self.row), device=self.tokens.device), self.starts.diff())

    def predictors(self) -> Tensor:
        """For each of `outputs` the index of the token whose hidden state predicts it ``[T]``."""
        index = self.outputs
        segment = self.segment[index]
        parent = self.parent[segment]
        parent_last = self.starts[parent.clamp(min=0) + 1] - 1
        return torch.where(index == self.starts[segment], parent_last, index - 1)

    def to(self, device: Any, **kwargs: Any) -> "MicroBatch":
        """The same micro-batch on ``device``."""
        moved = {k: v.to(device, **kwargs) if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        single = torch.device(device).type == "mps"  # which has no fp64
        extras = {k: v.float() if single and v.dtype == torch.float64 else v for k, v in self.extras.items()}
        moved["extras"] = {k: v.to(device, **kwargs) for k, v in extras.items()}
        moved["companions"] = [c.to(device, **kwargs) for c in self.companions]
        return MicroBatch(**moved)

    def __getstate__(self) -> dict[str, Any]:
        # A loader's worker hands over each tensor as an open file; a step's companions would need hundreds of them.
        return {**vars(self), "companions": [_converted(vars(c), Tensor, _to_numpy) for c in self.companions]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        companions = [MicroBatch(**_converted(c, np.ndarray, torch.from_numpy)) for c in state["companions"]]
        vars(self).update({**state, "companions": companions})

    @classmethod
    def from_rows(
        cls, rows: Sequence[dict[str, Any]], index: Sequence[int], norm: Normalisers, *, step: int = 0, k: int = 0
    ) -> "MicroBatch":
        """Assembles prepared rows.

        Args:
            rows: prepared rows (`SEGMENT_COLUMNS` and scalar extras).
            index: their positions in the data set.
            norm: normalisers of the step.
            step: the step within the epoch.
            k: the micro-batch within the step.
        """
        if not rows:
            return cls.empty(norm, step=step, k=k)
        segments = [len(r["lengths"]) for r in rows]
        lengths = np.concatenate([np.asarray(r["lengths"], dtype=np.int64) for r in rows])
        first = np.repeat(np.cumsum([0, *segments[:-1]]), segments)
        parent = np.concatenate([np.asarray(r["parents"], dtype=np.int64) for r in rows])
        parent = np.where(parent >= 0, parent + first, -1)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        weights = np.concatenate([np.asarray(r["weights"], dtype=np.float32) for r in rows])
        weights[starts[:-1][parent < 0]] = 0.0
        extras = [key for key, value in rows[0].items() if key not in SEGMENT_COLUMNS + TAIL_COLUMNS and _is_numeric(value)]
        return cls(
            tokens=torch.from_numpy(np.concatenate([np.asarray(r["input_ids"], dtype=np.int64) for r in rows])),
            weights=torch.from_numpy(weights),
            starts=torch.from_numpy(starts),
            parent=torch.from_numpy(parent),
            row=torch.from_numpy(np.repeat(np.asarray(index, dtype=np.int64), segments)),
            role=torch.from_numpy(np.concatenate([np.asarray(r["roles"], dtype=np.int64) for r in rows])),
            norm=norm,
            step=step,
            k=k,
            extras={key: _extra([r[key] for r in rows]) for key in extras},
        )

    @classmethod
    def empty(cls, norm: Normalisers, *, step: int = 0, k: int = 0) -> "MicroBatch":
        """Two tokens of weight 0 and no row: every module runs, nothing is learnt, and no collective is missed."""
        return cls(
            tokens=torch.zeros(2, dtype=torch.int64),
            weights=torch.zeros(2),
            starts=torch.tensor([0, 2]),
            parent=torch.tensor([-1]),
            row=torch.tensor([-1]),
            role=torch.tensor([int(Role.TEXT)]),
            norm=norm,
            step=step,
            k=k,
            is_empty=True,
        )


def _to_numpy(tensor: Tensor) -> Any:
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def _converted(fields: dict[str, Any], kind: type, convert: Callable[[Any], Any]) -> dict[str, Any]:
    extras = {k: convert(v) for k, v in fields["extras"].items()}
    return {**{k: convert(v) if isinstance(v, kind) else v for k, v in fields.items()}, "extras": extras}


def _is_numeric(value: Any) -> bool:
    value = value[0] if isinstance(value, list) and value else value
    return isinstance(value, (bool, int, float, np.number))


def _extra(values: list[Any]) -> Tensor:
    """One column of extras; fp64, since a reference's log-probabilities are large and their differences small."""
    flat = np.concatenate([np.asarray(v) for v in values]) if isinstance(values[0], list) else np.asarray(values)
    return torch.from_numpy(flat.astype(np.float64) if flat.dtype.kind == "f" else flat)
