"""`RewardModel`: the score of a trained reward model as a reward."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench.data.spec import PrepareSpec, Truncation
from workbench.errors import UserError, check_at_least
from workbench.models.heads import classification_head, is_classifier, load_classifier
from workbench.models.load import ModelSpec, as_spec
from workbench.models.policy import Policy
from workbench.models.scoring import score
from workbench.models.tokenizer import load_tokenizer
from workbench.rewards.texts import Completion


class RewardModel:
    """Scores of a sequence classifier with one output, such as ``method=reward`` saves.

    Prompt and completion reach it as text: they are rendered with its own chat template and tokenizer, as in its training, and
    the score is read at the last token. What the policy's tokens were does not matter. The model is in eval mode, has no gradient
    and is part of no checkpoint. A completion that was cut off is scored like one that ended.

    Args:
        model: folder or hub name of a reward model or of its adapter, a `ModelSpec` or its fields, or a loaded model.
        tokenizer: its tokenizer or the name of one; None: the model's own.
        batch_size: completions per forward pass.
        max_length: longest sequence in tokens; None: any.
        truncation: what a longer one keeps: ``keep_end`` or ``keep_start``.
        dtype: of the weights, where the model is loaded here; None: float32, or that of a `ModelSpec`.
        name: in the metrics; None: the last part of the model's name.

    Raises:
        UserError: a model without one score a sequence, or no tokenizer.
    """

    def __init__(
        self,
        model: str | ModelSpec | Mapping[str, Any] | PreTrainedModel,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        *,
        batch_size: int = 32,
        max_length: int | None = None,
        truncation: Truncation = "keep_end",
        dtype: str | None = None,
        name: str | None = None,
    ) -> None:
        check_at_least(1, batch_size=batch_size)
        if truncation == "drop":
            raise UserError("reward model: truncation=drop leaves completions without a score; use keep_end or keep_start.")
        if max_length is None and truncation != "keep_end":
            raise UserError(f"reward model: truncation={truncation} has no effect without max_length.")
        self.batch_size = batch_size
        self.prepare = PrepareSpec(max_length=max_length, truncation=truncation)
        self.model, self.tokenizer, self.device = model, tokenizer, torch.device("cpu")
        if isinstance(model, torch.nn.Module):
            if dtype is not None:
                raise UserError(f"reward model: dtype={dtype} has no effect on a model that is loaded already.")
            label = getattr(model, "name_or_path", "") or "reward_model"
            if not is_classifier(model):
                raise UserError(f"reward model: {type(model).__name__} is no sequence classifier; load one with load_classifier.")
        else:
            fields = {"name": os.fspath(model)} if isinstance(model, str | os.PathLike) else model
            fields = fields if isinstance(fields, ModelSpec) else {**fields, **({"dtype": dtype} if dtype else {})}
            if isinstance(fields, ModelSpec) and dtype is not None and dtype != fields.dtype:
                raise UserError(f"reward model: dtype={dtype} contradicts the model's own dtype={fields.dtype}.")
            self.model = as_spec(fields)
            label = self.model.name
        self.__name__ = name or Path(label.rstrip("/")).name
        self._policy: Policy | None = None

    def place(self, device: torch.device | str) -> None:
        """Loads the model if it is not loaded, and moves it to ``device``."""
        self.device = torch.device(device)
        self._loaded().to(self.device)

    def __call__(self, prompts: list[Completion], completions: list[Completion], **columns: Any) -> list[float]:
        """Scores, one for each completion."""
        policy = self._loaded()
        rows = [_row(p, c) for p, c in zip(prompts, completions, strict=True)]
        return score(policy, self.tokenizer, rows, spec=self.prepare, batch_size=self.batch_size)

    def _loaded(self) -> Policy:
        if self._policy is None:
            network = self.model if isinstance(self.model, torch.nn.Module) else load_classifier(self.model)
            if (outputs := classification_head(network).weight.shape[0]) != 1:
                raise UserError(f"reward model {self.__name__}: it has {outputs} outputs where a reward model has one.")
            if not isinstance(self.tokenizer, PreTrainedTokenizerBase):
                self.tokenizer = load_tokenizer(self.tokenizer or self.model)
            network.requires_grad_(False)
            self._policy = Policy(network).eval().to(self.device)
        return self._policy


def _row(prompt: Completion, completion: Completion) -> dict[str, Any]:
    """A text continues a text; a message answers messages; a text that answers messages becomes the assistant's."""
    if isinstance(prompt, str) != isinstance(completion, str):
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        else:
            prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, str):
        prompt, completion = _joined(list(prompt), list(completion))
    return {"prompt": prompt, "completion": completion}


def _joined(prompt: list[dict], completion: Sequence[dict]) -> tuple[list[dict], list[dict]]:
    """A completion that goes on with the prompt's last message is one message with it."""
    if prompt and completion and prompt[-1].get("role") == "assistant" == completion[0].get("role"):
        start = prompt.pop()
        first = {**completion[0], "content": f"{start.get('content') or ''}{completion[0].get('content') or ''}"}
        completion = [first, *completion[1:]]
    return prompt, list(completion)
