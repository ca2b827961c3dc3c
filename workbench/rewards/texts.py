"""What rewards read: the text of a completion, what stands before it, and the final answer in it."""

import re
from collections.abc import Sequence
from typing import Any

THINK, END_THINK = "<think>", "</think>"
Completion = str | Sequence[dict[str, Any]]


def text_of(completion: Completion) -> str:
    """The text of a completion, or of the last of its messages."""
    return completion if isinstance(completion, str) else content_of(completion[-1]) if completion else ""


def content_of(message: dict[str, Any]) -> str:
    """The text of a message, the text parts of its content joined."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if part.get("type") == "text")


def prefill_of(prompt: Completion, rendered: str | None = None) -> str:
    """What of the answer stands in the prompt already: an opening thinking tag, or the start of the assistant's message.

    Args:
        prompt: text or messages.
        rendered: the prompt as the model reads it, where the chat template may have opened the block.
    """
    if not isinstance(prompt, str) and prompt and prompt[-1].get("role") == "assistant":
        return content_of(prompt[-1])
    if rendered is None:
        rendered = prompt if isinstance(prompt, str) else ""
    return THINK if rendered.rstrip().endswith(THINK) else ""


def after_thinking(text: str, end: str = END_THINK) -> str | None:
    """What follows the last thinking block; None where none has ended."""
    _, found, answer = text.rpartition(end)
    return answer if found else None


def final_answer(text: str) -> str:
    r"""The content of the last ``\boxed{...}``, else of the last ``<answer>...</answer>``, else the whole text; stripped of white
    space and dollar signs around it."""
    answer = last_boxed(text)
    if answer is None:
        tagged = re.findall(r"<answer>(.*?)</answer>", text, flags=re.S)
        answer = tagged[-1] if tagged else text
    return answer.strip().strip("$").strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` whose braces are balanced."""
    for found in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        depth = 1
        for i in range(found.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0) if text[i - 1] != "\\" else 0
            if not depth:
                return text[found.end() : i]
    return None
