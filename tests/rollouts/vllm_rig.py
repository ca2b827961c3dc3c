"""Policies, requests and comparisons for the tests against real vLLM."""

from typing import Any

import numpy as np
import torch

from workbench.models.logps import LogitsProcessing
from workbench.models.peft import PeftSpec, apply_peft
from workbench.models.policy import Policy
from workbench.rollouts.types import Request, Rollout, Sampling
from workbench.rollouts.weights import policy_logps
from workbench.tiny import tiny_model

TOLERANCE = 1e-4  # nats, fp32: two implementations of the same arithmetic
SAMPLINGS = {
    "plain": Sampling(24),
    "temperature": Sampling(24, temperature=0.7),
    "top_p": Sampling(24, top_p=0.6),
    "top_k": Sampling(24, top_k=5, temperature=0.7),
    "min_p": Sampling(24, min_p=0.5, temperature=0.7),
    "all of them": Sampling(24, temperature=0.7, top_k=40, top_p=0.8, min_p=0.1),
    "repetition_penalty": Sampling(24, repetition_penalty=1.3, temperature=0.7),
}


def tiny_policy(*, tied: bool = False, lora: dict[str, Any] | None = None, seed: int = 0) -> Policy:
    """A nano model whose distribution is uneven enough for truncation to bind."""
    model = tiny_model(seed=seed, tie_word_embeddings=tied, initializer_range=0.15)
    if lora is not None:
        model = apply_peft(model, PeftSpec(r=4, **lora))
    return Policy(model)


def move(policy: Policy, *, only: str = "", by: float = 0.1, seed: int = 1) -> None:
    """Changes the trained weights, as an optimizer would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.requires_grad and only in name:
                parameter.add_(by * torch.randn(parameter.shape, generator=generator))


def requests(n: int, *, seed: int = 0, prompt: tuple[int, ...] = (5, 9, 12)) -> list[Request]:
    return [Request([*prompt, 20 + i // 2], (seed, 0, i // 2, 0, i % 2)) for i in range(n)]


def largest_difference(policy: Policy, asked: list[Request], rollouts: list[Rollout], sampling: Sampling) -> float:
    """How far the sampler's log-probabilities are from the trainer's own, nats."""
    worst = 0.0
    for request, rollout in zip(asked, rollouts, strict=True):
        support = None
        if rollout.support is not None:
            sizes = torch.tensor([len(tokens) for tokens in rollout.support])
            support = (torch.from_numpy(np.concatenate(rollout.support)), sizes)
        processing = LogitsProcessing(sampling.temperature, sampling.repetition_penalty, support)
        ours = policy_logps(policy, list(request.prompt_ids), rollout.token_ids, processing=processing).numpy()
        worst = max(worst, float(np.abs(ours - rollout.logps).max()))
    return worst
