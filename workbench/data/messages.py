"""Messages as people write them, brought to one form.

A normalised message is ``{"role", "content", ...}`` with, where they apply, ``reasoning_content`` (str), ``tool_calls``
(``[{"type": "function", "function": {"name", "arguments": {...}}}]``), ``train`` (bool), ``weight`` (float) and any
further key it came with. ``content`` is a string, or a list of ``{"type": "text"|"image"}`` blocks when it holds images.

A key whose value is None counts as absent, everywhere: Arrow fills the keys that one row lacks and another has with
None, and nothing tells the two apart afterwards.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.errors import UserError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool")

_ROLE_ALIASES = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "chatbot", "ai", "chatgpt", "assistant_response"), "assistant"),
    **dict.fromkeys(("observation", "function", "tool_response", "function_response", "ipython"), "tool"),
    # the text of such a message is the call itself, as JSON
    **dict.fromkeys(("function_call", "tool_call", "tool_calls"), "function_call"),
}
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
_TEXT_BLOCKS = ("text", "input_text", "output_text")
_IMAGE_BLOCKS = ("image", "image_url", "input_image")
_CALL_BLOCKS = ("tool_call", "tool_use", "function_call")
_BLOCKS = (*_TEXT_BLOCKS, *_IMAGE_BLOCKS, *_CALL_BLOCKS, *_REASONING_KEYS)
_BOOLS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


@dataclass(frozen=True)
class Place:
    """Where a value stands, for error messages."""

    index: int | None
    column: str

    def error(self, text: str) -> UserError:
        row = "" if self.index is None else f"Row {self.index}, "
        return UserError(f"{row}column {self.column!r}: {text}" if row else f"Column {self.column!r}: {text}")


def short(value: Any, limit: int = 60) -> str:
    """``repr`` of ``value``, cut to ``limit`` characters for a one-line message."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def without_none(value: Any) -> Any:
    """``value`` without the dictionary keys whose value is None, at any depth."""
    if isinstance(value, Mapping):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [without_none(v) for v in value]
    return value


def parse_bool(value: Any, place: Place) -> bool:
    """true/false, 1/0 and their spellings as text; anything else is a `UserError`."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool | int | float | str):
        known = _BOOLS.get(str(value).strip().lower())
        if known is not None:
            return known
    raise place.error(f"{short(value)} is not a label. Use true or false (1, 0, 'true' and 'false' work too).")


def normalise_messages(value: Any, place: Place, roles: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """A list of messages, one message, or its JSON text, as a list of normalised messages.

    Args:
        value: the column's value.
        place: where it stands.
        roles: further role names and what they mean, for example ``{"critic": "user"}``.
    """
    if isinstance(value, str):
        value = _load_json(value, place, "a list of messages")
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        raise place.error(f"{short(value)} is {type(value).__name__}; expected a list of messages.")
    if not value:
        raise place.error("the list of messages is empty.")
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(value):
        message, is_call = _normalise_message(message, number, place, roles or {})
        if is_call and messages and messages[-1]["role"] == "assistant" and not _weighted(messages[-1], message):
            # calls written as messages of their own belong to the assistant turn they follow
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    return messages


def _normalise_message(message: Any, number: int, place: Place, roles: Mapping[str, str]) -> tuple[dict, bool]:
    """The message, and whether it was a tool call written as a message of its own."""
    if _is_normal(message) and message["role"] not in roles:
        return {"role": message["role"], "content": message["content"]}, False
    if not isinstance(message, Mapping):
        raise place.error(f"message {number} is {short(message)}; expected an object with 'role' and 'content'.")
    rest = {k: v for k, v in message.items() if v is not None}
    role = _normalise_role(_pop_first(rest, ("role", "from")), number, rest, place, roles)
    content = _pop_first(rest, ("content", "value"))
    is_call = role == "function_call"
    if is_call:
        role, calls, content = "assistant", _load_json(content, place, "a tool call"), ""
        rest["tool_calls"] = calls if isinstance(calls, list) else [calls]
    text, found = _normalise_content(content, role, number, place)
    out = {"role": role, "content": text}
    reasoning = _pop_first(rest, _REASONING_KEYS)
    reasoning = found.pop("reasoning_content", None) if reasoning is None else reasoning
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise place.error(f"message {number} has reasoning of type {type(reasoning).__name__}; expected text.")
        out["reasoning_content"] = reasoning
    calls = normalise_tool_calls(_pop_first(rest, ("tool_calls", "function_call")), place)
    calls += normalise_tool_calls(found.pop("tool_calls", None), place)
    if calls:
        out["tool_calls"] = calls
    if content is None and role != "tool" and not out.keys() & {"tool_calls", "reasoning_content"}:
        raise place.error(f"message {number} (role {role!r}) has no content. Its keys: {_keys(message)}.")
    return {**out, **_normalise_training_keys(rest, number, place)}, is_call


def _weighted(*messages: Mapping) -> bool:
    return any(key in message for message in messages for key in ("train", "weight"))


def _is_normal(message: Any) -> bool:
    """The usual case, told at once."""
    return type(message) is dict and len(message) == 2 and message.get("role") in ROLES and type(message.get("content")) is str


def _normalise_role(role: Any, number: int, rest: Mapping, place: Place, roles: Mapping[str, str]) -> str:
    if role is None:
        raise place.error(f"message {number} has neither 'role' nor 'from'. Its keys: {_keys(rest)}.")
    name = str(role).strip().lower()
    known = {**_ROLE_ALIASES, **{k.lower(): v for k, v in roles.items()}} if roles else _ROLE_ALIASES
    if name not in known:
        raise place.error(
            f"message {number} has the unknown role {role!r}.{nearest(name, known)} Allowed: {', '.join(ROLES)}"
            f" and the usual aliases (human, gpt, observation, function_call); map others with roles={{{name}: user}}."
        )
    return known[name]


def _normalise_training_keys(rest: dict, number: int, place: Place) -> dict:
    """``train`` and ``weight`` (or ``loss_weight``) of a message as bool and float, the other keys without None."""
    if "train" in rest:
        rest["train"] = parse_bool(rest["train"], place)
    weight = _pop_first(rest, ("weight", "loss_weight"))
    rest = without_none(rest)
    if weight is not None:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
            raise place.error(f"message {number} has weight={weight!r}; expected a number of 0 or more.")
        rest["weight"] = float(weight)
    return rest


def _normalise_content(content: Any, role: str, number: int, place: Place) -> tuple[str | list, dict]:
    """``(text or blocks, {reasoning_content?, tool_calls?})``; blocks only where there is an image."""
    if content is None or isinstance(content, str):
        return content or "", {}
    if isinstance(content, Mapping) and content.get("type") in _BLOCKS:
        content = [content]
    blocks = content if isinstance(content, list | tuple) else [content]
    shown = (*_TEXT_BLOCKS, *_IMAGE_BLOCKS)
    if role == "tool" and not all(isinstance(b, Mapping) and b.get("type") in shown for b in blocks):
        return json.dumps(without_none(content), ensure_ascii=False), {}  # a tool's result may be any object
    if isinstance(content, list | tuple) and all(isinstance(b, str | Mapping) for b in content):
        blocks = [{"type": "text", "text": b} if isinstance(b, str) else b for b in content]
        return _normalise_blocks(blocks, number, place)
    raise place.error(f"message {number} has content of type {type(content).__name__}; expected text or blocks.")


def _normalise_blocks(blocks: list[Mapping], number: int, place: Place) -> tuple[str | list, dict]:
    out: list[dict] = []
    found: dict[str, Any] = {}
    for block in blocks:
        kind = block.get("type")
        if kind in _TEXT_BLOCKS:
            out.append({"type": "text", "text": _block_text(block, kind, number, place)})
        elif kind in _REASONING_KEYS:
            found["reasoning_content"] = found.get("reasoning_content", "") + _block_text(block, kind, number, place)
        elif kind in _IMAGE_BLOCKS:
            image = _pop_first(dict(block), ("image", "image_url", "url", "path"))
            image = image.get("url", image) if isinstance(image, Mapping) else image
            out.append({"type": "image"} if image is None else {"type": "image", "image": image})
        elif kind in _CALL_BLOCKS:
            found.setdefault("tool_calls", []).extend(_block_calls(block, place))
        else:
            raise place.error(
                f"message {number} has a content block of type {kind!r}.{nearest(str(kind), _BLOCKS)}"
                " Allowed: text, image, reasoning, tool_call."
            )
    if not any(block["type"] == "image" for block in out):
        return "".join(block["text"] for block in out), found
    return out, found


def _block_text(block: Mapping, kind: str, number: int, place: Place) -> str:
    text = next((block[k] for k in ("text", "value", "content", kind) if block.get(k) is not None), None)
    if not isinstance(text, str):
        raise place.error(f"message {number} has a {kind} block without text: {short(dict(block))}.")
    return text


def _block_calls(block: Mapping, place: Place) -> list:
    value = next((block[k] for k in ("value", "tool_call", "text") if block.get(k) is not None), None)
    if value is None:
        arguments = block.get("arguments", block.get("input"))
        return [{"id": block.get("id"), "name": block.get("name"), "arguments": arguments}]
    value = _load_json(value, place, "a tool call") if isinstance(value, str) else value
    return value if isinstance(value, list) else [value]


def normalise_tool_calls(value: Any, place: Place) -> list[dict[str, Any]]:
    """Tool calls in any of the usual spellings, with ``arguments`` as an object."""
    if value is None:
        return []
    if isinstance(value, str):
        value = _load_json(value, place, "a list of tool calls")
    calls = []
    for call in [value] if isinstance(value, Mapping) else value:
        function = call.get("function") if isinstance(call, Mapping) and call.get("function") is not None else call
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise place.error(f"tool call {short(call)} has no function name.")
        kept = {k: v for k, v in call.items() if k not in ("function", "name", "arguments", "type") and v is not None}
        arguments = _normalise_arguments(function.get("arguments"), name, place)
        calls.append({**kept, "type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def _normalise_arguments(arguments: Any, name: str, place: Place) -> dict:
    if isinstance(arguments, str):
        arguments = _load_json(arguments, place, f"the arguments of tool call {name!r}") if arguments.strip() else None
    if not isinstance(arguments or {}, Mapping):
        raise place.error(f"the arguments of tool call {name!r} are {short(arguments)}; expected an object.")
    return without_none(arguments or {})


def normalise_tools(value: Any, place: Place) -> list[dict[str, Any]]:
    """A ``tools`` column (list of schemas, its JSON text, None or nothing) as a list; empty when there are none.

    A bare function schema is put into the usual ``{"type": "function", "function": ...}``.
    """
    if isinstance(value, str):
        value = _load_json(value, place, "a list of tools") if value.strip() else None
    tools = []
    for tool in [value] if isinstance(value, Mapping) else value or []:
        tool = _load_json(tool, place, "a tool") if isinstance(tool, str) else tool
        if not isinstance(tool, Mapping):
            raise place.error(f"tool {short(tool)} is {type(tool).__name__}; expected a JSON schema as an object.")
        tool = without_none(tool)
        if "function" not in tool and "name" in tool:
            tool.pop("type", None)
            tool = {"type": "function", "function": tool}
        tools.append(tool)
    return tools


def _load_json(text: Any, place: Place, what: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, json.JSONDecodeError) as error:
        raise place.error(f"{short(text)} is not the JSON of {what} ({error}).") from None


def _pop_first(mapping: dict, keys: tuple[str, ...]) -> Any:
    """Removes ``keys`` from ``mapping``; the first value that is not None."""
    values = [mapping.pop(key, None) for key in keys]
    return next((v for v in values if v is not None), None)


def _keys(mapping: Mapping) -> str:
    return ", ".join(map(str, mapping)) or "none"
