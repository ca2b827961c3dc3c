"""Continuous batching of transformers: the policy's own weights, a paged cache, requests that join as others end.

Its draws come from torch's generator, seeded from the first request's key, and not from a number for each position:
the same requests in the same order give the same completions, and any others give other ones. It reports log-probabilities of the
distribution that was drawn from, but not which tokens top-k, top-p and min-p left.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from workbench.errors import UserError, check_at_least
from workbench.models.attention import PREFIX
from workbench.models.policy import evaluating
from workbench.rollouts.own_policy import OwnPolicyEngine
from workbench.rollouts.room import only_keys_and_values
from workbench.rollouts.sampling import uniforms
from workbench.rollouts.types import Request, Rollout, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from workbench.models.policy import Policy

log = logging.getLogger(__name__)


class TransformersEngine(OwnPolicyEngine):
    """``generate_batch`` of the policy's model.

    Args:
        page_size: tokens of a page of the cache.
        num_pages: pages of the cache; None: as many as memory allows.
        max_batch_tokens: most tokens of a forward pass; None: as many as memory allows.
    """

    def __init__(self, page_size: int = 256, num_pages: int | None = None, max_batch_tokens: int | None = None) -> None:
        checked = {"page_size": page_size, "num_pages": num_pages, "max_batch_tokens": max_batch_tokens}
        check_at_least(1, **{f"method__engine__{name}": value for name, value in checked.items()})
        self.page_size, self.num_pages, self.max_batch_tokens = page_size, num_pages, max_batch_tokens

    def start(self, policy: "Policy", tokenizer: "PreTrainedTokenizerBase") -> None:
        """Takes the policy.

        Raises:
            UserError: the model's weights are sharded, or it keeps a recurrent state.
        """
        if any(isinstance(p, DTensor) for p in policy.parameters()):
            raise UserError("engine=transformers does not go with strategy=fsdp2, whose weights are sharded; use engine=torch.")
        if not only_keys_and_values(policy.config):
            raise UserError(
                f"engine=transformers does not go with {type(policy.causal_lm).__name__}, which keeps a recurrent state; "
                "use engine=vllm."
            )
        log.info("engine=transformers: completions depend on the order of the requests, for draws are not keyed.")
        self.policy = policy

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Writes one completion for each request.

        Raises:
            UserError: stop texts or a repetition penalty are asked for, or a request failed.
        """
        from transformers import ContinuousBatchingConfig, GenerationConfig

        _check(sampling)
        if not requests:
            return []
        seed = int(uniforms(requests[0].key, 1)[0] * 2**31)
        paging = ContinuousBatchingConfig(
            page_size=self.page_size,
            num_blocks=self.num_pages,
            max_batch_tokens=self.max_batch_tokens,
            return_logprobs=True,
            auto_switch_to_flash=False,
            drop_unsupported_processors=False,
            seed=seed,
        )
        model = self.policy.causal_lm
        implementation = model.config._attn_implementation
        with torch.random.fork_rng(), evaluating(self.policy):
            torch.manual_seed(seed)
            try:
                model.set_attn_implementation(implementation.removeprefix(PREFIX))
                prompts = [list(request.prompt_ids) for request in requests]
                outputs = model.generate_batch(prompts, _generation_config(GenerationConfig, sampling), paging)
            finally:
                model.set_attn_implementation(implementation)
        if len(outputs) != len(requests):
            raise UserError(
                f"engine=transformers gave {len(outputs)} completions for {len(requests)} requests; use engine=torch."
            )
        return [self._rollout(output, sampling) for output in outputs.values()]

    def _rollout(self, output: object, sampling: Sampling) -> Rollout:
        if output.error:
            raise UserError(f"engine=transformers failed: {output.error}; use engine=torch.")
        tokens = list(output.generated_tokens)
        logps = np.zeros(len(tokens)) if sampling.greedy else np.asarray(output.logprobs, dtype=np.float64)
        finish = "stop" if tokens and tokens[-1] in sampling.end_ids else "length"
        return Rollout(tokens, logps, finish, self.version)


def _check(sampling: Sampling) -> None:
    for name, asked in (("stop", bool(sampling.stop)), ("repetition_penalty", sampling.repetition_penalty != 1.0)):
        if asked:
            raise UserError(f"engine=transformers does not know method.{name}={getattr(sampling, name)}; use engine=torch.")


def _generation_config(kind: type, sampling: Sampling) -> object:
    shaped = {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": sampling.top_p, "min_p": sampling.min_p}
    return kind(
        do_sample=not sampling.greedy,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(sampling.end_ids) or -1,
        pad_token_id=0,
        **({} if sampling.greedy else shaped),
    )
