"""The policy writes its own completions: no second copy of the weights, nothing to send."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from workbench.errors import UserError, check_at_least, check_choice
from workbench.models.compiling import uncompiled
from workbench.models.policy import evaluating
from workbench.models.prepacked import prepacked
from workbench.rollouts import room
from workbench.rollouts.own_policy import OwnPolicyEngine
from workbench.rollouts.sampling import draw, uniforms
from workbench.rollouts.types import Request, Rollout, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.cache_utils import Cache

    from workbench.models.policy import Policy


@dataclass
class _Row:
    """A completion that is being written."""

    request: Request
    index: int
    bound: int
    uniforms: np.ndarray
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    support: list[np.ndarray] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None


class TorchEngine(OwnPolicyEngine):
    """Draws from any causal language model whose cache holds keys and values.

    Each distinct prompt is read once and its cache shared out to its group. Prompts of similar lengths go together, padded on the
    left. Finished rows leave the batch, so that a step costs what the unfinished ones cost.

    A completion depends on weights, prompt, key and sampling. What else is computed beside it moves logits by rounding alone
    (tests hold 1 row against 64 to 1e-5 of the largest logit in fp32), and a draw changes only where its uniform number lies that
    close to the border of two tokens. In bf16, where rounding is coarse, completions are the same for the same requests in the
    same order and ``batch_size``, and often others where these differ.

    Under FSDP2 all ranks run equally many forward passes: one that is done goes on with a token of no meaning.

    Args:
        batch_size: most completions that are written at a time.
        cache: ``dynamic`` gives keys and values room as they come; ``static`` all of it at once, for prompt and completion, so
            that shapes depend on the number of rows alone (for compilers; every step then computes with the full length).
    """

    def __init__(self, batch_size: int = 64, cache: room.Kind = "dynamic") -> None:
        check_at_least(1, method__engine__batch_size=batch_size)
        check_choice("method.engine.cache", cache, get_args(room.Kind))
        self.batch_size = batch_size
        self.cache = cache

    def start(self, policy: "Policy", tokenizer: "PreTrainedTokenizerBase") -> None:
        """Takes the policy.

        Raises:
            UserError: the model keeps a recurrent state, which padding would change.
        """
        if not room.only_keys_and_values(policy.config):
            raise UserError(
                f"engine=torch does not go with {type(policy.causal_lm).__name__}, which keeps a recurrent state besides keys "
                "and values; use engine=vllm."
            )
        self.policy, self.tokenizer = policy, tokenizer

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Writes one completion for each request.

        Raises:
            UserError: a prompt is empty, or leaves no room for a token.
        """
        rows = [self._row(request, index, sampling) for index, request in enumerate(requests)]
        forwards = _Forwards(self.policy)
        steps = max((row.bound for row in rows), default=0)
        with evaluating(self.policy), uncompiled(self.policy), prepacked(self.policy, steps):
            for wave in _waves(rows, self.batch_size):
                self._write(wave, sampling, forwards)
            forwards.finish()
        return [self._rollout(row, sampling) for row in rows]

    def _row(self, request: Request, index: int, sampling: Sampling) -> _Row:
        length, context = len(request.prompt_ids), self.context
        if length == 0:
            raise UserError("a prompt has no tokens; engine=torch needs at least one (a template or a BOS token gives it).")
        bound = sampling.max_new_tokens if context is None else min(sampling.max_new_tokens, context - length)
        if bound < 1:
            raise UserError(
                f"a prompt of {length} tokens leaves no room in the model's context of {context}; shorten it or leave it out."
            )
        return _Row(request, index, bound, np.zeros(bound) if sampling.greedy else uniforms(request.key, bound))

    def _rollout(self, row: _Row, sampling: Sampling) -> Rollout:
        support = row.support if sampling.truncates else None
        return Rollout(row.tokens, np.asarray(row.logps), row.finish, self.version, support)

    def _write(self, rows: list[_Row], sampling: Sampling, forwards: "_Forwards") -> None:
        """Writes the completions of one batch."""
        state = _State.read(rows, sampling, forwards, self.cache)
        ends = set(sampling.end_ids)
        while True:
            position = len(state.rows[0].tokens)
            numbers = np.array([row.uniforms[position] for row in state.rows])
            drawn = draw(state.logits, torch.from_numpy(numbers).to(state.device), sampling, state.seen)
            support = iter(()) if drawn.support is None else _split(drawn.support, drawn.counts)
            tokens, logps = drawn.tokens.tolist(), drawn.logps.tolist()
            for row, token, logp in zip(state.rows, tokens, logps, strict=True):
                row.tokens.append(token)
                row.logps.append(logp)
                row.support.extend([next(support)] if sampling.truncates else [])
                if token in ends or (sampling.stop and self._stops(row.tokens, sampling.stop)):
                    row.finish = "stop"
                elif len(row.tokens) == row.bound:
                    row.finish = "length"
            going = [i for i, row in enumerate(state.rows) if row.finish is None]
            if not going:
                return
            following = drawn.tokens.to(state.device)
            if len(going) < len(state.rows):
                following = state.leave(following, going)
            state.step(following, forwards)

    def _stops(self, tokens: list[int], stop: tuple[str, ...]) -> bool:
        # A stop text that ends with the last token has at most as many tokens as bytes; some more let a text begin cleanly.
        tail = tokens[-(max(len(text.encode()) for text in stop) + 8) :]
        text = self.tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(s in text for s in stop)


def _waves(rows: list[_Row], size: int) -> Iterator[list[_Row]]:
    """Rows in batches: equal prompts together, the longest first, so that the greatest need of memory shows at once."""
    order = sorted(rows, key=lambda row: (-len(row.request.prompt_ids), tuple(row.request.prompt_ids), row.index))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _split(support: Tensor, counts: Tensor) -> Iterator[np.ndarray]:
    return iter(np.split(support.to("cpu", torch.int32).numpy(), np.cumsum(counts.cpu().numpy())[:-1]))


@dataclass
class _State:
    """A batch of B completions between two tokens.

    Args:
        rows: its completions.
        cache: keys and values of all tokens but the last.
        logits: of the next token ``[B, V]``.
        positions: of the next token to be read ``[B]``.
        mask: 1 for tokens, 0 for padding, and 1 for all to come ``[B, L]``; None: no padding.
        length: tokens in the cache, padding included.
        seen: which tokens prompt and completion hold ``[B, V]``; None: no penalty asks.
    """

    rows: list[_Row]
    cache: "Cache"
    logits: Tensor
    positions: Tensor
    mask: Tensor | None
    length: int
    seen: Tensor | None

    @property
    def device(self) -> torch.device:
        return self.positions.device

    @classmethod
    def read(cls, rows: list[_Row], sampling: Sampling, forwards: "_Forwards", kind: room.Kind) -> "_State":
        """Reads each distinct prompt once."""
        prompts: dict[tuple[int, ...], int] = {}
        which = [prompts.setdefault(tuple(row.request.prompt_ids), len(prompts)) for row in rows]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        longest = int(lengths.max())
        room_for = longest + max(row.bound for row in rows)
        input_ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            input_ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        device = forwards.device
        padding = (longest - lengths)[:, None]
        mask = (torch.arange(room_for) >= padding).long().to(device)
        positions = (torch.arange(longest) - padding).clamp(min=0).to(device)
        padded, index = bool(padding.any()), torch.tensor(which, device=device)
        input_ids = input_ids.to(device)
        cache = room.room(room_for) if kind == "dynamic" else room.static_room(room_for, forwards.policy.config)
        read = mask if kind == "static" else mask[:, :longest]
        logits = forwards(input_ids, cache, attention_mask=read if padded else None, position_ids=positions)
        room.rearrange(cache, index)
        seen = None
        if sampling.repetition_penalty != 1.0:
            seen = torch.zeros(len(prompts), logits.shape[-1] + 1, dtype=torch.bool, device=device)
            seen.scatter_(1, input_ids.masked_fill(mask[:, :longest] == 0, logits.shape[-1]), True)
            seen = seen[:, :-1][index]
        expanded = mask[index] if padded else None
        return cls(list(rows), cache, logits[index], positions[index, -1] + 1, expanded, longest, seen)

    def leave(self, following: Tensor, going: list[int]) -> Tensor:
        """Keeps the rows ``going``: those at the end move to the places that come free."""
        count = len(going)
        free = [i for i in range(count) if self.rows[i].finish is not None]
        source, target = going[count - len(free) :], free
        order = list(range(count))
        for s, t in zip(source, target, strict=True):
            order[t] = s
        index = torch.tensor(order, device=self.device)
        room.move(self.cache, index[target], torch.tensor(target, dtype=torch.int64, device=self.device), count)
        self.rows = [self.rows[i] for i in order]
        self.positions = self.positions[index]
        self.mask = None if self.mask is None else self.mask[index]
        self.seen = None if self.seen is None else self.seen[index]
        return following[index]

    def step(self, tokens: Tensor, forwards: "_Forwards") -> None:
        """Reads the tokens ``[B]`` that were drawn."""
        self.length += 1
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        whole = self.mask is None or self.cache.is_compileable  # whose shapes stay what they are
        mask = self.mask if whole else self.mask[:, : self.length]
        self.logits = forwards(tokens[:, None], self.cache, attention_mask=mask, position_ids=self.positions[:, None])
        self.positions = self.positions + 1


class _Forwards:
    """The policy's forward passes, equally many on all ranks where each of them needs all."""

    def __init__(self, policy: "Policy") -> None:
        self.policy = policy
        self.device = next(policy.parameters()).device
        self.joint = any(isinstance(p, DTensor) for p in policy.parameters())

    def __call__(self, input_ids: Tensor, cache: "Cache", **inputs: Tensor | None) -> Tensor:
        """Logits after the last of ``input_ids`` ``[B, V]``."""
        if self.joint:
            self._all_done(False)
        return self.policy.decode(input_ids, cache, **inputs)

    def finish(self) -> None:
        """Goes on until all ranks are done."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        while self.joint and not self._all_done(True):
            self.policy.decode(token, room.room(), position_ids=token)

    def _all_done(self, done: bool) -> bool:
        flag = torch.tensor(int(done), device=self.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN)
        return bool(flag.item())
