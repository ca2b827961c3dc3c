"""Images of a row: one list, one placeholder block for each, in order."""

from collections.abc import Mapping
from typing import Any

from workbench.data.messages import Place

_PLACEHOLDER = "<image>"


def count_images(row: Mapping[str, Any]) -> int:
    """Images of a normalised row."""
    return len(row.get("images") or ())


def refuse_audio(row: Mapping[str, Any], index: int | None) -> None:
    """Raises `UserError` for a row with audio or video, which would train as a text that misses something."""
    for name in ("audio", "audios", "video", "videos"):
        value = row.get(name)
        if value is not None and not (isinstance(value, list | tuple | str) and not value):
            raise Place(index, name).error("audio and video are not supported; drop the column or the row.")


def attach_images(row: dict[str, Any], columns: tuple[str, ...], index: int | None) -> dict[str, Any]:
    """The row with ``images`` as a list (left out when empty), and with as many image blocks in its messages.

    Images may stand in ``image``, ``images`` or inside the blocks. Without blocks, ``<image>`` in a text marks the place;
    without those they go before the first user message's text.
    """
    single, several = _as_list(row.pop("image", None)), _as_list(row.pop("images", None))
    if single and several:
        raise Place(index, "image").error("the row has both 'image' and 'images'; keep one of them.")
    images = single or several
    conversations = [row[name] for name in columns if _is_messages(row[name])]
    if not conversations or not (images or _blocks(conversations)):
        return {**row, "images": images} if images else row
    images = _hoist(conversations, images, index)
    blocks = _blocks(conversations)
    if images and not blocks:
        _place(conversations, len(images))
        blocks = _blocks(conversations)
    if len(blocks) != len(images):
        text = f"{len(images)} images, but {len(blocks)} places for them in the messages."
        raise Place(index, "images").error(text)
    return {**row, "images": images} if images else row


def _as_list(value: Any) -> list:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _blocks(conversations: list[list[dict]]) -> list[dict]:
    messages = (m for conversation in conversations for m in conversation if isinstance(m["content"], list))
    return [b for m in messages for b in m["content"] if b["type"] == "image"]


def _hoist(conversations: list[list[dict]], images: list, index: int | None) -> list:
    """Images that stand inside the blocks, moved out of them."""
    blocks = _blocks(conversations)
    inside = [block.pop("image") for block in blocks if "image" in block]
    if not inside:
        return images
    if images or len(inside) != len(blocks):
        raise Place(index, "images").error("some images stand inside the messages and some do not; use one way.")
    return inside


def _place(conversations: list[list[dict]], count: int) -> None:
    messages = [m for conversation in conversations for m in conversation]
    marked = [m for m in messages if _PLACEHOLDER in m["content"]]
    if marked:
        for message in marked:
            message["content"] = _split_placeholders(message["content"])
        return
    first = next((m for m in messages if m["role"] == "user"), messages[0])
    first["content"] = [{"type": "image"} for _ in range(count)] + [{"type": "text", "text": first["content"]}]


def _split_placeholders(text: str) -> list[dict]:
    blocks: list[dict] = []
    for number, part in enumerate(text.split(_PLACEHOLDER)):
        blocks += [{"type": "image"}] if number else []
        blocks += [{"type": "text", "text": part}] if part else []
    return blocks
