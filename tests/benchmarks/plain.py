"""The textbook step in plain PyTorch, for the benchmark: pad a batch, form all logits, take their log-softmax, apply the loss."""

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.benchmarks import cases
from tests.benchmarks.cases import Case, Row

Sequence_ = tuple[list[int], list[int]]  # prompt and completion


def steps(case: Case, folder: Path, learning_rate: float) -> Iterator[Callable[[], float]]:
    """Optimizer steps, each of which returns its loss when it is called."""
    kind = AutoModelForSequenceClassification if case.method == "reward" else AutoModelForCausalLM
    model = kind.from_pretrained(folder / "model").train()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0)
    make = {"sft": _sft, "dpo": _dpo, "kto": _kto, "reward": _reward}.get(case.method)

    def update(loss: Tensor) -> float:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    rows = cases.read_rows(folder)
    if case.method == "grpo":
        yield from _grpo(case, model, tokenizer, rows, update)
        return
    # Frozen before the first update; of the methods that need none it is let go.
    reference = copy.deepcopy(model).eval().requires_grad_(False) if case.method in ("dpo", "kto") else None
    for batch in cases.batches(rows, case.batch):
        yield lambda batch=batch: update(make(model, reference, _tokens(batch, tokenizer)))


def _tokens(rows: Sequence[Row], tokenizer: object) -> list[dict[str, list[int]]]:
    """Token ids of each text of each row; all but prompts end with the end token."""
    made = []
    for row in rows:
        texts = {k: v for k, v in row.items() if isinstance(v, str)}
        ids = {k: tokenizer(v)["input_ids"] + ([] if k == "prompt" else [tokenizer.eos_token_id]) for k, v in texts.items()}
        made.append(ids | {k: v for k, v in row.items() if not isinstance(v, str)})
    return made


def _padded(sequences: Sequence[Sequence_]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, attention mask and the mask of completions ``[B, L]``."""
    ids = [torch.tensor(prompt + completion) for prompt, completion in sequences]
    trained = [torch.tensor([0] * len(prompt) + [1] * len(completion)) for prompt, completion in sequences]
    ones = [torch.ones_like(t) for t in ids]
    return tuple(pad_sequence(x, batch_first=True) for x in (ids, ones, trained))


def _logps(model: nn.Module, sequences: Sequence[Sequence_]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the next tokens ``[B, L-1]``, and which belong to completions."""
    ids, mask, trained = _padded(sequences)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1), trained[:, 1:]


def _sft(model: nn.Module, _: None, rows: Sequence[dict[str, list[int]]]) -> Tensor:
    sequences = [(row["prompt"], row["completion"]) if "prompt" in row else ([], row["text"]) for row in rows]
    logps, trained = _logps(model, sequences)
    return -(logps * trained).sum() / trained.sum()


def _dpo(model: nn.Module, reference: nn.Module, rows: Sequence[dict[str, list[int]]]) -> Tensor:
    sequences = [(row["prompt"], row[name]) for name in ("chosen", "rejected") for row in rows]
    logps, trained = _logps(model, sequences)
    with torch.no_grad():
        base, _ = _logps(reference, sequences)
    chosen, rejected = ((logps - base) * trained).sum(-1).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def _kto(model: nn.Module, reference: nn.Module, rows: Sequence[dict[str, list[int]]]) -> Tensor:
    sequences = [(row["prompt"], row["completion"]) for row in rows]
    mismatched = [(row["prompt"], rows[i - 1]["completion"]) for i, row in enumerate(rows)]
    logps, trained = _logps(model, sequences)
    with torch.no_grad():
        base, _ = _logps(reference, sequences)
        own, of_kl = _logps(model, mismatched)
        kl = ((own - _logps(reference, mismatched)[0]) * of_kl).sum(-1).mean().clamp(min=0)
    ratios = ((logps - base) * trained).sum(-1)
    desirable = torch.tensor([row["label"] for row in rows])
    return (1 - torch.sigmoid(0.1 * torch.where(desirable, ratios - kl, kl - ratios))).mean()


def _reward(model: nn.Module, _: None, rows: Sequence[dict[str, list[int]]]) -> Tensor:
    sequences = [(row["prompt"], row[name]) for name in ("chosen", "rejected") for row in rows]
    ids, mask, _ = _padded(sequences)
    chosen, rejected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.squeeze(-1).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def _grpo(
    case: Case, model: nn.Module, tokenizer: object, rows: Sequence[Row], update: Callable[[Tensor], float]
) -> Iterator[Callable[[], float]]:
    """Iterations over each window; clipped ratios (arXiv:2402.03300, eq. 3) divided by the window's tokens."""
    for prompts in cases.batches(rows, case.batch // case.group):
        ids = [row["prompt"] for row in _tokens(prompts, tokenizer)]
        sequences = [(prompt, case.script(prompt, sample)) for prompt in ids for sample in range(case.group)]
        rewards = torch.tensor(cases.reward([completion for _, completion in sequences])).view(-1, case.group)
        spread = rewards.std(1, keepdim=True) + 1e-4
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).view(-1, 1)
        old: list[Tensor] = []

        def first(sequences: list = sequences, old: list = old) -> None:
            with torch.no_grad():
                old.append(_logps(model, sequences)[0])

        def step(
            begins: bool, sequences: list = sequences, old: list = old, advantages: Tensor = advantages, first: Callable = first
        ) -> float:
            if begins and case.steps > 1:
                first()
            logps, trained = _logps(model, sequences)
            ratios = (logps - (old[0] if old else logps.detach())).exp()
            gains = torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
            return update(-(gains * trained).sum() / trained.sum())

        for iteration in range(case.steps):
            yield lambda begins=iteration == 0, step=step: step(begins)
