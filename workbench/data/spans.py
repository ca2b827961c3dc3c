"""Where each message of a rendered conversation lies, for any chat template.

A conversation is rendered twice: as it is, and with its texts replaced by sentinels of the same shape (same surrounding
white space, same tags inside, same type). The pieces between the sentinels must reproduce the plain rendering byte for
byte when the texts are put back; then every text's place is known, whatever the template trims, escapes, drops or repeats
and whatever the texts say. Where the model's part of a turn starts and ends follows from more sentinel renderings: the
conversation before the turn with the generation prompt, and the conversation up to and with the turn.

The sentinel renderings depend on the shape of a conversation only, so that one `Plan` serves all rows of that shape.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from workbench.data.skeleton import SENTINEL, TAG, TAGS, Skeleton, Slot, common_length

_THINK = r"<[^<>\s]*(?:think|reason|channel)[^<>\s]*>|\[/?THINK\]"
_THINK_OPENS = re.compile(rf"(?i)(?:\s|{_THINK})*")
_THINK_AHEAD = re.compile(rf"(?i)\s*(?:{_THINK})")
_SCAFFOLD = re.compile(rf"(?:\s|{TAG})*")
_NEXT_TAG = re.compile(rf"\s*(?:{TAG})")


class SpanError(ValueError):
    """The template's renderings give no consistent place for a message; the text says why."""


class Ends(NamedTuple):
    """What the tokenizer knows of turn ends: its end-of-sequence token and all its special tokens."""

    eos: str | None
    specials: frozenset[str]


@dataclass(frozen=True)
class Turn:
    """One message in the rendered text, in characters.

    Args:
        message: index of the message.
        start: first character of what the model writes (another role: of the message's text).
        end: one past the turn's terminator.
        reasoning: the part of it that is reasoning, tags included.
        terminated: whether a terminator was rendered.
        prompted: whether the generation prompt stands before it (an assistant's turn); not so where the prompt opens a
            thinking block that the turn lacks.
    """

    message: int
    start: int
    end: int
    reasoning: tuple[int, int] | None = None
    terminated: bool = True
    prompted: bool = True


class Mark(NamedTuple):
    """A place in every rendering of one shape: ``offset`` characters after the start of literal ``piece``."""

    piece: int
    offset: int


@dataclass(frozen=True)
class TurnPlan:
    """`Turn`, before the texts are put in."""

    start: Mark
    end: Mark
    reasoning: tuple[Mark, Mark] | None
    terminated: bool
    prompted: bool = True


Render = Callable[[list[dict[str, Any]], bool], str]
"""Renders messages, with the generation prompt if the second argument is true."""


@dataclass
class Plan:
    """What all conversations of one shape share: the literals around the texts and every message's marks.

    Args:
        literals: the rendering cut at its sentinels, one more than ``slots``.
        slots: the slot at each cut.
        turns: per message its `TurnPlan`, or the reason why it has none.
        dropped: slots that the template does not print.
        final: the reasons hold whatever other way is tried.
    """

    literals: list[str]
    slots: list[int]
    turns: list[TurnPlan | str]
    dropped: list[int]
    final: bool = False

    def locate(self, text: str, slots: list[Slot]) -> list[int] | None:
        """Start of each literal in the plain rendering ``text``, or None if the two do not agree to the last byte."""
        starts, position = [0], len(self.literals[0])
        if not text.startswith(self.literals[0]):
            return None
        for slot, literal in zip(self.slots, self.literals[1:], strict=True):
            for spelling in slots[slot].spellings():
                end = position + len(spelling)
                if text.startswith(spelling, position) and text.startswith(literal, end):
                    break
            else:
                return None
            starts.append(end)
            position = end + len(literal)
        return starts if position == len(text) else None

    def turn(self, message: int, starts: list[int]) -> Turn | str:
        """The message in the text whose literals start at ``starts``, or the reason why it has no place."""
        plan = self.turns[message]
        if isinstance(plan, str):
            return plan
        start, end, *reasoning = (starts[m.piece] + m.offset for m in (plan.start, plan.end, *(plan.reasoning or ())))
        return Turn(message, start, end, tuple(reasoning) or None, plan.terminated, plan.prompted)  # type: ignore[arg-type]


def make_plan(skeleton: Skeleton, render: Render, ends: Ends) -> Plan:
    """Renders the shape and its prefixes and works out every message's marks."""
    literals, slots = _cut(render(skeleton.messages, False), skeleton)
    dropped = sorted(set(range(len(skeleton.slots))) - set(slots))
    shape = _Shape(skeleton, render, ends, literals, slots)
    reason = shape.unasked_prompt()
    if reason:
        return Plan(literals, slots, [reason] * len(skeleton.messages), dropped, final=True)
    return Plan(literals, slots, [shape.plan_turn(i) for i in range(len(skeleton.messages))], dropped)


def _cut(text: str, skeleton: Skeleton) -> tuple[list[str], list[int]]:
    literals, slots, position = [], [], 0
    for match in SENTINEL.finditer(text):
        slot = skeleton.sentinels.get(match.group())
        if slot is None:
            continue
        literals.append(text[position : match.start()])
        slots.append(slot)
        position = match.end()
    return [*literals, text[position:]], slots


@dataclass
class _Shape:
    """A skeleton, its rendering cut at the sentinels, and the means to render parts of it."""

    skeleton: Skeleton
    render: Render
    ends: Ends
    literals: list[str]
    slots: list[int]

    def plan_turn(self, message: int) -> TurnPlan | str:
        """The message's marks, or the reason why it has none."""
        cuts = [k for k, slot in enumerate(self.slots) if self.skeleton.slots[slot].message == message and self._own(k)]
        if not cuts:
            return f"the template prints no text and no tool call of message {message}"
        if len(cuts) != cuts[-1] - cuts[0] + 1:
            return f"the template prints the text of message {message} in several places"
        try:
            return self._plan_turn(message, cuts)
        except SpanError as error:
            return str(error)

    def _own(self, cut: int) -> bool:
        """Whether a slot's place is the message's: a function's name comes again where its result is told."""
        slot = self.slots[cut]
        return self.skeleton.slots[slot].kind != "name" or slot not in self.slots[:cut]

    def _plan_turn(self, message: int, cuts: list[int]) -> TurnPlan:
        gap = self.literals[cuts[0]]
        if self.skeleton.messages[message]["role"] != "assistant":
            length, terminated = self.end(message, cuts[-1], gap)
            return TurnPlan(Mark(cuts[0], len(gap)), Mark(cuts[-1] + 1, length), None, terminated)
        header, prompted = self.header(message, cuts[0])
        start = Mark(cuts[0], header)
        length, terminated = self.end(message, cuts[-1], gap[: start.offset])
        return TurnPlan(start, Mark(cuts[-1] + 1, length), self.reasoning(start, cuts), terminated, prompted)

    def part(self, count: int, prompt: bool) -> str | None:
        """The rendering of the first ``count`` messages, or None if the template has none."""
        return _try(self.render, self.skeleton.messages[:count], prompt)

    def header(self, message: int, cut: int) -> tuple[int, bool]:
        """Length of the part of the literal before a turn that the generation prompt supplies, and whether that is all of it."""
        gap, last_slot = self.literals[cut], self.slots[cut - 1] if cut else None
        prompt, before = (self.part(message, True), self.part(message, False)) if message else (None, None)
        if prompt is None:
            return self._first_header(gap), True
        literals, slots = _cut(prompt, self.skeleton)
        same_text = (slots[-1] if slots else None) == last_slot
        if same_text and gap.startswith(literals[-1]):
            return len(literals[-1]), True
        opened = opened_by(prompt[len(before) :], gap) if before and prompt.startswith(before) else 0
        if not opened and not same_text:
            raise SpanError(f"what precedes message {message} differs from the prompt it would be generated from")
        return opened or header_length(literals[-1], gap, message), False

    def _first_header(self, gap: str) -> int:
        """The header of a conversation that opens with the assistant: what a generation prompt adds after a user."""
        user = [{"role": "user", "content": "Zq7v0Qx"}]
        prompt, before = _try(self.render, user, True), _try(self.render, user, False)
        header = prompt[len(before) :] if prompt and before and prompt.startswith(before) else ""
        length = opened_by(header, gap)
        if not length:
            raise SpanError("the conversation opens with the assistant, where no generation prompt shows its header")
        return length

    def end(self, message: int, cut: int, header: str) -> tuple[int, bool]:
        """Length of what the model writes after a turn's last text, and whether it ends with a terminator."""
        after, messages = self.literals[cut + 1], self.skeleton.messages
        last = message == len(messages) - 1
        # what follows the turn where it is the last one, and where another turn comes
        other = messages[: message + 1] if not last else [*messages, {"role": "user", "content": "Zq7v"}]
        text = _try(self.render, other, False)
        literals, slots = _cut(text, self.skeleton) if text is not None else ([], [])
        if not slots or slots[-1] != self.slots[cut]:
            if not last:
                raise SpanError(f"message {message} is rendered otherwise where it is the last one")
            literals = [after]
        ended, followed = (after, literals[-1]) if last else (literals[-1], after)
        content = messages[message].get("content")
        own = self.skeleton.tail(content, self.slots[cut]) if isinstance(content, str) else ""
        return turn_end(ended, followed, last, self.ends, header, own)

    def reasoning(self, start: Mark, cuts: list[int]) -> tuple[Mark, Mark] | None:
        """The part of a turn that holds its reasoning, tags included."""
        own = [k for k in cuts if self.skeleton.slots[self.slots[k]].kind == "reasoning"]
        if not own:
            return None
        before, after = self.literals[own[0]], self.literals[own[-1] + 1]
        opens_turn = own[0] == start.piece and _SCAFFOLD.fullmatch(before, start.offset)
        closing = _NEXT_TAG.match(after)
        begin = start if opens_turn else Mark(own[0], len(before))
        return begin, Mark(own[-1] + 1, closing.end() if closing else 0)

    def unasked_prompt(self) -> str:
        """The reason to refuse a template that ends a conversation with a generation prompt whether asked or not."""
        tail, messages = self.literals[-1], self.skeleton.messages
        if (self.ends.eos and self.ends.eos in tail) or messages[-1]["role"] != "assistant" or len(messages) < 2:
            return ""
        before = self.part(len(messages) - 1, False)
        if before is None or _try(self.render, messages, True) != _try(self.render, messages, False):
            return ""
        shared = tail[len(tail) - common_length(tail[::-1], _cut(before, self.skeleton)[0][-1][::-1]) :]
        tags = len(TAGS.findall(shared))
        if tags > 1 or (tags and tail[: len(tail) - len(shared)].strip()):
            return "the template adds a generation prompt after the last turn unasked"
        return ""


def opened_by(header: str, gap: str) -> int:
    """Where the turn's ``header`` (what a generation prompt adds) ends in ``gap``, the text before the turn; 0 if nowhere.

    Where the header opens a thinking block ahead that the turn lacks, the part before it has to be there.
    """
    length = len(header)
    while length and (gap.find(header[:length]) < 0 or not header[:length].strip()):
        length = _boundary(header, length - 1)
    if not length:
        return 0
    end = gap.rindex(header[:length]) + length
    rest_fits = length == len(header) or _THINK_AHEAD.match(header, length) or not gap[end:].strip()
    return end if rest_fits else 0


def header_length(prompt: str, text: str, message: int) -> int:
    """How much of ``text`` (from the end of the previous message) the generation ``prompt`` covers.

    The two may part only at a thinking block that the prompt opens ahead.
    """
    common = common_length(prompt, text)
    if common < min(len(prompt), len(text)):
        common = _boundary(prompt, common)
    if (prompt and not common) or not _THINK_OPENS.fullmatch(prompt, common):
        raise SpanError(f"the generation prompt {prompt!r} does not open message {message} ({text[:80]!r})")
    return common


def turn_end(ended: str, after: str, last: bool, ends: Ends, header: str = "", own: str = "") -> tuple[int, bool]:
    """Length of what the model writes after a turn's text, and whether that holds a terminator.

    The newline after a terminator is left out, unless white space is all that the template puts there. A template that
    ends a turn only with the next role's marker has that marker as terminator, which its last turn then lacks.

    Args:
        ended: what follows the text where the turn is the last one.
        after: what follows it where another turn comes.
        last: whether it is the last one.
        ends: end tokens of the tokenizer.
        header: what opened the turn; a closing tag of something in it is a terminator.
        own: the text's own end: tags and white space after its last words.
    """
    base = next((len(o) for o in (own, own.rstrip()) if ended.startswith(o) and after.startswith(o)), 0)
    ended, after = ended[base:], after[base:]
    common = ended[: common_length(ended, after)]
    if len(common) < min(len(ended), len(after)):
        common = common[: _boundary(common, len(common))]
    rest = after[len(common) :]
    for text in (common, ended) if last else (common,):
        if ends.eos and ends.eos in text:
            return base + text.index(ends.eos) + len(ends.eos), True
        if _closes(text, ends, header):
            return base + len(text.rstrip()), True
    marker, ends_here = _NEXT_TAG.match(rest), ended[len(common) :].lstrip()
    if ends.eos and not last and ends.eos in ended and ends.eos in after:
        return base + after.index(ends.eos) + len(ends.eos), True
    if ends_here and not (marker and _NEXT_TAG.match(ends_here)):
        raise SpanError(f"a turn goes on as {ended[:80]!r} where it is the last one and as {after[:80]!r} elsewhere")
    if marker:
        return (base + len(common.rstrip()), False) if last else (base + len(common) + marker.end(), True)
    if common:
        return base + (len(common.rstrip()) or len(common)), True
    return (base, False) if last or not rest else (base + re.match(r"\s+|\S+", rest).end(), True)  # type: ignore[union-attr]


def _closes(text: str, ends: Ends, header: str) -> bool:
    """Whether ``text`` holds something that can end a turn: a special token, a tag that closes nothing, or the header's own."""
    tags = [*TAGS.findall(text), *(special for special in ends.specials if special in text)]
    return any(tag == "</s>" or "/" not in tag[:3] or tag.replace("/", "", 1) in header for tag in tags)


def _boundary(text: str, length: int) -> int:
    """``length``, taken back to the end of a tag, a word or a label."""
    while length and not (text[length - 1].isspace() or text[length - 1] in ">]:"):
        length -= 1
    return length


def _try(render: Render, messages: list[dict[str, Any]], prompt: bool) -> str | None:
    try:
        return render(messages, prompt)
    except Exception:  # whatever a template does on a part of a conversation: it has no such rendering
        return None


def prefix_turns(messages: list[dict[str, Any]], text: str, render: Render, ends: Ends) -> list[Turn | str]:
    """Assistant turns found by rendering prefixes of the conversation, each of which must start the whole rendering."""
    turns: list[Turn | str] = []
    for i in range(len(messages)):
        try:
            turns.append(_prefix_turn(messages, i, text, render, ends))
        except SpanError as error:
            turns.append(str(error))
    return turns


def _prefix_turn(messages: list[dict[str, Any]], i: int, text: str, render: Render, ends: Ends) -> Turn:
    if messages[i]["role"] != "assistant":
        raise SpanError(f"message {i} is not an assistant turn")
    last = i == len(messages) - 1
    alone = text if last else _try(render, messages[: i + 1], False)
    prompt = _try(render, messages[:i], True) if i else None
    if alone is None or prompt is None or not text.startswith(alone.rstrip()):
        raise SpanError(f"the rendering up to message {i} does not start the whole one")
    start = header_length(prompt, text, i)
    content = messages[i].get("content")
    core = re.split(TAGS, content)[-1].strip() if isinstance(content, str) else ""
    empty = content == "" and not messages[i].get("tool_calls")
    at = text.rfind(core, start, len(alone)) if core else start if empty else -1
    if at < 0 or not _SCAFFOLD.fullmatch(text, at + len(core), len(alone)):
        raise SpanError(f"the text of message {i} is not where its rendering ends")
    close = at + len(core)
    length, terminated = turn_end(alone[close:], text[close:], last, ends)
    return Turn(i, start, close + length, None, terminated, text.startswith(prompt))
