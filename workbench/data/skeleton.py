"""The shape of a conversation: its messages with sentinels in place of the texts."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

TAG = r"<[^<>\s'\"{}]{1,60}>|\[/?[A-Z][A-Z_]+\]"
TAGS = re.compile(TAG)
SENTINEL = re.compile(r"Zq7v\d+Qx|77\d{11}")
_THINK_ENDS = re.compile(r"(?i)(</|\[/|<\|end_).*think")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_NOTHING = re.compile("(\0)")


class Slot(NamedTuple):
    """A text of a conversation: message index, kind (``text``, ``reasoning``, ``call``, ``name``), the text itself."""

    message: int
    kind: str
    text: str

    def spellings(self) -> list[str]:
        """How a template may print it: as it is, trimmed, or within JSON."""
        ascii_json, json_text = json.dumps(self.text)[1:-1], json.dumps(self.text, ensure_ascii=False)[1:-1]
        return list(dict.fromkeys((self.text, self.text.strip(), json_text, ascii_json)))


@dataclass
class Skeleton:
    """A conversation with sentinels for texts."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    sentinels: dict[str, int] = field(default_factory=dict)

    def hollow(self, message: int, kind: str, text: str, tags: re.Pattern[str], keep_empty: bool = False) -> str:
        """``text`` with a sentinel for each stretch between tags; white space and tags stay.

        ``keep_empty`` puts one sentinel in place of a text that has no such stretch.
        """
        before, parts = len(self.slots), re.split(tags, text)
        for i in range(0, len(parts), 2):
            core = parts[i].strip()
            if core:
                in_think = kind == "text" and i + 1 < len(parts) and _THINK_ENDS.match(parts[i + 1])
                sentinel = self._add(message, "reasoning" if in_think else kind, core)
                parts[i] = parts[i].replace(core, sentinel, 1)
        return self._add(message, kind, text) if keep_empty and len(self.slots) == before else "".join(parts)

    def tail(self, text: str, slot: int) -> str:
        """What follows the sentinel of ``slot`` in a hollowed text, if that is its last one; else nothing."""
        last = next(reversed(list(SENTINEL.finditer(text))), None)
        return text[last.end() :] if last and self.sentinels.get(last.group()) == slot else ""

    def number(self, message: int, value: int) -> int:
        """A sentinel of type int."""
        sentinel = 7_700_000_000_000 + len(self.slots)
        self.sentinels[str(sentinel)] = len(self.slots)
        self.slots.append(Slot(message, "call", str(value)))
        return sentinel

    def _add(self, message: int, kind: str, text: str) -> str:
        sentinel = f"Zq7v{len(self.slots)}Qx"
        self.sentinels[sentinel] = len(self.slots)
        self.slots.append(Slot(message, kind, text))
        return sentinel


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the common beginning of two sequences."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def template_tags(template: str) -> re.Pattern[str]:
    """Pattern of the tags that a template may look for in a text, in a group (for `re.split`)."""
    found = sorted({"<think>", "</think>", *TAGS.findall(template)}, key=lambda t: (-len(t), t))
    return re.compile("(" + "|".join(map(re.escape, found)) + ")")


def hollow_out(messages: list[dict[str, Any]], tags: re.Pattern[str], keep_empty: bool) -> Skeleton:
    """The conversation's shape. ``keep_empty`` gives an assistant turn with no text a sentinel, too."""
    skeleton = Skeleton()
    for i, message in enumerate(messages):
        before = len(skeleton.slots)
        hollowed = dict(message)
        for key in _REASONING_KEYS:
            if isinstance(message.get(key), str):
                hollowed[key] = skeleton.hollow(i, "reasoning", message[key], tags)
        calls = message.get("tool_calls")
        empty = keep_empty and message["role"] == "assistant" and not calls
        hollowed["content"] = _hollow_content(skeleton, i, message.get("content", ""), tags, empty)
        if calls:
            hollowed["tool_calls"] = [_hollow_call(skeleton, i, call) for call in calls]
            if len(skeleton.slots) == before:
                _hollow_name(skeleton, i, hollowed["tool_calls"][0])
        skeleton.messages.append(hollowed)
    return skeleton


def _hollow_content(skeleton: Skeleton, i: int, content: Any, tags: re.Pattern[str], empty: bool) -> Any:
    if isinstance(content, str):
        return skeleton.hollow(i, "text", content, tags, empty)
    if not isinstance(content, list):
        return content
    return [{**b, "text": skeleton.hollow(i, "text", b["text"], tags)} if isinstance(b.get("text"), str) else b for b in content]


def _hollow_call(skeleton: Skeleton, i: int, call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    hollowed = {**function, "arguments": _hollow_value(skeleton, i, function.get("arguments"))}
    return {**call, "function": hollowed} if "function" in call else hollowed


def _hollow_value(skeleton: Skeleton, i: int, value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _hollow_value(skeleton, i, v) for k, v in value.items()}
    if isinstance(value, list):
        return [_hollow_value(skeleton, i, v) for v in value]
    if isinstance(value, str) and value.strip():
        return skeleton.hollow(i, "call", value, _NOTHING)
    return skeleton.number(i, value) if type(value) is int else value


def _hollow_name(skeleton: Skeleton, i: int, call: dict[str, Any]) -> None:
    function = call.get("function", call)
    function["name"] = skeleton.hollow(i, "name", function["name"], _NOTHING)
