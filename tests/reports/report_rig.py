"""Rows to a trained step on models of a few thousand parameters, and what that step learnt from."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from support import QUIET, Recorder
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from workbench.data.batch import MicroBatch
from workbench.data.module import DataModule
from workbench.methods.sft import SFT


def nano(tokenizer: PreTrainedTokenizerBase, *, absolute: bool = False, tied: bool = False, seed: int = 0) -> PreTrainedModel:
    """Two layers of Llama's kind or, with absolute positions, of GPT-2's."""
    torch.manual_seed(seed)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "tie_word_embeddings": tied}
    if absolute:
        return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=256, **ends))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes, **ends))


class Batches(L.Callback):
    """Keeps every training micro-batch."""

    def __init__(self) -> None:
        self.seen: list[MicroBatch] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: MicroBatch, batch_idx: int) -> None:
        self.seen.append(batch)


class Fit:
    """One run of SFT on a bare trainer.

    Args:
        rows: training source.
        tokenizer: with its template.
        model: to train; None: a nano Llama.
        method: options of `SFT`.
        trainer: options of the trainer; one step by default.
        callbacks: further ones.
        optim: called with parameter groups; None: SGD of rate 1, so that a step is the gradient.
        checkpoint: to resume from.
        data: options of `DataModule`.
    """

    def __init__(
        self,
        rows: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model: PreTrainedModel | None = None,
        method: dict[str, Any] | None = None,
        trainer: dict[str, Any] | None = None,
        callbacks: Sequence[L.Callback] = (),
        optim: Any = None,
        checkpoint: Path | None = None,
        **data: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.model = nano(tokenizer) if model is None else model
        self.before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        optim = optim or functools.partial(torch.optim.SGD, lr=1.0)
        self.method = SFT(model=self.model, tokenizer=tokenizer, optim=optim, **(method or {}))
        self.data = DataModule(rows, **{"shuffle": False, "max_length": 256, **data})
        recorder, batches = Recorder(), Batches()
        settings = {**QUIET, "devices": 1, "max_steps": 1, **(trainer or {})}
        self.trainer = L.Trainer(**settings, callbacks=[recorder, batches, *callbacks])
        self.trainer.fit(self.method, self.data, ckpt_path=checkpoint, weights_only=True)
        self.steps, self.batches = recorder.steps, batches.seen

    @property
    def report(self) -> Any:
        return self.data.reports["train"]

    def moved(self) -> dict[str, torch.Tensor]:
        """The first step's gradient: by how much SGD of rate 1 moved each parameter down."""
        return {name: self.before[name] - p.detach() for name, p in self.model.named_parameters()}

    def segments(self, batch: int = 0) -> list[tuple[str, str]]:
        """Text and trained text of each segment of a micro-batch."""
        return segments(self.batches[batch], self.tokenizer)

    def trained(self, batch: int = 0) -> list[str]:
        """Trained text of each segment."""
        return [text for _, text in self.segments(batch)]

    def validation(self) -> dict[str, float]:
        return {k: float(v) for k, v in self.trainer.callback_metrics.items() if k.startswith("val/")}


def segments(batch: MicroBatch, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    found = []
    for start, end in zip(batch.starts[:-1].tolist(), batch.starts[1:].tolist(), strict=True):
        ids, weights = batch.tokens[start:end].tolist(), batch.weights[start:end].tolist()
        found.append((tokenizer.decode(ids), tokenizer.decode([i for i, w in zip(ids, weights, strict=True) if w])))
    return found


def hand_step(model: PreTrainedModel, rows: Sequence[tuple[list[int], list[float]]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of sequences ``(ids, weights)``, each read alone without padding: sum of weighted nll over weights."""
    total, weight = 0.0, 0.0
    model.eval()
    for ids, weights in rows:
        logps = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        picked = logps.gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)
        total = total - (picked * torch.tensor(weights[1:])).sum()
        weight += sum(weights[1:])
    loss = total / weight
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    return loss.item(), dict(zip(names, gradients, strict=True))


def assert_same_gradient(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 2e-6) -> None:
    for name, value in theirs.items():
        assert (ours[name] - value).abs().max() <= tolerance, name


def write_rows(path: Path, rows: Sequence[Any]) -> str:
    """A JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
