"""Where a record and this project differ for a known reason. Each entry is argued in ``invariant_refs/README.md``.

Most are checked when they are called on: the case runs once more as TRL has it, and the field must match then. What is left are
differences of rounding, which are measured: runs of ours that differ in rounding alone must be about as far apart.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any
from unittest import mock

from workbench.invariants.parity_cases import Case

Facts = Mapping[str, int]
"""What no option says: ``cut_away`` rows left out and ``truncated`` rows kept in preparing, steps where the record has
``no_number`` for a loss, micro-batches ``accumulated`` in a step beyond the first, ``further_steps`` of a window beyond the
first."""


@dataclass(frozen=True)
class Expected:
    """A deviation that is known.

    Args:
        kinds: of the trainers.
        reason: why, in a line.
        fields: pattern of the fields' names.
        options: values of options that make it so, each one of several.
        extra: key of the case that makes it so.
        fact: what makes it so, unless it is 0.
        as_theirs: makes a run do as TRL does; None: the reason is not checked.
    """

    kinds: tuple[str, ...]
    reason: str
    fields: str = "*"
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    extra: str | None = None
    fact: str | None = None
    as_theirs: Callable[[], AbstractContextManager[Any]] | None = None

    def applies(self, case: Case, options: Callable[[str], Any], facts: Facts) -> bool:
        """Whether the case is one of these."""
        if case.kind not in self.kinds or (self.extra is not None and self.extra not in case.extras):
            return False
        if self.fact is not None and not facts.get(self.fact):
            return False
        return all(_any_of(options(name), values) for name, values in self.options.items())

    def covers(self, name: str) -> bool:
        """Whether a field is one of those that deviate."""
        return fnmatchcase(name, self.fields)


def _any_of(value: Any, values: tuple[Any, ...]) -> bool:
    return any(v in values for v in value) if isinstance(value, list) else value in values


# -- as TRL has it --------------------------------------------------------------------------------------------------


@contextmanager
def first_tokens_trained() -> Iterator[None]:
    """Wrapped packs train the first token of a document, on the document before it."""
    import numpy as np

    from workbench.data import packing

    gather = packing.gather

    def with_first_tokens(table: Any, starts: Any, stops: Any, sizes: Any, one_segment: bool) -> Any:
        made = gather(table, starts, stops, sizes, one_segment)
        if not one_segment:
            return made
        column = made["weights"].combine_chunks()
        weights, ends = column.flatten().to_numpy().copy(), np.cumsum(stops - starts)
        first = (ends - (stops - starts))[starts == 0]
        weights[np.setdiff1d(first, column.offsets.to_numpy())] = 1.0
        lists = type(column).from_arrays(column.offsets, weights)
        return made.set_column(made.column_names.index("weights"), "weights", lists)

    with mock.patch.object(packing, "gather", with_first_tokens):
        yield


@contextmanager
def lengths_with_first_token() -> Iterator[None]:
    """A completion that fills its row counts its first token, which nothing predicts, among those it is divided by."""
    from workbench.methods.completions import Completions

    build = Completions.__init__

    def with_first_token(self: Any, batch: Any, *arguments: Any) -> None:
        build(self, batch, *arguments)
        fills = (batch.parent < 0) & (self.lengths == batch.starts.diff() - 1) & (self.lengths > 0)
        self.lengths = self.lengths + fills.to(self.lengths.dtype)

    with mock.patch.object(Completions, "__init__", with_first_token):
        yield


@contextmanager
def added_up() -> Iterator[None]:
    """The losses of a step's micro-batches, added up."""
    from workbench.methods import base

    reduce = base.reduce

    def added(values: Any, weights: Any, norm: Any, **options: Any) -> Any:
        return reduce(values, weights, norm, **options) * norm.micro_batches

    with mock.patch.object(base, "reduce", added):
        yield


@contextmanager
def tokens_of_the_window() -> Iterator[None]:
    """Each step of a window is divided by the mean number of tokens of its steps."""
    from workbench.methods.window import Window

    plan = Window.plan

    def with_means(self: Any, *arguments: Any) -> None:
        plan(self, *arguments)
        tokens = sum(step.norm.tokens for step in self.plans) / len(self.plans)
        self.plans = [replace(step, norm=replace(step.norm, tokens=tokens)) for step in self.plans]

    with mock.patch.object(Window, "plan", with_means):
        yield


@contextmanager
def policy_loss_per_micro_batch() -> Iterator[None]:
    """The logged loss of the policy is the mean of its micro-batches' shares of the step's."""
    from workbench.methods.grpo import GRPO

    record = GRPO._record_policy_loss

    def divided(self: Any, terms: Any, batch: Any) -> None:
        record(self, [replace(term, coefficient=term.coefficient / batch.norm.num_micro) for term in terms], batch)

    with mock.patch.object(GRPO, "_record_policy_loss", divided):
        yield


@contextmanager
def coarse_sums(backwards: bool = False) -> Iterator[None]:
    """Log-probabilities of completions summed in fp32 rather than fp64, from either end."""
    import torch

    from workbench.losses import sequences

    exact = sequences.sequence_sums

    def coarse(values: Any, weights: Any, segment: Any, size: int) -> Any:
        kept = torch.where(weights == 0, 0.0, values.float() * weights.float())
        kept, segment = (kept.flip(0), segment.flip(0)) if backwards else (kept, segment)
        return kept.new_zeros(size).index_add(0, segment, kept)

    with mock.patch.object(sequences, "sequence_sums", coarse):
        users = [m for n, m in sorted(sys.modules.items()) if n.startswith("workbench.")]
        users = [m for m in users if getattr(m, "sequence_sums", None) is exact]
        for module in users:
            module.sequence_sums = coarse
        try:
            yield
        finally:
            for module in users:
                module.sequence_sums = exact


EXPECTED: tuple[Expected, ...] = (
    Expected(
        ("cpo", "orpo"),
        "TRL averages logits over prompt and padding; here over the completion, as its DPO does",
        fields="logits/*",
    ),
    Expected(
        ("dpo",),
        "TRL divides a completion that fills its row by one token more than it scores",
        options={"truncation_mode": ("keep_end",), "loss_type": ("ipo", "sigmoid_norm")},
        as_theirs=lengths_with_first_token,
    ),
    Expected(
        ("sft",),
        "TRL trains the first token of a document on the document before it",
        options={"packing": (True,), "packing_strategy": ("wrapped",)},
        as_theirs=first_tokens_trained,
    ),
    Expected(
        ("cpo", "orpo", "tpo"),
        "TRL keeps rows whose completions max_length cuts away; here they are left out",
        fact="cut_away",
    ),
    Expected(
        ("cpo",),
        "TRL's power of a summed log-probability underflows in fp32",
        fact="no_number",
    ),
    Expected(
        ("prm",),
        "TRL 1.13 takes the mean of no labels where max_length cuts away all those of a micro-batch",
        fact="no_number",
    ),
    Expected(
        ("prm",),
        "TRL 1.13 adds up the micro-batches of a step where it should average them",
        fact="accumulated",
        as_theirs=added_up,
    ),
    Expected(
        ("bco",),
        "TRL 1.13 sums logits over positions and vocabulary",
        fields="logits/*",
    ),
    Expected(
        ("bco",),
        "TRL 1.13 ends an answer that max_length cuts with an end token",
        fact="truncated",
    ),
    Expected(
        ("grpo",),
        "TRL divides each step of a window by the mean number of tokens of its steps; here by the step's own",
        options={"loss_type": ("dapo", "cispo", "vespo")},
        fact="further_steps",
        as_theirs=tokens_of_the_window,
    ),
    Expected(
        ("grpo",),
        "TRL logs the mean of the micro-batches' shares of the step's policy loss; here their sum, which the loss is made of",
        fields="policy_loss",
        fact="accumulated",
        as_theirs=policy_loss_per_micro_batch,
    ),
    Expected(
        ("bco",),
        "TRL 1.13 draws the prompts that it tells apart with repetition",
        extra="udm",
    ),
)


def expected(case: Case, options: Callable[[str], Any], facts: Facts) -> list[Expected]:
    """The entries for a case.

    Args:
        case: the record.
        options: the value of an option of the case, given or by default.
        facts: what preparing the rows came to.
    """
    return [entry for entry in EXPECTED if entry.applies(case, options, facts)]


def as_theirs(entries: Sequence[Expected]) -> list[Callable[[], AbstractContextManager[Any]]]:
    """What makes a run do as TRL does in all these points."""
    return [entry.as_theirs for entry in entries if entry.as_theirs is not None]
