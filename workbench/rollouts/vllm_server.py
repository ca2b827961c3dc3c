"""`VLLMServerEngine`: a stock vLLM server, over HTTP.

The server may die and come back: what it was asked and did not answer is asked again with the same seeds, and a server that has
come back gets its weights again before it writes anything. Whether it is still the one that got the weights is read from a name
of their version that the server keeps and loses with its process; answers count only if it is there before and after them.
"""

import logging
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from workbench.errors import UserError, check_at_least, check_choice
from workbench.models.policy import Policy
from workbench.models.tokenizer import end_token_ids
from workbench.rollouts import weights
from workbench.rollouts.http import Client, Refused, Unreachable
from workbench.rollouts.nccl import NCCLTransfer
from workbench.rollouts.types import Request, Rollout, Sampling
from workbench.rollouts.vllm_common import asked_logprobs, rollout, sampling_arguments, support_of

log = logging.getLogger(__name__)

_FLOOR = -9999.0  # what the server writes for minus infinity
_DEV = "start it with VLLM_SERVER_DEV_MODE=1"


class VLLMServerEngine:
    """Writes completions with a vLLM server.

    Args:
        base_url: of the server; None: from ``host`` and ``port``.
        host: name or address of its machine.
        port: its port.
        sync: ``merged`` sends all weights, an adapter added to them; ``adapter`` a LoRA adapter alone; ``none`` nothing, the
            server keeps its own weights and the correction of sampler against trainer has to do the rest.
        transport: ``filesystem`` writes weights to a folder that the server reads; ``nccl`` sends them from GPU to GPU.
        sync_dir: that folder, shared with the server's machine; None: one in the temporary directory of this machine.
        model_name: name under which it serves the model; None: the first that it lists.
        api_key: its key; None: none.
        timeout: seconds for one answer, and for a server that is away to come back.
        backoff: seconds before the second attempt; doubled after each, up to 30.
        max_concurrency: requests that are open at once, per rank.
        group_port: of the NCCL group, on this machine.
        structured_outputs_regex: a regular expression that every completion follows; None: none.
        check_sync: most nats per token by which the server may be off the policy after weights were sent; None does not look.
    """

    def __init__(
        self,
        *,
        base_url: str | None = None,
        host: str = "127.0.0.1",
        port: int = 8000,
        sync: Literal["merged", "adapter", "none"] = "merged",
        transport: Literal["filesystem", "nccl"] = "filesystem",
        sync_dir: str | None = None,
        model_name: str | None = None,
        api_key: str | None = None,
        timeout: float = 240.0,
        backoff: float = 0.5,
        max_concurrency: int = 64,
        group_port: int = 51216,
        structured_outputs_regex: str | None = None,
        check_sync: float | None = 0.1,
    ) -> None:
        check_choice("method.engine.sync", sync, ("merged", "adapter", "none"))
        check_choice("method.engine.transport", transport, ("filesystem", "nccl"))
        check_at_least(1, method__engine__max_concurrency=max_concurrency)
        check_at_least(0.001, method__engine__timeout=timeout, method__engine__backoff=backoff)
        if transport == "nccl" and sync != "merged":
            raise UserError(f"method.engine.transport=nccl sends full weights, not method.engine.sync={sync}; use filesystem.")
        if transport == "nccl" and not torch.cuda.is_available():
            raise UserError("method.engine.transport=nccl needs CUDA on this machine; set it to filesystem.")
        self.client = Client(base_url or f"http://{host}:{port}", timeout, api_key)
        self.sync, self.transport, self.model_name = sync, transport, model_name
        self.timeout, self.backoff, self.max_concurrency = timeout, backoff, max_concurrency
        self.group_port, self.regex, self.check_sync = group_port, structured_outputs_regex, check_sync
        self._root = None if sync_dir is None else Path(sync_dir)
        self._folder: Path | None = None
        self.version: int | None = None
        self._mark = ""
        self._adapter: str | None = None
        self._context: int | None = None
        self._transfer: NCCLTransfer | None = None

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and completion together, as the server says."""
        return self._context

    def start(self, policy: Policy, tokenizer: PreTrainedTokenizerBase) -> None:
        """Waits for the server and looks at what it can do.

        Raises:
            UserError: it does not answer, serves another model, or takes no weights.
        """
        self._tokenizer, self._ends = tokenizer, tuple(end_token_ids(policy.hf, tokenizer))
        self._vocabulary = policy.config.get_text_config().vocab_size
        served = self._patiently(lambda: self.client.get("/v1/models"), "list its models")["data"]
        names = [model["id"] for model in served if not model.get("parent")]
        name = self.model_name or (names[0] if names else None)
        found = next((model for model in served if model["id"] == name), None)
        if found is None:
            raise UserError(f"the server at {self.client.base_url} serves no {name!r}; it has: {', '.join(names) or 'none'}.")
        self.model_name, self._context = name, found.get("max_model_len")
        self._check_abilities()
        if self.sync == "merged":
            weights.check_mergeable(policy)
            root = Path(found.get("root") or "")
            if held := weights.checkpoint_shapes(root):
                weights.check_names(weights.weight_shapes(policy), held, f"the server at {self.client.base_url}")
        elif self.sync == "adapter":
            weights.check_adapter(policy)
        run = _agreed(uuid.uuid4().hex[:12])
        self._mark = f"workbench-{run}"
        self._folder = (self._root or Path(tempfile.gettempdir())) / self._mark
        if self.transport == "nccl":
            self._transfer = NCCLTransfer(self.client, self.group_port, _rank())

    def sync_weights(self, policy: Policy, version: int) -> None:
        """Makes the server draw from ``policy`` as it is now; the first rank writes and tells, all ranks gather.

        Raises:
            UserError: it does not take them, or its log-probabilities are not the policy's.
        """
        first = _rank() == 0
        before = self.version
        if self.sync == "merged" and self._transfer is None:
            self._write(policy, version, first)
        elif self.sync == "adapter":
            weights.write_adapter(policy, self._place(version), first=first)
        self.version = version
        fault = None
        if first:
            try:
                if self._transfer is not None:
                    self._send(policy, version)
                else:
                    self._patiently(self._hand_over, "take the weights")
            except UserError as error:
                fault = str(error)
        elif self._transfer is not None:
            self._send(policy, version)
        if (fault := _agreed(fault)) is not None:
            raise UserError(fault)
        if self.sync == "adapter":
            self._adapter = self._name(version)
        if before is not None and before != version and first:
            self._forget(before)
        if self.check_sync is not None and self.sync != "none":
            weights.check_in_step(self, policy, version, self._ends, self.check_sync)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Writes one completion for each request.

        Raises:
            UserError: the server stays away longer than ``timeout``, or refuses a request.
        """
        if self.version is None:
            raise UserError("the server has no weights yet; call sync_weights before generate.")
        bodies = [self._body(request, sampling) for request in requests]
        answers: list[Any] = [None] * len(bodies)
        left, wait, deadline = list(range(len(bodies))), self.backoff, time.monotonic() + self.timeout
        while left:
            self._patiently(self._ensure_weights, "take the weights again")
            got = self._ask([bodies[i] for i in left])
            fault = next((answer for answer in got if isinstance(answer, Exception)), None)
            if not self._holds_weights():
                fault = fault or Unreachable("it lost its weights")
                got = [fault] * len(got)  # drawn with we do not know which
            done = [(i, answer) for i, answer in zip(left, got, strict=True) if not isinstance(answer, Exception)]
            for i, answer in done:
                answers[i] = answer
            left = [i for i in left if answers[i] is None]
            if done:
                wait, deadline = self.backoff, time.monotonic() + self.timeout
            if left:
                log.warning("%d of %d requests are asked again: %s", len(left), len(bodies), fault)
                if time.monotonic() > deadline:
                    raise self._away(fault, "answer")
                time.sleep(wait)
                wait = min(2 * wait, 30.0)
        return [self._rollout(answer, request, sampling) for request, answer in zip(requests, answers, strict=True)]

    def sleep(self) -> None:
        """The server's memory is its own."""

    def wake(self) -> None:
        """The server's memory is its own."""

    def close(self) -> None:
        """Removes the files of this run; the server goes on."""
        if self._transfer is not None:
            self._transfer.close()
        if self._folder is not None and _rank() == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        self.version = self._adapter = self._transfer = None

    # -- weights ----------------------------------------------------------------------------------------------------

    def _check_abilities(self) -> None:
        if self.sync == "none":
            return
        url = self.client.base_url
        needed = {"merged": "/collective_rpc", "adapter": "/v1/load_lora_adapter"}[self.sync]
        if self.transport == "nccl":
            needed = "/init_weight_transfer_engine"
        how = {"merged": _DEV, "adapter": "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"}[self.sync]
        if not self._patiently(lambda: self.client.has(needed), "say what it can do"):
            raise UserError(
                f"the server at {url} takes no weights (it has no {needed}), so that it would go on writing with the ones it was "
                f"started with; if it is vLLM, {how}; method.engine.sync=none trains on them all the same."
            )
        if self.sync == "merged" and not self._patiently(lambda: self.client.has("/update_weight_version"), "say what it can do"):
            raise UserError(f"the server at {url} keeps no version of its weights; it needs vLLM 0.32 or later, and {_DEV}.")

    def _name(self, version: int) -> str:
        return f"{self._mark}-{version}"

    def _place(self, version: int) -> Path:
        return self._folder / str(version)

    def _write(self, policy: Policy, version: int, first: bool) -> None:
        named = weights.named_weights(policy)
        if first:
            weights.write_checkpoint(policy, self._tokenizer, self._place(version), named)
        else:
            for _ in named:  # takes part in gathering
                pass

    def _hand_over(self) -> None:
        """Gives the server the weights of `version`, which lie in their folder."""
        if self.sync == "none":
            return
        name, place = self._name(self.version), str(self._place(self.version))
        if self.sync == "adapter":
            try:
                self.client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": place})
            except Refused as error:
                if "already" not in error.text:
                    raise
            return
        self.client.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": place}})
        self.client.post("/reset_prefix_cache")
        self.client.post("/update_weight_version", {"new_version": name})

    def _send(self, policy: Policy, version: int) -> None:
        self._transfer.send(policy, self._name(version))
        if _rank() == 0:
            self.client.post("/reset_prefix_cache")

    def _holds_weights(self) -> bool:
        """Whether the server is the process that got the weights of `version`."""
        if self.sync == "none":
            return True
        name = self._name(self.version)
        try:
            if self.sync == "adapter":
                return any(model["id"] == name for model in self.client.get("/v1/models")["data"])
            return self.client.get("/weight_info").get("weight_version") == name
        except Unreachable:
            return False

    def _ensure_weights(self) -> None:
        if self._holds_weights():
            return
        if self._transfer is not None:
            raise UserError(
                f"the server at {self.client.base_url} has come back without the run's weights, and its NCCL group died with it; "
                "resume from the last checkpoint, or set method.engine.transport=filesystem, which gives them again."
            )
        self.client.get("/health")  # raises while it is away
        log.warning("the server at %s has come back; its weights of step %d are sent again.", self.client.base_url, self.version)
        self._hand_over()

    def _forget(self, version: int) -> None:
        if self.sync == "adapter":
            try:
                self.client.post("/v1/unload_lora_adapter", {"lora_name": self._name(version)})
            except (Refused, Unreachable) as error:
                log.warning("the adapter of step %d stays on the server: %s", version, error)
        shutil.rmtree(self._place(version), ignore_errors=True)

    # -- requests ---------------------------------------------------------------------------------------------------

    def _body(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        context = self._context or len(request.prompt_ids) + sampling.max_new_tokens
        body = sampling_arguments(request, sampling, context, self._vocabulary, self.regex)
        if self.regex is not None:
            body["structured_outputs"] = {"regex": self.regex}
        return {
            **body,
            "model": self._adapter or self.model_name,
            "prompt": [int(token) for token in request.prompt_ids],
            "n": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def _ask(self, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        """Answers, or the fault where there is none, in order."""

        def one(body: dict[str, Any]) -> Any:
            try:
                return self.client.post("/v1/completions", body)
            except Unreachable as error:
                return error
            except Refused as error:
                if error.status == 404 and self.sync == "adapter":
                    return Unreachable(str(error))  # it has come back without the adapter
                raise

        try:
            with ThreadPoolExecutor(min(self.max_concurrency, len(bodies))) as pool:
                return list(pool.map(one, bodies))
        except Refused as error:
            hint = "; start it with --max-logprobs -1" if "logprobs" in error.text else ""
            raise UserError(f"the server at {self.client.base_url} refused a request ({error}){hint}.") from error

    def _rollout(self, answer: Any, request: Request, sampling: Sampling) -> Rollout:
        choice = answer["choices"][0]
        token_ids, prompt_ids = choice.get("token_ids"), choice.get("prompt_token_ids")
        if token_ids is None or prompt_ids is None:
            raise UserError(
                f"the server at {self.client.base_url} gives no token ids (return_token_ids), and text does not always give back "
                "the tokens that were drawn; it needs vLLM 0.11 or later."
            )
        if list(prompt_ids) != [int(token) for token in request.prompt_ids]:
            raise UserError(f"the server at {self.client.base_url} answered another prompt than the one it was asked.")
        known = choice.get("logprobs") or {}
        logps = [_logp(value) for value in known.get("token_logprobs") or [None] * len(token_ids)]
        support = None
        if asked_logprobs(sampling, self._vocabulary, self.regex):
            every = known.get("top_logprobs") or [{}] * len(token_ids)
            tables = [{int(t.removeprefix("token_id:")): _logp(v) for t, v in (at or {}).items()} for at in every]
            support = [support_of(at, token) for at, token in zip(tables, token_ids, strict=True)]
        return rollout(token_ids, logps, choice.get("finish_reason"), self.version, support, sampling, self._tokenizer)

    def _patiently(self, call: Callable[[], Any], what: str) -> Any:
        """What ``call`` gives, tried again while the server is away, up to ``timeout``."""
        wait, deadline = self.backoff, time.monotonic() + self.timeout
        while True:
            try:
                return call()
            except Refused as error:
                raise UserError(f"the server at {self.client.base_url} does not {what} ({error}).") from error
            except Unreachable as error:
                if time.monotonic() + wait > deadline:
                    raise self._away(error, what) from error
                left = deadline - time.monotonic()
                log.warning("the server at %s is away (%s); trying for %.0f s more.", self.client.base_url, error, left)
            time.sleep(wait)
            wait = min(2 * wait, 30.0)

    def _away(self, error: Exception | None, what: str) -> UserError:
        return UserError(
            f"the server at {self.client.base_url} did not {what} within {self.timeout:g} s ({error}); start it, or check "
            "method.engine.base_url and method.engine.timeout."
        )


def _logp(value: float | None) -> float | None:
    return None if value is None else float("-inf") if value <= _FLOOR else value


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _agreed(value: Any) -> Any:
    """The first rank's value, on every rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]
