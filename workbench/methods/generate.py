"""Text in, text out, with the current weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from workbench.data.align import TextEncoder
from workbench.data.chat import ChatRenderer
from workbench.errors import UserError
from workbench.models.policy import Policy
from workbench.models.tokenizer import as_list, end_token_ids

Prompt = str | list[dict[str, Any]] | Mapping[str, Any]


def prompt_ids(prompts: Sequence[Prompt], renderer: ChatRenderer) -> list[list[int]]:
    """Token ids of prompts, the same as in training: a text as the tokenizer starts one (never with an end token), a
    conversation up to where the assistant's answer begins."""
    encoder, tokenizer = TextEncoder(renderer.tokenizer), renderer.tokenizer
    rows = [dict(p) if isinstance(p, Mapping) else {"prompt": p} for p in prompts]
    plain = [isinstance(row["prompt"], str) for row in rows]
    texts = [
        row["prompt"] if alone else renderer.render_prompt(row["prompt"], row.get("tools"), row.get("chat_template_kwargs"))
        for row, alone in zip(rows, plain, strict=True)
    ]
    found = []
    for encoded, alone in zip(encoder.encode(texts), plain, strict=True):
        ids = encoded.ids.tolist()
        if alone:
            before, off, after, _ = encoder.around(encoded.ids, end=False)
            ids = [*before, *ids[off:], *after]
        found.append(ids or [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id])
    return found


def to_prompt(row: Mapping[str, Any]) -> Prompt:
    """What a row asks: its prompt alone, or with what else its rendering needs."""
    needed = {key: row[key] for key in ("prompt", "tools", "chat_template_kwargs") if row.get(key) is not None}
    return needed if len(needed) > 1 else row["prompt"]


def generate_texts(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    renderer: ChatRenderer | None = None,
    max_new_tokens: int = 128,
    batch_size: int = 64,
    skip_special_tokens: bool = True,
    **options: Any,
) -> list[str]:
    """Continues prompts; greedy unless ``do_sample=True``. An answer ends where it would after `save_pretrained`, too: at the
    tokenizer's end, the chat template's end of a turn or the model's own.

    Args:
        policy: the model.
        tokenizer: its tokenizer.
        prompts: texts, lists of messages, or rows with a ``prompt`` and maybe ``tools`` and ``chat_template_kwargs``.
        renderer: renders conversations; None: with the tokenizer's template alone.
        max_new_tokens: bound on each answer.
        batch_size: prompts per forward pass; they are sorted by length, so that little is padded.
        skip_special_tokens: leave markers out of the texts.
        options: as in transformers' ``GenerationConfig``.

    Returns:
        The new texts alone, in the order of ``prompts``.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens} must be at least 1.")
    ids = prompt_ids(prompts, renderer or ChatRenderer(tokenizer))
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    device = next(policy.parameters()).device
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ends = as_list(options.pop("eos_token_id", None)) or end_token_ids(policy.hf, tokenizer)
    options = {"do_sample": False, "pad_token_id": pad or 0, "eos_token_id": ends or None, **options}
    texts: list[str] = [""] * len(ids)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        input_ids, mask = _left_pad([ids[i] for i in chosen], pad or 0)
        out = policy.generate(input_ids.to(device), mask.to(device), max_new_tokens=max_new_tokens, **options)
        answers = [_until_end(new, ends) for new in out.tolist()]
        for i, text in zip(chosen, tokenizer.batch_decode(answers, skip_special_tokens=skip_special_tokens), strict=True):
            texts[i] = text
    return texts


def _until_end(ids: list[int], ends: list[int]) -> list[int]:
    """The ids up to the first end; what follows is padding."""
    return ids[: next((i for i, token in enumerate(ids, 1) if token in ends), len(ids))]


def _left_pad(rows: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, rows))
    input_ids = torch.tensor([[pad] * (length - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (length - len(r)) + [1] * len(r) for r in rows])
    return input_ids, mask
