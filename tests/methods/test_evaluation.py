"""Evaluation during training: hand-checked numbers, several sets, metrics of one's own, generated answers."""

import numpy as np
import pytest
import torch
from support import DATA, run_sft

from workbench.errors import UserError

EVAL = str(DATA / "prompt_completion.jsonl")
ONCE = {"max_steps": 2, "val_check_interval": 2, "num_sanity_val_steps": 0}


def validation(trainer):
    return {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val")}


@pytest.mark.parametrize("rows", [1, 5, 96])
def test_the_loss_is_the_mean_over_trained_tokens_of_the_whole_set(rows):
    data = {"train": EVAL, "eval": EVAL, "eval_micro_batch_size": rows}
    _, module, trainer = run_sft(data, {}, {**ONCE, "limit_train_batches": 2})
    prepared = trainer.datamodule._evals["eval"]
    total = count = hits = 0.0
    for row in prepared:
        ids, weights = torch.tensor([row["input_ids"]]), torch.tensor(row["weights"][1:])
        with torch.no_grad():
            logps = module.policy.hf(ids).logits[0, :-1].log_softmax(-1)
        target = ids[0, 1:]
        total -= (logps.gather(-1, target[:, None]).squeeze(-1) * weights).sum().item()
        hits += ((logps.argmax(-1) == target) * weights).sum().item()
        count += weights.sum().item()
    metrics = validation(trainer)
    assert metrics["val/loss"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["val/mean_token_accuracy"] == pytest.approx(hits / count, rel=1e-6)


def test_several_sets_are_named_and_a_single_row_is_a_set():
    sets = {"all": EVAL, "one": {"path": EVAL, "limit": 1}}
    _, _, trainer = run_sft({"train": EVAL, "eval": sets}, trainer=ONCE)
    metrics = validation(trainer)
    assert {"val/all/loss", "val/one/loss", "val/all/entropy", "val/one/mean_token_accuracy"} <= metrics.keys()
    assert metrics["val/all/loss"] != metrics["val/one/loss"]


def test_packed_sets_with_a_single_row():
    data = {"train": str(DATA / "text.jsonl"), "packing": "bfd"}
    sets = {"three": {"path": data["train"], "limit": 3}, "one": {"path": data["train"], "limit": 1}}
    _, _, packed = run_sft({**data, "eval": sets, "batch_size": 2}, trainer=ONCE)
    _, _, plain = run_sft({**data, "eval": sets, "batch_size": 2, "eval_packing": False}, trainer=ONCE)
    assert validation(packed)["val/three/loss"] == pytest.approx(validation(plain)["val/three/loss"], rel=1e-5)
    assert len(packed.datamodule._evals["three"]) == 1
    assert len(plain.datamodule._evals["three"]) == 3


def test_own_metrics_see_every_row_in_order():
    seen = []

    def share_right(predictions):
        seen.append(predictions)
        right = [np.mean(p == t) for p, t in zip(predictions.predictions, predictions.labels, strict=True)]
        return {"share_right": float(np.mean(right)), "perplexity": float(np.exp(-np.concatenate(predictions.logps).mean()))}

    data = {"train": EVAL, "eval": EVAL, "eval_micro_batch_size": 7}
    _, _, trainer = run_sft(data, {"compute_metrics": share_right}, ONCE)
    assert seen[-1].rows == list(range(96))
    first = trainer.datamodule._evals["eval"][0]
    assert seen[-1].labels[0].tolist() == [t for t, w in zip(first["input_ids"], first["weights"], strict=True) if w]
    metrics = validation(trainer)
    assert metrics["val/perplexity"] == pytest.approx(np.exp(metrics["val/loss"]), rel=1e-5)
    assert 0 <= metrics["val/share_right"] <= 1


def test_own_metrics_must_be_a_dict():
    with pytest.raises(UserError, match="compute_metrics must return a dict of numbers, not float"):
        run_sft({"train": EVAL, "eval": EVAL}, {"compute_metrics": lambda p: 0.5}, ONCE)


def test_evaluation_leaves_training_alone():
    with_eval, _, _ = run_sft({"train": EVAL, "eval": EVAL}, trainer={"max_steps": 4, "val_check_interval": 1})
    without, _, _ = run_sft({"train": EVAL}, trainer={"max_steps": 4})
    assert [s["train/loss"] for s in with_eval] == [s["train/loss"] for s in without]


def test_training_mode_survives_generation():
    _, module, trainer = run_sft({"train": EVAL, "eval": EVAL}, trainer={"max_steps": 1})
    module.policy.train()
    rows = trainer.datamodule.eval_rows(limit=3)
    texts = module.generate([r["prompt"] for r in rows], max_new_tokens=4)
    assert len(texts) == 3
    assert all(m.training for m in module.policy.modules())
    assert module.policy.config.use_cache


def test_generation_does_not_depend_on_the_batch():
    _, module, trainer = run_sft({"train": EVAL, "eval": EVAL}, trainer={"max_steps": 10})
    prompts = [r["prompt"] for r in trainer.datamodule.eval_rows(limit=5)] + ["The river", ""]
    together = module.generate(prompts, max_new_tokens=6)
    assert together == [module.generate([p], max_new_tokens=6)[0] for p in prompts]
    assert len(set(together)) > 1


def test_one_row_learnt_by_heart_ends_by_itself():
    """The end token is trained although it may equal the pad token, so generation stops where the text does."""
    rows = [{"prompt": [{"role": "user", "content": "Hi?"}], "completion": [{"role": "assistant", "content": "Yes."}]}]
    _, module, _ = run_sft({"train": rows, "batch_size": 1}, trainer={"max_steps": 60}, lr=3e-3)
    for pad in ("<|im_end|>", "<|endoftext|>"):
        module.tokenizer.pad_token = pad
        assert module.generate([rows[0]["prompt"]], max_new_tokens=20, skip_special_tokens=False) == ["Yes.<|im_end|>"]


def test_a_share_of_the_training_rows_can_be_held_out():
    _, _, trainer = run_sft({"train": EVAL, "eval_size": 0.25}, trainer=ONCE)
    data = trainer.datamodule
    assert (len(data._train), len(data._evals["eval"])) == (72, 24)
    train = {tuple(r) for r in data._train["input_ids"]}
    assert "val/loss" in validation(trainer)
    assert sum(tuple(r) in train for r in data._evals["eval"]["input_ids"]) == 0
    with pytest.raises(UserError, match="exclude each other"):
        run_sft({"train": EVAL, "eval": EVAL, "eval_size": 4})


def test_rows_of_other_layouts_can_be_answered():
    rows = [{"conversations": [{"from": "human", "value": "The river"}, {"from": "gpt", "value": "counts."}]}]
    _, _, trainer = run_sft({"train": rows, "eval": rows, "batch_size": 1}, trainer={"max_steps": 1})
    (row,) = trainer.datamodule.eval_rows()
    assert row["prompt"] == [{"role": "user", "content": "The river"}]
    assert row["reference"] == "counts."
