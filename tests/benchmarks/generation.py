"""Tokens per second of the torch engine beside ``model.generate``: ``python -m tests.benchmarks.generation``.

Eight samples of one prompt of 256 tokens, of lengths that are given: in both, a row has ended once it has its length, and
``model.generate`` goes on until the longest has. Both draw from the whole distribution at temperature 1. Pairs of runs alternate;
the median of their ratios counts.
"""

import statistics
import time
from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria

from workbench.models.policy import Policy
from workbench.rollouts import torch_engine
from workbench.rollouts.torch_engine import TorchEngine
from workbench.rollouts.types import Request, Sampling

LENGTHS = (16, 32, 48, 64, 80, 96, 112, 128)


class _Bounded(TorchEngine):
    """Ends each completion at a length of its own."""

    def _row(self, request: Request, index: int, sampling: Sampling) -> torch_engine._Row:
        row = super()._row(request, index, sampling)
        row.bound = LENGTHS[index]
        return row


class _Lengths(StoppingCriteria):
    """Ends row ``i`` after ``LENGTHS[i]`` tokens."""

    def __init__(self, prompt: int) -> None:
        self.ends = torch.tensor(LENGTHS) + prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


def policy() -> Policy:
    """Eight layers of width 512 with a vocabulary of 32,000, random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=32_000,
        pad_token_id=0,
    )
    return Policy(LlamaForCausalLM(config).eval())


def measure(pairs: int = 5) -> tuple[list[float], list[float]]:
    """Tokens per second of the engine and of ``model.generate``, one of each a pair."""
    model = policy()
    prompt = torch.randint(4, 32_000, (256,), generator=torch.Generator().manual_seed(1)).tolist()
    engine = _Bounded()
    engine.start(model, None)
    requests = [Request(prompt, (0, 0, 0, 0, sample)) for sample in range(len(LENGTHS))]

    def ours() -> Sequence[int]:
        return [len(r.token_ids) for r in engine.generate(requests, Sampling(max_new_tokens=max(LENGTHS)))]

    def theirs() -> Sequence[int]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            num_return_sequences=len(LENGTHS),
            max_new_tokens=max(LENGTHS),
            eos_token_id=None,
            stopping_criteria=[_Lengths(len(prompt))],
        )
        assert out.shape[1] == max(LENGTHS)
        return LENGTHS

    rates: tuple[list[float], list[float]] = ([], [])
    for pair in range(-1, pairs):
        for found, run in zip(rates, (ours, theirs), strict=True):
            start = time.perf_counter()
            tokens = sum(run())
            if pair >= 0:
                found.append(tokens / (time.perf_counter() - start))
    assert ours() == list(LENGTHS)
    return rates


if __name__ == "__main__":
    engine_rates, generate_rates = measure()
    ratios = [a / b for a, b in zip(engine_rates, generate_rates, strict=True)]
    print(f"engine    {statistics.median(engine_rates):8.1f} tokens/s")
    print(f"generate  {statistics.median(generate_rates):8.1f} tokens/s")
    print(f"ratio     {statistics.median(ratios):8.2f} (median of {', '.join(f'{r:.2f}' for r in ratios)})")
