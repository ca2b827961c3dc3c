"""KTO follows TRL 1.16's recorded trajectories on the same model and rows: loss 1e-5, grad_norm and metrics 1e-4 relative."""

import pytest
from support import DATA, reference, run_method

from workbench.methods.kto import KTO


@pytest.mark.parametrize("name", ["kto_default", "kto_apo"])
def test_trajectory(name):
    case = reference(name)
    args = case["args"]
    data = {"train": str(DATA / "unpaired.jsonl"), "max_length": args["max_length"], "batch_size": 8, "balance": "none"}
    loss = args.get("loss_type", "kto")
    # The recorded baseline is that of each micro-batch, which is the whole step here.
    method = {"loss": loss, "beta": args["beta"], "kl_scope": "micro_batch" if loss == "kto" else "step"}
    steps, _, _ = run_method(KTO, data, {**method, "scope": "micro_batch"})
    assert len(steps) == len(case["steps"])
    for ours, theirs in zip(steps, case["steps"], strict=True):
        assert abs(ours["train/loss"] - theirs["loss"]) <= 1e-5 * abs(theirs["loss"]) + 1e-6
        assert ours["train/grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        for metric in theirs.keys() - {"step", "loss", "grad_norm"}:
            assert ours[f"train/{metric}"] == pytest.approx(theirs[metric], rel=1e-4, abs=1e-6), metric
    assert {"kl", "entropy", "rewards/margins", "logps/rejected", "logits/chosen"} <= case["steps"][-1].keys()
