"""What an inspection found wrong, in sentences with the way out.

A *fault* makes ``workbench inspect`` exit with 1. It is one of:

- no row can be trained, or training would stop at a row that cannot be read;
- a sequence starts with two start tokens, in any row;
- no row trains an end token;
- a share of the rows that reaches ``tolerance`` (a tenth, by default) has no trained token, loses its end to the length limit,
  trains no end token, trains nothing but end tokens, is left out for another reason, loses text to the chat template, or
  (evaluation) is in the training set as well.

Below that share each of these is a *warning*, as are duplicates, reasoning that the template leaves out, completions with
messages of other roles, columns that look misspelt, packs and steps that waste much, and labels that are all alike.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from workbench.data.formats import meant_by, unread_column
from workbench.data.inspection import SetInspection
from workbench.data.inspection_steps import Steps

TOLERANCE = 0.1
_WASTE = 0.5  # share of padding from which on it is a warning
_OTHER_REASONS = {
    "cut_away": "lose all their trained tokens to data.max_length={limit} and are left out: raise it, or set "
    "data.truncation={other}",
    "too_long": "are longer than data.max_length={limit} and are left out: raise it, or set data.truncation=keep_start",
    "identical_pair": "have the same chosen and rejected answer and are left out: check how the pairs were made",
    "empty": "are empty and are left out",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Args:
        level: see the module.
        kind: a short name, the same for the same trouble.
        where: the data set, or ``steps``.
        text: a sentence with the way out.
    """

    level: Literal["fault", "warning"]
    kind: str
    where: str
    text: str


def find(
    sets: Mapping[str, SetInspection],
    steps: Steps | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tolerance: float = TOLERANCE,
) -> list[Finding]:
    """All findings, faults first."""
    found = []
    for name, data in sets.items():
        found += list(_Judge(name, data, tokenizer, tolerance).findings())
    if steps is not None:
        found += list(_step_findings(steps, sets["train"]))
    return sorted(found, key=lambda f: f.level != "fault")


class _Judge:
    """Judges one set."""

    def __init__(self, name: str, data: SetInspection, tokenizer: PreTrainedTokenizerBase, tolerance: float) -> None:
        self.name = name
        self.data = data
        self.report = data.report
        self.tokenizer = tokenizer
        self.tolerance = tolerance
        self.template = f"the chat template {data.report.template}" if data.report.template else "the tokenizer"

    def findings(self) -> Iterator[Finding]:
        yield from self._left_out()
        if not self.data.error:
            yield from self._masks()
            yield from self._ends()
            yield from self._rows()
        yield from self._columns()

    def _fault(self, kind: str, text: str) -> Finding:
        return Finding("fault", kind, self.name, text)

    def _warning(self, kind: str, text: str) -> Finding:
        return Finding("warning", kind, self.name, text)

    def _share(self, kind: str, count: int, text: str, *, of: int | None = None, only_warn: bool = False) -> Iterator[Finding]:
        """A finding about ``count`` rows: a fault if their share reaches the tolerance."""
        rows = self.report.rows_in if of is None else of
        if not count:
            return
        first = "the first " if self.data.error or self.data.is_stream else ""
        level = "fault" if count >= self.tolerance * rows and not only_warn else "warning"
        yield Finding(level, kind, self.name, f"{count:,} of {first}{rows:,} rows ({count / rows:.1%}) {text}.")

    def _left_out(self) -> Iterator[Finding]:
        report, spec = self.report, self.data.spec
        if self.data.error:
            yield self._fault("empty", self.data.error)
        if self.data.stops:
            count = report.dropped.get("bad_row", 0)
            text = f"training stops at a row that cannot be read ({count:,} of {report.rows_in:,} are such): {self.data.stops} "
            yield self._fault("bad_row", text + "Mend the rows, or leave them out with data.on_bad_row=skip.")
        else:
            first = f" (first: {report.bad_rows[0].rstrip('.')})" if report.bad_rows else ""
            yield from self._share("bad_row", report.dropped.get("bad_row", 0), f"cannot be read and are skipped{first}")
        within = f" with {self.template}" if report.template else ""
        yield from self._share(
            "untrained",
            report.untrained_rows,
            f"have no trained token under data.train_on={report.train_on or spec.train_on}{within} and are left out: see that "
            "they hold the part to train (an assistant turn, a completion), or train another part",
        )
        other = "keep_start" if spec.truncation == "keep_end" else "keep_end"
        for reason, text in _OTHER_REASONS.items():
            text = text.format(limit=spec.max_length, other=other)
            yield from self._share(reason, report.dropped.get(reason, 0), text)

    def _masks(self) -> Iterator[Finding]:
        report, spec = self.report, self.data.spec
        longest = f" (the longest row looked at has {self.data.longest:,} tokens)" if self.data.longest else ""
        yield from self._share(
            "cut",
            report.cut_before_terminator,
            f"lose trained tokens at their end, where the terminator is, to data.max_length={spec.max_length}: raise "
            f"it{longest}, or leave such rows out with data.truncation=drop",
        )
        lost = f"assistant's text or tool calls that {self.template} does not print: use a template that does"
        yield from self._share("text_dropped", report.text_dropped, f"hold an {lost}")
        yield from self._share(
            "reasoning_dropped",
            report.reasoning_dropped,
            f"hold reasoning that {self.template} does not print, so that it is not trained: use a template that keeps it in "
            "every turn, or take it as meant",
            only_warn=True,
        )
        yield from self._share(
            "prompt_differs",
            report.prompt_differs,
            "do not begin with the tokens of their prompt alone, so that the model is asked otherwise than it is trained: move "
            "a space at the prompt's end to the answer, or train answers with the thinking that the template opens",
            only_warn=True,
        )
        yield from self._share(
            "other_roles",
            report.other_roles,
            "have completions with messages of other roles, trained as well: use data.train_on=assistant",
            only_warn=True,
        )

    def _ends(self) -> Iterator[Finding]:
        counts, report = self.data.counts, self.report
        if counts.double_bos:
            yield self._fault(
                "double_bos",
                f"{counts.double_bos:,} of {counts.rows:,} rows start with two start tokens ({self.tokenizer.bos_token}), which "
                f"{self.template} and the rows' own text write: take one of them out of model.chat_template or of the text.",
            )
        elif report.double_bos:
            text = f"bring a start token of their own ({self.tokenizer.bos_token}), of which one is kept"
            yield from self._share("double_bos", report.double_bos, text, only_warn=True)
        if not self.data.ends_expected:
            return
        names = " or ".join(self.tokenizer.convert_ids_to_tokens(list(self.data.ends)))
        if counts.rows and not counts.ended and counts.unended:
            yield self._fault(
                "no_terminator",
                f"no row trains an end token ({names or 'the tokenizer has none'}) after its last text, so that the model does "
                f"not learn to stop: {self._end_hint()}.",
            )
        else:
            text = f"train no end token ({names}) after their last text: {self._end_hint()}"
            yield from self._share("no_terminator", counts.unended, text, of=counts.rows)
        text = f"train nothing but an end token ({names}): their answers are empty"
        yield from self._share("empty_answer", counts.blank, text, of=counts.rows)

    def _end_hint(self) -> str:
        if self.report.open_markers:
            return f"the generation markers of {self.template} close before the turn's terminator; move it inside them"
        if self.report.unterminated:
            return f"{self.template} ends a conversation without a terminator; use one that closes every turn"
        return "check model.chat_template and model.eos_token"

    def _rows(self) -> Iterator[Finding]:
        data, counts = self.data, self.data.counts
        text = "repeat an earlier row, token for token: take them out, or weigh their source on purpose"
        yield from self._share("duplicates", counts.duplicates, text, of=counts.rows, only_warn=True)
        text = "are in the training set as well: take them out of one of the two, or the measure means little"
        yield from self._share("leak", data.also_in_train, text, of=counts.rows)
        text = "have no margin, which counts as 0: give them one, or leave the column out"
        yield from self._share("margin", data.report.no_margin, text, only_warn=True)
        if len(data.labels) == 1 and data.report.rows_out > 1:
            label = next(iter(data.labels))
            yield self._warning("labels", f"all labels are {label}: there is nothing to tell apart.")
        if data.packing is not None and data.packing.untrained:
            text = f"{data.packing.untrained:,} of {data.packing.packs:,} packs hold no trained token"
            yield self._warning("untrained_packs", f"{text}: data.packing=bfd keeps rows whole.")
        if data.report.template and "strftime_now" in str(self.tokenizer.chat_template):
            text = (
                f"{self.template} prints today's date, so that rows differ from day to day: fix it in data.chat_template_kwargs."
            )
            yield self._warning("date", text)

    def _columns(self) -> Iterator[Finding]:
        for column in self.report.unused_columns:
            if meant_by(column):
                yield self._warning("column", unread_column(column))


def _step_findings(steps: Steps, train: SetInspection) -> Iterator[Finding]:
    if steps.padding >= _WASTE:
        text = (
            f"{steps.padding:.0%} of the computed tokens are padding: set method.layout=packed, or bound micro-batches by "
            "data.micro_batch_tokens."
        )
        yield Finding("warning", "padding", "steps", text)
    rows = len(train.rows) if train.rows is not None else 0
    if rows < steps.batch_size and not train.is_stream:
        text = f"data.batch_size={steps.batch_size} is more than there are rows ({rows:,}): every step takes the whole set."
        yield Finding("warning", "batch", "steps", text)
