"""Conversational rows as the texts that a chat template renders."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from workbench.data.chat import ChatRenderer
from workbench.data.formats import normalise_row

Row = dict[str, Any]


def as_text(rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Pairs or completions as plain text: the rendered prompt, with the assistant's header, and what the template prints after
    it.

    Plain completions end with the tokenizer's end token. So do these then, behind the terminator that the template prints
    itself, as some trainers have it. Rows that are text are left as they are.
    """
    data_type = "preference" if "chosen" in rows[0] else "unpaired_preference"
    return [_as_text(normalise_row(row, data_type), ChatRenderer(tokenizer)) for row in rows]


def _as_text(row: Row, renderer: ChatRenderer) -> Row:
    if isinstance(row["prompt"], str):
        return row
    prompt = renderer.render_prompt(row["prompt"])
    whole = {side: renderer.render([*row["prompt"], *row[side]]) for side in ("chosen", "rejected", "completion") if side in row}
    return {**row, "prompt": prompt, **{side: text.removeprefix(prompt) for side, text in whole.items()}}
