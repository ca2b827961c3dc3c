"""The seven data types, in standard (text) and conversational (messages) form, and one row of them brought to one form.

===================== ==================================== ===================================================
type                  columns                              also read
===================== ==================================== ===================================================
language_modeling     text | messages                      conversations (from/value)
prompt_only           prompt                               instruction (+ input, history)
prompt_completion     prompt, completion                   instruction, output (+ input, history)
preference            prompt, chosen, rejected             chosen, rejected with the prompt inside; conversations
                                                           or instruction as the prompt
triple_preference     prompt, chosen, rejected, reference  as preference; the gold answer ``reference`` with or without
                                                           the prompt inside
unpaired_preference   prompt, completion, label            messages, label; instruction, output, label
stepwise_supervision  prompt, completions, labels
===================== ==================================== ===================================================

`normalise_row` is the one gate between rows and the rest of the program: whatever reads rows reads them through it.
"""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workbench.data.images import attach_images, refuse_audio
from workbench.data.jsontext import decode_row
from workbench.data.messages import Place, normalise_messages, normalise_tools, parse_bool, short
from workbench.data.pairs import after_prompt, split_text, split_turns
from workbench.errors import UserError, check_choice

DATA_TYPES = (
    "language_modeling",
    "prompt_only",
    "prompt_completion",
    "preference",
    "triple_preference",
    "unpaired_preference",
    "stepwise_supervision",
)
# A triple is a pair with a gold answer beside it: what asks for pairs takes triples for them.
WITHOUT_TRIPLES = tuple(name for name in DATA_TYPES if name != "triple_preference")
DROP = "_drop"  # key of a row that can teach nothing; its value is the reason

ALIASES = {
    **dict.fromkeys(("conversations", "conversation"), "messages"),
    **{f"{side}_{name}": side for side in ("chosen", "rejected") for name in ("messages", "conversations")},
}
# Most specific first: the first one whose columns are there wins.
_SIGNATURES: tuple[tuple[str, tuple[set[str], ...]], ...] = (
    ("stepwise_supervision", ({"prompt", "completions", "labels"},)),
    ("triple_preference", ({"chosen", "rejected", "reference"},)),
    ("preference", ({"chosen", "rejected"},)),
    (
        "unpaired_preference",
        ({"prompt", "completion", "label"}, {"messages", "label"}, {"instruction", "output", "label"}),
    ),
    ("prompt_completion", ({"prompt", "completion"}, {"instruction", "output"}, {"instruction", "response"})),
    ("language_modeling", ({"messages"}, {"text"})),
    ("prompt_only", ({"prompt"}, {"instruction"})),
)
# Those that belong to a type wherever they stand; a ``reference`` is often the answer that a reward compares with.
TYPE_COLUMNS = ("text", "messages", "prompt", "completion", "chosen", "rejected", "label", "completions", "labels")
SYSTEM_COLUMNS = ("system", "system_prompt")
# A column's own name and its aliases.
_NAMES = {name: (name, *(a for a, target in ALIASES.items() if target == name)) for name in {*TYPE_COLUMNS, *ALIASES.values()}}
# Every column that `normalise_row` may read.
READ_COLUMNS = {
    *TYPE_COLUMNS,
    *ALIASES,
    *SYSTEM_COLUMNS,
    *("instruction", "input", "context", "history", "output", "response"),
    *("tools", "images", "image", "margin", "reference"),
}
_IMAGE_WORDS = ("image", "img", "photo", "picture")
# Other names that public data sets use for a column, for the hint in an error.
_OTHER_NAMES = {
    "prompt": ("question", "query", "problem", "input", "prompts"),
    "completion": ("answer", "response", "output", "solution", "target", "completions"),
    "chosen": ("accepted", "preferred", "winner", "positive"),
    "rejected": ("dispreferred", "loser", "negative"),
    "reference": ("gold", "golden", "ground_truth"),
    "label": ("kto_tag", "labels", "is_desirable"),
    "completions": ("steps", "completion"),
    "labels": ("label", "ratings"),
    "text": ("content", "document"),
    "messages": ("message", "dialog", "dialogue", "chat"),
}


def detect_type(columns: Iterable[str] | Mapping[str, Any], allowed: Sequence[str] | None = None) -> str:
    """The data type that the columns make, the most specific one if several fit.

    Args:
        columns: column names, or a row (columns that are None do not count).
        allowed: look among these types only.

    Raises:
        UserError: no type fits (the message lists the columns and the nearest type), or the rows say which of them are good
            and none of the allowed types would listen.
    """
    if isinstance(columns, Mapping):
        columns = [name for name, value in columns.items() if value is not None]
    columns = list(columns)
    names = {ALIASES.get(name, name) for name in columns}
    for data_type, signatures in _SIGNATURES:
        if not any(s <= names for s in signatures):
            continue
        if allowed is None or data_type in allowed:
            return data_type
        if data_type == "unpaired_preference":
            raise UserError(
                f"The columns {', '.join(columns)} make {data_type}: rows with a false label are bad answers. To train on the "
                "good ones set convert: prompt_completion in the source; on all of them, data.data_type=prompt_completion."
            )
    raise UserError(_no_type_message(columns, names, allowed))


def _no_type_message(columns: list[str], names: set[str], allowed: Sequence[str] | None) -> str:
    wanted = tuple(allowed or DATA_TYPES)
    other = "" if allowed is None else next((t for t, sets in _SIGNATURES if any(s <= names for s in sets)), "")
    candidates = [s for t, sets in _SIGNATURES if t in wanted for s in sets]
    best = max(candidates, key=lambda s: (sum(n in names or bool(_similar(n, columns)) for n in s) / len(s), len(s & names)))
    parts = [f"The columns {', '.join(columns) or '(none)'} "]
    parts.append(f"make {other}, but this needs {' or '.join(wanted)}." if other else "fit no data type.")
    parts.append(f" Nearest: {', '.join(sorted(best))}; missing: {', '.join(sorted(best - names))}.")
    renames = {old: new for new in sorted(best - names) for old in (_similar(new, columns),) if old}
    if renames:
        listed = ", ".join(f"{old}: {new}" for old, new in renames.items())
        parts.append(f" Rename with columns={{{listed}}} in the source.")
    elif other:
        parts.append(" Convert with convert: <type> in the source if that is possible.")
    return "".join(parts)


def _similar(name: str, columns: Iterable[str]) -> str | None:
    """The present column that seems to be meant by ``name``."""
    lower = {c.lower(): c for c in columns}
    for candidate in (name, *_OTHER_NAMES.get(name, ())):
        if candidate in lower and lower[candidate] not in TYPE_COLUMNS:
            return lower[candidate]
    close = difflib.get_close_matches(name, [c for c in lower if lower[c] not in TYPE_COLUMNS], n=1)
    return lower[close[0]] if close else None


def meant_by(column: str) -> str | None:
    """The column that an unread one looks like a misspelling of, if any."""
    read = (*TYPE_COLUMNS, *SYSTEM_COLUMNS, "tools", "images", "margin", "chat_template_kwargs")
    near = difflib.get_close_matches(column, read, n=1, cutoff=0.8)
    return near[0] if near else "images" if any(word in column.lower() for word in _IMAGE_WORDS) else None


def unread_column(column: str) -> str:
    """What to say of a column for which `meant_by` finds one."""
    meant = meant_by(column)
    way = f"if {meant!r} is meant, rename it: columns={{{column}: {meant}}} in the source"
    return f"column {column!r} is read by nothing; {way}."


def is_conversational(row: Mapping[str, Any], data_type: str | None = None) -> bool:
    """Whether `normalise_row` gives messages (rather than text) for this row."""
    row = {
        ALIASES.get(name, name): value for name, value in decode_row(row).items() if value is not None or name in SYSTEM_COLUMNS
    }
    names = set(TYPE_COLUMNS) if data_type is None else {c for t, sets in _SIGNATURES if t == data_type for s in sets for c in s}
    if "messages" in names & row.keys() or ("instruction" in row and not row.keys() & {"prompt", "text"}):
        return True
    if "prompt" in names & row.keys() and any(name in row for name in SYSTEM_COLUMNS):
        return True
    return any(_holds_messages(row[name]) for name in names & row.keys())


def _holds_messages(value: Any) -> bool:
    turns = [value] if isinstance(value, Mapping) else value
    return isinstance(turns, list | tuple) and bool(turns) and all(isinstance(turn, Mapping) for turn in turns)


def drop_reason(row: Mapping[str, Any]) -> str | None:
    """Why a normalised row can teach nothing (``identical_pair``), or None."""
    return row.get(DROP)


def normalise_row(
    row: Mapping[str, Any],
    data_type: str | None = None,
    *,
    index: int | None = None,
    roles: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A row with the columns of its type in one form; its other columns follow unchanged.

    Messages as in `workbench.data.messages`. ``tools`` is a list of schemas, left out when there are none; ``images`` a
    list, left out when there are none. Text and messages in one row become messages. A ``system`` column becomes the
    first message (and makes text a conversation). Preferences get an explicit prompt: of messages, the longest
    common beginning that leaves each answer a message; of texts, see `workbench.data.pairs.split_text`. An identical
    pair carries `drop_reason`. ``label`` is a bool; ``labels`` are floats, -100 for a step to ignore.

    Args:
        row: as the source gives it.
        data_type: one of `DATA_TYPES`; None: `detect_type` of the row.
        index: number of the row, for error messages.
        roles: further role names and the role each stands for.

    Raises:
        UserError: names row, column and value.
    """
    row = decode_row(row)
    refuse_audio(row, index)
    data_type = detect_type(row) if data_type is None else data_type
    check_choice("data_type", data_type, DATA_TYPES)
    reader = _Reader(row, data_type, index, roles)
    columns = _NORMALISERS[data_type](reader)
    return attach_images({**columns, **reader.tools(), **reader.rest()}, tuple(columns), index)


class _Reader:
    """Takes columns out of a row; what is left in the end are the row's other columns."""

    def __init__(self, row: dict[str, Any], data_type: str, index: int | None, roles: Mapping[str, str] | None) -> None:
        self.row = row
        self.data_type = data_type
        self.index = index
        self.roles = roles
        self.left = dict(row)

    def place(self, name: str) -> Place:
        return Place(self.index, name)

    def take(self, *names: str) -> Any:
        """Value of the first of the columns that is there and not None (aliases included), else None."""
        for name in names:
            for alias in _NAMES.get(name, (name,)):
                if self.left.get(alias) is not None:
                    return self.left.pop(alias)
        return None

    def need(self, *names: str) -> Any:
        value = self.take(*names)
        if value is None:
            present = ", ".join(k for k, v in self.row.items() if v is not None) or "none"
            hint = _similar(names[0], [k for k, v in self.row.items() if v is not None])
            way = f" Rename with columns={{{hint}: {names[0]}}} in the source." if hint else ""
            raise self.place(names[0]).error(f"missing for {self.data_type}. Columns with a value: {present}.{way}")
        return value

    def text_or_messages(self, value: Any, name: str) -> Any:
        if isinstance(value, str):
            return value
        if isinstance(value, Mapping | list | tuple):
            return [] if not value and name == "prompt" else normalise_messages(value, self.place(name), self.roles)
        raise self.place(name).error(f"{short(value)} is {type(value).__name__}; expected text or a list of messages.")

    def system(self) -> str | None:
        """The system column's text; "" if the column is there and empty, None if there is none."""
        present = [name for name in SYSTEM_COLUMNS if name in self.left]
        value = self.take(*SYSTEM_COLUMNS)
        for name in present:
            self.left.pop(name, None)
        if value is not None and not isinstance(value, str):
            raise self.place(present[0]).error(f"{short(value)} is {type(value).__name__}; expected text.")
        return (value or "") if present else None

    def with_system(self, messages: list[dict], name: str) -> list[dict]:
        system = self.system()
        if not system:
            return messages
        if messages and messages[0]["role"] in ("system", "developer"):
            if messages[0]["content"] == system:
                return messages
            raise self.place(name).error("the row has a system column and another system message; keep one of them.")
        return [{"role": "system", "content": system}, *messages]

    def prompt(self, *, required: bool = True) -> Any:
        """Text or messages of the prompt, from ``prompt`` or from the instruction columns."""
        if self.left.get("prompt") is None and self.left.get("instruction") is not None:
            return self._instruction()
        value = self.need("prompt") if required else self.take("prompt")
        return None if value is None else self.text_or_messages(value, "prompt")

    def _instruction(self) -> list[dict]:
        """Alpaca columns: instruction and input joined by a line break, after the turns of ``history``."""
        history = self.take("history") or []
        parts = [self.take("instruction"), self.take("input", "context")]
        for name in ("history", "input", "context"):
            self.left.pop(name, None)
        for name, part in zip(("instruction", "input"), parts, strict=True):
            if part is not None and not isinstance(part, str):
                raise self.place(name).error(f"{short(part)} is {type(part).__name__}; expected text.")
        turns = []
        for turn in history:
            if not (isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(t, str) for t in turn)):
                raise self.place("history").error(f"{short(turn)} is not a pair of texts [question, answer].")
            turns += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
        return [*turns, {"role": "user", "content": "\n".join(p for p in parts if p)}]

    def prompt_and(self, **answers: Any) -> dict[str, Any]:
        """The prompt and answers in one form: all text, or all messages (also where there is a system column)."""
        prompt = answers.pop("prompt")
        has_system = any(name in self.left for name in SYSTEM_COLUMNS)
        if not has_system and all(isinstance(v, str) for v in (prompt, *answers.values())):
            return {"prompt": prompt, **answers}
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        turns = {k: [{"role": "assistant", "content": v}] if isinstance(v, str) else v for k, v in answers.items()}
        return {"prompt": self.with_system(prompt, "prompt"), **turns}

    def tools(self) -> dict[str, Any]:
        tools = normalise_tools(self.left.pop("tools", None), self.place("tools"))
        return {"tools": tools} if tools else {}

    def rest(self) -> dict[str, Any]:
        """The other columns; type columns that are None are nothing to keep."""
        return {k: v for k, v in self.left.items() if v is not None or ALIASES.get(k, k) not in TYPE_COLUMNS}


def _language_modeling(reader: _Reader) -> dict[str, Any]:
    messages = reader.take("messages")
    if messages is None:
        text = reader.need("text", "messages")
        if not isinstance(text, str):
            raise reader.place("text").error(f"{short(text)} is {type(text).__name__}; expected text.")
        return {"text": text}
    return {"messages": reader.with_system(normalise_messages(messages, reader.place("messages"), reader.roles), "messages")}


def _prompt_only(reader: _Reader) -> dict[str, Any]:
    return reader.prompt_and(prompt=reader.prompt())


def _prompt_completion(reader: _Reader) -> dict[str, Any]:
    alpaca = reader.left.get("prompt") is None and reader.left.get("instruction") is not None
    prompt = reader.prompt()
    value = reader.need("completion", "output", "response") if alpaca else reader.need("completion")
    return reader.prompt_and(prompt=prompt, completion=reader.text_or_messages(value, "completion"))


def _unpaired_preference(reader: _Reader) -> dict[str, Any]:
    label = parse_bool(reader.need("label"), reader.place("label"))
    if reader.left.get("completion") is None and (messages := reader.take("messages")) is not None:
        turns = normalise_messages(messages, reader.place("messages"), reader.roles)
        if turns[-1]["role"] != "assistant":
            raise reader.place("messages").error(
                f"the last message is of role {turns[-1]['role']!r}; the labelled answer must be the assistant's."
            )
        return {**reader.prompt_and(prompt=turns[:-1], completion=turns[-1:]), "label": label}
    return {**_prompt_completion(reader), "label": label}


def _stepwise_supervision(reader: _Reader) -> dict[str, Any]:
    steps, labels = reader.need("completions"), reader.need("labels")
    if not isinstance(steps, list | tuple) or not steps:
        raise reader.place("completions").error(f"{short(steps)}; expected a list of steps, not empty.")
    if not isinstance(labels, list | tuple) or len(labels) != len(steps):
        count = len(labels) if isinstance(labels, list | tuple) else short(labels)
        raise reader.place("labels").error(f"{count} labels for {len(steps)} steps; expected one for each.")
    return {
        "prompt": reader.prompt_and(prompt=reader.prompt())["prompt"],
        "completions": [_step_text(step, reader) for step in steps],
        "labels": [_step_label(label, reader.place("labels")) for label in labels],
    }


def _step_text(step: Any, reader: _Reader) -> str:
    if isinstance(step, Mapping) or (isinstance(step, list | tuple) and len(step) == 1):
        step = normalise_messages(step, reader.place("completions"), reader.roles)[0]["content"]
    if not isinstance(step, str):
        raise reader.place("completions").error(f"step {short(step)} is {type(step).__name__}; expected text.")
    return step


def _step_label(label: Any, place: Place) -> float:
    label = label.item() if hasattr(label, "item") else label
    if label is None or label == -100:
        return -100.0
    if isinstance(label, float) and 0.0 <= label <= 1.0:
        return label
    return float({"+": True, "-": False}[label] if label in ("+", "-") else parse_bool(label, place))


def _preference(reader: _Reader) -> dict[str, Any]:
    prompt, chosen, rejected, identical = _pair(reader)
    row = reader.prompt_and(prompt=prompt, chosen=chosen, rejected=rejected)
    if reader.left.get("margin") is not None:
        row["margin"] = _margin(reader.take("margin"), reader.place("margin"))
    return {**row, DROP: "identical_pair"} if identical else row


def _triple_preference(reader: _Reader) -> dict[str, Any]:
    reference = reader.text_or_messages(reader.need("reference"), "reference")
    implicit = all(reader.left.get(name) is None for name in ("prompt", "instruction"))
    prompt, chosen, rejected, identical = _pair(reader)
    if isinstance(reference, str) != isinstance(chosen, str):
        raise reader.place("reference").error("one of chosen and reference is text, the other messages; use one form.")
    gold = after_prompt(prompt, reference, reader.place("reference"), implicit=implicit)
    row = reader.prompt_and(prompt=prompt, chosen=chosen, rejected=rejected, reference=gold)
    return {**row, DROP: "identical_pair"} if identical else row


def _pair(reader: _Reader) -> tuple[Any, Any, Any, bool]:
    """Prompt, chosen, rejected, all text or all messages, and whether the two answers are one."""
    chosen = reader.text_or_messages(reader.need("chosen"), "chosen")
    rejected = reader.text_or_messages(reader.need("rejected"), "rejected")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise reader.place("rejected").error("one of chosen and rejected is text, the other messages; use one form.")
    prompt = reader.prompt(required=False)
    if prompt is None and (messages := reader.take("messages")) is not None:
        prompt = normalise_messages(messages, reader.place("messages"), reader.roles)
        prompt = None if prompt in (chosen, rejected) else prompt
    identical = chosen == rejected
    if isinstance(chosen, list):
        prompt, chosen, rejected = split_turns(prompt, chosen, rejected, reader.place("prompt"))
    elif prompt is None:
        prompt, chosen, rejected = split_text(chosen, rejected)
    return prompt, chosen, rejected, identical


def _margin(value: Any, place: Place) -> float:
    try:
        margin = float(value)
    except (TypeError, ValueError):
        raise place.error(f"{short(value)} is not a number.") from None
    if not math.isfinite(margin):
        raise place.error(f"{short(value)} is not a finite number.")
    return margin


_NORMALISERS = {
    "language_modeling": _language_modeling,
    "prompt_only": _prompt_only,
    "prompt_completion": _prompt_completion,
    "preference": _preference,
    "triple_preference": _triple_preference,
    "unpaired_preference": _unpaired_preference,
    "stepwise_supervision": _stepwise_supervision,
}
