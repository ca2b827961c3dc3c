"""Text in, text out, with the current weights."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from workbench.errors import UserError
from workbench.models.policy import Policy


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, Any]]) -> list[int]:
    """Token ids of a prompt: a text as the tokenizer starts one (never with an end token), a conversation up to where the
    assistant's answer begins."""
    if not isinstance(prompt, str):
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = tokenizer(prompt)["input_ids"]
    if ids and ids[-1] == tokenizer.eos_token_id and not prompt.endswith(tokenizer.eos_token):
        ids = ids[:-1]
    if not ids:
        ids = [tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id]
    return ids


def generate_texts(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | list[dict[str, Any]]],
    *,
    max_new_tokens: int = 128,
    batch_size: int = 64,
    skip_special_tokens: bool = True,
    **options: Any,
) -> list[str]:
    """Continues prompts; greedy unless ``do_sample=True``.

    Args:
        policy: the model.
        tokenizer: its tokenizer.
        prompts: texts or lists of messages.
        max_new_tokens: bound on each answer.
        batch_size: prompts per forward pass; they are sorted by length, so that little is padded.
        skip_special_tokens: leave markers out of the texts.
        options: as in transformers' ``GenerationConfig``.

    Returns:
        The new texts alone, in the order of ``prompts``.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens} must be at least 1.")
    ids = [prompt_ids(tokenizer, p) for p in prompts]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    device = next(policy.parameters()).device
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    options = {"do_sample": False, **options}
    texts: list[str] = [""] * len(ids)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        input_ids, mask = _left_pad([ids[i] for i in chosen], pad or 0)
        out = policy.generate(
            input_ids.to(device), mask.to(device), max_new_tokens=max_new_tokens, pad_token_id=pad or 0, **options
        )
        for i, text in zip(chosen, tokenizer.batch_decode(out, skip_special_tokens=skip_special_tokens), strict=True):
            texts[i] = text
    return texts


def _left_pad(rows: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, rows))
    input_ids = torch.tensor([[pad] * (length - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (length - len(r)) + [1] * len(r) for r in rows])
    return input_ids, mask
