"""The fixture's rows as TRL's trainers take them. Imports no torch before a function runs."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
_BLOCK = 1000  # rows that TRL turns from pairs into labelled completions at a time


class Fixture(NamedTuple):
    """What rows may need besides themselves: the tokenizer, and the fixture's other rows by name."""

    tokenizer: "PreTrainedTokenizerBase"
    rows: Callable[[str], list[Row]]


Change = Callable[[list[Row], Fixture], list[Row]]


def text_column(name: str) -> Change:
    """Plain texts from a column of another name."""

    def change(rows: list[Row], fixture: Fixture) -> list[Row]:
        return rows if name == "text" or name not in rows[0] else [{"text": row[name]} for row in rows]

    return change


def one_conversation(rows: list[Row], fixture: Fixture) -> list[Row]:
    """Prompt and completion as one conversation, all of whose turns may be trained."""
    return [{"messages": row["prompt"] + row["completion"]} if "completion" in row else row for row in rows]


def shuffled(seed: int) -> Change:
    """The rows as ``datasets`` shuffles them under ``seed``."""

    def change(rows: list[Row], fixture: Fixture) -> list[Row]:
        from datasets import Dataset

        return [rows[i] for i in Dataset.from_dict({"i": range(len(rows))}).shuffle(seed=seed)["i"]]

    return change


def unpaired(rows: list[Row], fixture: Fixture) -> list[Row]:
    """Labelled completions from pairs: of each thousand the chosen ones, then the rejected ones."""
    if "chosen" not in rows[0]:
        return rows
    from workbench.data.formats import normalise_row

    pairs = [normalise_row(row, "preference") for row in rows]
    blocks = [pairs[i : i + _BLOCK] for i in range(0, len(pairs), _BLOCK)]
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": label}
        for block in blocks
        for side, label in (("chosen", True), ("rejected", False))
        for row in block
    ]


def rendered(rows: list[Row], fixture: Fixture) -> list[Row]:
    """Conversations as the texts that the chat template prints, which then end as plain texts do."""
    from workbench.invariants.rendered import as_text

    return as_text(rows, fixture.tokenizer)


def with_gold(rows: list[Row], fixture: Fixture) -> list[Row]:
    """Triples: the gold answer of a row is the completion of the same row of ``prompt_completion``, unless it has one."""
    if "reference" in rows[0]:
        return rows
    gold: Sequence[Row] = fixture.rows("prompt_completion")
    if len(gold) != len(rows):
        raise UserError(
            f"{len(rows)} pairs and {len(gold)} rows of prompt_completion make no triples: give a column 'reference'."
        )
    return [{**row, "reference": other["completion"]} for row, other in zip(rows, gold, strict=True)]
