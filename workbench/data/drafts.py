"""Normalised rows to drafts: the texts to tokenise and which of their characters are trained."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any

from workbench.data.chat import ChatRenderer, Conversation
from workbench.data.images import count_images
from workbench.data.spans import SpanError, Turn
from workbench.data.targets import END, Span, Targets, TrainOn, resolve_train_on
from workbench.errors import UserError


class Flag(IntFlag):
    """What is worth counting about a row."""

    NONE = 0
    TRUNCATED = 1
    CUT_TERMINATOR = 2
    DOUBLE_BOS = 4
    UNTRAINED = 8
    REASONING_DROPPED = 16
    TEXT_DROPPED = 32
    UNTERMINATED = 64
    OPEN_MARKERS = 128
    OTHER_ROLES = 256
    PROMPT_DIFFERS = 512
    NO_MARGIN = 1024


@dataclass
class Draft:
    """One text to tokenise.

    Args:
        text: a whole rendering, prompt and completion together.
        spans: what is trained in it, in characters.
        boundary: first character of the completion.
        steps: end of each step, in characters (stepwise supervision).
        plain: the tokenizer's special tokens go around it.
        end: an end-of-sequence token follows (plain text).
    """

    text: str
    spans: list[Span] = field(default_factory=list)
    boundary: int = 0
    steps: list[int] = field(default_factory=list)
    plain: bool = False
    end: bool = False

    @property
    def has_places(self) -> bool:
        """Whether any place within the text matters."""
        return bool(self.boundary or self.steps or any(start > 0 or end < len(self.text) for start, end, _ in self.spans))


@dataclass
class RowDraft:
    """The drafts of a row (one for each answer of a pair or triple, else one), its scalars for the method, and its flags."""

    drafts: list[Draft]
    extras: dict[str, Any] = field(default_factory=dict)
    flags: Flag = Flag.NONE


class Drafter:
    """Makes drafts of the rows of one type.

    Args:
        renderer: renders conversations.
        data_type: type of the rows.
        train_on: as configured.
        role_weights: weight of each role's messages, if configured.
        step_separator: follows every step (stepwise supervision).
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        data_type: str,
        *,
        train_on: TrainOn = "auto",
        role_weights: Mapping[str, float] | None = None,
        step_separator: str = "\n",
    ) -> None:
        self.renderer = renderer
        self.data_type = data_type
        self.train_on: TrainOn = train_on
        self.role_weights = dict(role_weights or {})
        self.step_separator = step_separator
        self._targets: dict[bool, Targets] = {}

    def targets(self, conversational: bool) -> Targets:
        """What is trained in rows of this form; `UserError` if that is impossible."""
        if conversational not in self._targets:
            resolved = resolve_train_on(self.train_on, self.data_type, conversational, bool(self.role_weights))
            self._targets[conversational] = Targets(resolved, self.role_weights if conversational else {})
        return self._targets[conversational]

    def draft(self, row: dict[str, Any]) -> RowDraft:
        """The drafts of a normalised row."""
        if count_images(row):
            raise UserError(f"the row has {count_images(row)} image(s), and only text can be prepared: leave such rows out.")
        return getattr(self, f"_{self.data_type}")(row)

    def _language_modeling(self, row: dict[str, Any]) -> RowDraft:
        if "messages" in row:
            return self._conversation(row, [], row["messages"])
        return RowDraft([Draft(row["text"], [(0, END, 1.0)], plain=True, end=True)])

    def _prompt_completion(self, row: dict[str, Any]) -> RowDraft:
        return self._continuation(row, row["completion"])

    def _unpaired_preference(self, row: dict[str, Any]) -> RowDraft:
        draft = self._continuation(row, row["completion"])
        draft.extras["label"] = bool(row["label"])
        return draft

    def _preference(self, row: dict[str, Any]) -> RowDraft:
        extras = {"margin": float(row["margin"])} if row.get("margin") is not None else {}
        return self._answers(row, ("chosen", "rejected"), extras)

    def _triple_preference(self, row: dict[str, Any]) -> RowDraft:
        return self._answers(row, ("chosen", "rejected", "reference"), {})

    def _answers(self, row: dict[str, Any], columns: tuple[str, ...], extras: dict[str, Any]) -> RowDraft:
        """The prompt with each of several answers."""
        made = RowDraft([], extras)
        for draft in (self._continuation(row, row[column]) for column in columns):
            made.drafts += draft.drafts
            made.flags |= draft.flags
        return made

    def _prompt_only(self, row: dict[str, Any]) -> RowDraft:
        return RowDraft([Draft(self._prompt(row))]) if isinstance(row["prompt"], list) else self._plain_prompt(row)

    def _plain_prompt(self, row: dict[str, Any]) -> RowDraft:
        return RowDraft([Draft(row["prompt"], plain=True)])

    def _stepwise_supervision(self, row: dict[str, Any]) -> RowDraft:
        plain = isinstance(row["prompt"], str)
        text = row["prompt"] if plain else self._prompt(row)
        draft = Draft(text, boundary=len(text), plain=plain)
        for step in row["completions"]:
            draft.text += step + self.step_separator
            draft.steps.append(len(draft.text))
        return RowDraft([draft], {"labels": list(row["labels"])})

    def _prompt(self, row: dict[str, Any]) -> str:
        return self.renderer.render_prompt(row["prompt"], row.get("tools"), row.get("chat_template_kwargs"))

    def _continuation(self, row: dict[str, Any], completion: str | list[dict[str, Any]]) -> RowDraft:
        """Prompt and completion as one text."""
        prompt = row["prompt"]
        if isinstance(completion, list):
            return self._conversation(row, prompt, completion)
        start = 0 if self.targets(False).train_on == "all" else len(prompt)
        return RowDraft([Draft(prompt + completion, [(start, END, 1.0)], len(prompt), plain=True, end=True)])

    def _conversation(self, row: dict[str, Any], prompt: list, completion: list) -> RowDraft:
        targets = self.targets(True)
        messages = self.renderer.fold([*prompt, *completion])
        count = max(0, len(messages) - len(completion))
        context = {"tools": row.get("tools"), "kwargs": row.get("chat_template_kwargs")}
        split = self.data_type != "language_modeling"
        marked = targets.need_turns(messages)
        located = split or marked or _reasons(messages)
        conversation = self.renderer.locate(messages, **context, markers=marked) if located else None
        text = conversation.text if conversation else self.renderer.render(messages, **context)
        boundary = self.renderer.boundary(conversation, messages, count, **context) if split else 0
        by_turn = self.data_type == "prompt_completion" and targets.train_on in ("assistant", "last_turn")
        whole = by_turn or targets.train_on == "all"
        first, start = (0, 0) if whole else (count, boundary)
        conversation = conversation or Conversation(text, tuple(m["role"] for m in messages))
        try:
            spans = targets.spans(conversation, messages, first, start)
        except SpanError as error:
            raise UserError(
                f"the tokens that data.train_on={targets.train_on} (or a role or message weight) asks for cannot be told "
                f"with the chat template {self.renderer.describe()}: {error}. "
                "Use data.train_on=all, or a template with generation markers."
            ) from None
        return RowDraft([Draft(text, spans, boundary)], flags=_flags(conversation, targets, first))


def _reasons(messages: list[dict[str, Any]]) -> bool:
    """Whether a message holds reasoning, which some templates leave out."""
    return any(m.get("reasoning_content") or "</think>" in str(m.get("content", "")) for m in messages)


def _flags(conversation: Conversation, targets: Targets, first: int) -> Flag:
    flags = Flag.NONE
    if conversation.reasoning_dropped:
        flags |= Flag.REASONING_DROPPED
    if conversation.text_dropped:
        flags |= Flag.TEXT_DROPPED
    asked = [t for t in conversation.turns[first:] if isinstance(t, Turn) and conversation.roles[t.message] == "assistant"]
    if asked and not asked[-1].terminated:
        flags |= Flag.UNTERMINATED
    if not all(turn.prompted for turn in asked):
        flags |= Flag.PROMPT_DIFFERS
    if conversation.open_markers:
        flags |= Flag.OPEN_MARKERS
    stretch = targets.train_on == "completion" and not targets.role_weights
    if stretch and any(role != "assistant" for role in conversation.roles[first:]):
        flags |= Flag.OTHER_ROLES
    return flags
