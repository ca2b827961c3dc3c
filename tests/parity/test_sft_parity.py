"""SFT follows TRL 1.16's recorded trajectories on the same model and rows: loss 1e-5, grad_norm and metrics 1e-4 relative."""

import pytest
from support import DATA, reference, run_sft

from workbench.models.peft import PeftSpec

CASES = ["sft_text", "sft_messages", "sft_prompt_completion", "sft_assistant_only", "sft_dft", "sft_packing_bfd"]


def replay(case, **method):
    args = case["args"]
    micro = args.get("per_device_train_batch_size", case["common"]["per_device_train_batch_size"])
    accumulation = args.get("gradient_accumulation_steps", case["common"]["gradient_accumulation_steps"])
    data = {
        "train": str(DATA / f"{case['data']}.jsonl"),
        "max_length": args["max_length"],
        "batch_size": micro * accumulation,
        "micro_batch_size": micro,
        "balance": "none",
        "packing": args["packing_strategy"] if args.get("packing") else None,
        "train_on": "assistant" if args.get("assistant_only_loss") else "auto",
    }
    # The recorded entropy and accuracy are means over micro-batches; the loss is divided by the whole step's tokens.
    method = {"loss": args.get("loss_type", "nll"), "scope": "micro_batch", **method}
    return run_sft(data, method)[0]


PEFT = {"sft_lora": PeftSpec(r=4, alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")}


@pytest.mark.parametrize("name", [*CASES, *PEFT])
def test_trajectory(name):
    """All steps, of the adapter too: under seed 0 it begins with TRL's weights."""
    case = reference(name)
    steps = replay(case, peft=PEFT.get(name))
    assert len(steps) == len(case["steps"])
    for ours, theirs in zip(steps, case["steps"], strict=True):
        assert abs(ours["train/loss"] - theirs["loss"]) <= 1e-5 * abs(theirs["loss"]) + 1e-6
        assert ours["train/grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["train/entropy"] == pytest.approx(theirs["entropy"], rel=1e-4, abs=1e-6)
        assert ours["train/mean_token_accuracy"] == pytest.approx(theirs["mean_token_accuracy"], rel=1e-4, abs=1e-6)
