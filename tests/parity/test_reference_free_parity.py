"""CPO, SimPO, ORPO and TPO follow TRL 1.16's recorded trajectories: loss 1e-5, grad_norm and metrics 1e-4 relative.

TRL's CPO and ORPO tokenise the text that the chat template renders and put an end token behind the terminator it prints: the
replay gives them the same text, which then ends the same way. Their ``logits/*`` are no property of the completions: means over
prompt, completion and padding alike, reproduced below. Ours are means over the completions, as DPO's and TPO's are in TRL too.
"""

import json

import pytest
import torch
from support import DATA, MODEL, reference, run_method
from transformers import AutoModelForCausalLM

from workbench.invariants.rendered import as_text
from workbench.methods.cpo import CPO
from workbench.methods.orpo import ORPO
from workbench.methods.tpo import TPO
from workbench.models.load import ModelSpec
from workbench.models.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(ModelSpec(MODEL))
CASES = ["cpo_sigmoid", "cpo_hinge", "cpo_simpo", "orpo_default", "tpo_sigmoid"]


def lines(name):
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def rows_of(kind):
    rows = lines("preference")
    if kind == "tpo":
        return [{**row, "reference": gold["completion"]} for row, gold in zip(rows, lines("prompt_completion"), strict=True)]
    return as_text(rows, TOKENIZER)


def replay(case):
    """TRL averages means of micro-batches, and ORPO's likelihood runs over prompts as well."""
    kind, common = case["kind"], case["common"]
    micro, accumulation = common["per_device_train_batch_size"], common["gradient_accumulation_steps"]
    data = {
        "train": rows_of(kind),
        "max_length": case["args"]["max_length"],
        "batch_size": micro * accumulation,
        "micro_batch_size": micro,
        "balance": "none",
        "train_on": "all" if kind == "orpo" else "auto",
    }
    method = {"loss" if name == "loss_type" else name: value for name, value in case["args"].items() if name != "max_length"}
    return run_method({"cpo": CPO, "orpo": ORPO, "tpo": TPO}[kind], data, {**method, "scope": "micro_batch"})[0]


@pytest.mark.parametrize("name", CASES)
def test_trajectory(name):
    case = reference(name)
    steps = replay(case)
    for ours, theirs in zip(steps, case["steps"], strict=True):
        assert abs(ours["train/loss"] - theirs["loss"]) <= 1e-5 * abs(theirs["loss"]) + 1e-6
        for metric, value in theirs.items():
            upstream = metric.startswith("logits/") and case["kind"] != "tpo"  # see the test below
            if metric not in ("step", "loss") and not upstream:
                allowed = 0.0 if metric == "grad_norm" else 1e-6
                assert ours[f"train/{metric}"] == pytest.approx(value, rel=1e-4, abs=allowed), metric


@pytest.mark.parametrize("name", ["cpo_sigmoid", "orpo_default"])
def test_what_trl_calls_logits_is_a_mean_over_prompt_and_padding(name):
    """CPO: over all positions of the padded micro-batch; ORPO: over all but the last one. Ours are the completions' own."""
    case, rows = reference(name), rows_of("cpo")[:8]
    model, sides = AutoModelForCausalLM.from_pretrained(MODEL), ("chosen", "rejected")
    theirs, ours = dict.fromkeys(sides, 0.0), dict.fromkeys(sides, 0.0)
    for part in (rows[:4], rows[4:]):
        texts = [(row["prompt"], row[side] + TOKENIZER.eos_token) for side in sides for row in part]
        ids = TOKENIZER([prompt + answer for prompt, answer in texts], padding=True, padding_side="right", return_tensors="pt")
        with torch.no_grad():
            logits = model(**ids).logits.mean(-1)[:, : -1 if case["kind"] == "orpo" else None]
        before = torch.tensor([len(TOKENIZER(prompt).input_ids) for prompt, _ in texts])
        last = ids.attention_mask.sum(1) - 1
        at = torch.arange(logits.shape[1])
        inside = (at >= before[:, None] - 1) & (at < last[:, None])
        for side, half in zip(sides, (slice(0, 4), slice(4, 8)), strict=True):
            theirs[side] += logits[half].mean().item() / 2
            ours[side] += logits[half][inside[half]].mean().item() / 2
    step = replay(case)[0]
    for side in sides:
        assert theirs[side] == pytest.approx(case["steps"][0][f"logits/{side}"], rel=1e-5)
        assert ours[side] == pytest.approx(step[f"train/logits/{side}"], rel=1e-5)
        assert abs(ours[side] - theirs[side]) > 1e-4


def test_without_the_second_end_token_a_completion_is_one_token_shorter():
    """What rows that are not rendered beforehand train on: one end token. The numbers are other ones."""
    case = reference("cpo_sigmoid")
    rendered = replay(case)[0]
    plain = run_method(CPO, {"train": lines("preference")}, {"beta": case["args"]["beta"], "scope": "micro_batch"})[0][0]
    tokens = [r["train/num_tokens"] for r in (rendered, plain)]
    assert tokens[0] - tokens[1] == 16, "eight pairs, two sides"
    assert abs(plain["train/loss"] - case["steps"][0]["loss"]) > 1e-2
