"""What the colocated engine and the server's client share: seeds, sampling parameters, answers."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from workbench.errors import UserError
from workbench.rollouts.types import Key, Request, Rollout, Sampling

Sync = Literal["merged", "adapter", "none"]
_ABSENT = "nan", "NaN", None


def seed_of(key: Key) -> int:
    """A seed of 63 bits for a completion's draws, the same on every machine and in every batch."""
    digest = hashlib.blake2b(",".join(str(int(part)) for part in key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sampling_arguments(
    request: Request, sampling: Sampling, context: int, vocabulary: int, regex: str | None = None
) -> dict[str, Any]:
    """Arguments that ``SamplingParams`` and ``/v1/completions`` both know.

    Args:
        request: what to complete.
        sampling: how.
        context: most tokens of prompt and completion.
        vocabulary: size of the model's vocabulary.
        regex: what completions follow, which leaves tokens out as well.

    Raises:
        UserError: the prompt leaves no room for the completion.
    """
    room = context - len(request.prompt_ids)
    if room < sampling.max_new_tokens:
        raise UserError(
            f"a prompt of {len(request.prompt_ids)} tokens and a completion of up to {sampling.max_new_tokens} are more than the "
            f"{context} that the engine holds; set method.max_completion_length, data.max_length (with data.truncation) or "
            "method.engine.max_model_len."
        )
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": float(sampling.temperature),
        "top_k": sampling.top_k or 0,
        "top_p": float(sampling.top_p),
        "min_p": float(sampling.min_p or 0.0),
        "repetition_penalty": float(sampling.repetition_penalty),
        "seed": seed_of(request.key),
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.end_ids),
        "ignore_eos": True,  # the ends are those of `Sampling`
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": asked_logprobs(sampling, vocabulary, regex),
    }


def asked_logprobs(sampling: Sampling, vocabulary: int, regex: str | None = None) -> int:
    """How many log-probabilities of other tokens show which of them could have been drawn.

    Tokens outside of the support have minus infinity. With top-k all of it is among the k most likely.
    """
    if sampling.greedy or not (sampling.truncates or regex is not None):
        return 0
    return min(sampling.top_k or vocabulary, vocabulary)


def cut_at_stop(token_ids: Sequence[int], sampling: Sampling, tokenizer: PreTrainedTokenizerBase) -> int:
    """How many tokens a completion keeps that ended at a text: up to the one that completes it."""
    for size in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:size], skip_special_tokens=False)
        if any(stop in text for stop in sampling.stop):
            return size
    return len(token_ids)


def as_array(logps: Sequence[float | str | None]) -> np.ndarray:
    """Log-probabilities ``[n]`` in fp64; what the engine has none for is NaN."""
    return np.array([np.nan if value in _ABSENT else float(value) for value in logps], dtype=np.float64)


def support_of(known: Mapping[int, float | str | None], drawn: int) -> np.ndarray:
    """Tokens that could have been drawn at a position, sorted; the one that was drawn is always among them."""
    finite = {int(token) for token, logp in known.items() if logp not in _ABSENT and float(logp) > -np.inf}
    return np.array(sorted(finite | {int(drawn)}), dtype=np.int64)


def rollout(
    token_ids: Sequence[int],
    logps: Sequence[float | str | None],
    finish: str | None,
    version: int,
    support: list[np.ndarray] | None,
    sampling: Sampling,
    tokenizer: PreTrainedTokenizerBase,
) -> Rollout:
    """One answer, checked for being whole."""
    if len(token_ids) != len(logps):
        raise UserError(f"the engine gave {len(logps)} log-probabilities for {len(token_ids)} tokens.")
    if finish not in ("stop", "length"):
        raise UserError(f"the engine ended a completion with {finish!r}; known: stop, length.")
    size = len(token_ids)
    if finish == "stop" and sampling.stop and (not size or token_ids[-1] not in sampling.end_ids):
        size = cut_at_stop(token_ids, sampling, tokenizer)
    return Rollout(
        token_ids=[int(token) for token in token_ids[:size]],
        logps=as_array(logps[:size]),
        finish=finish,
        version=version,
        support=None if support is None else support[:size],
    )
