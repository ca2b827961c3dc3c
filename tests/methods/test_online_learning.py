"""GRPO improves what SFT has taught, and what it is not rewarded for it does not learn."""

import pytest
import torch

import workbench
from workbench.models.load import load_model

SHORT = (
    "method=grpo",
    "trainer=cpu",
    "trainer.devices=1",
    "logger=none",
    "save_model=false",
    "callbacks.checkpoint=null",
    "data.eval=null",
    "method.max_completion_length=8",
    "method.layout=shared",
)


def share_right(run, rows: int = 256) -> float:
    """Held-out sums that a run's model answers greedily, word for word."""
    from workbench.tiny.tasks import make_rows

    asked = make_rows("sums", "prompt_only", rows, split="test")
    answers = run.method.generate([row["prompt"] for row in asked], max_new_tokens=8)
    return sum(answer.strip() == row["answer"] for answer, row in zip(answers, asked, strict=True)) / rows


@pytest.mark.slow
def test_grpo_raises_the_share_of_right_answers(tmp_path):
    """The configuration of ``workbench train method=grpo``, in 80 of its steps: half to two thirds of unseen sums before (SFT
    stops at the first evaluation above a half), a tenth more after.

    A reward that is the same for every completion, the control, leaves every weight as it is.
    """
    options = (*SHORT, "scheduler.warmup_steps=25")
    same = workbench.train(
        *options,
        f"paths.run_dir={tmp_path}/same",
        "trainer.max_steps=2",
        rewards=[lambda completions, **_: [1.0] * len(completions)],
    )
    before = share_right(same)
    start = load_model("tiny-sft")
    for name, weight in start.named_parameters():
        assert torch.equal(weight, same.model.get_parameter(name)), f"{name} has moved without a reward"
    after = share_right(workbench.train(*options, f"paths.run_dir={tmp_path}/grpo", "trainer.max_steps=80"))
    print(f"right before {before:.3f}, after {after:.3f}")
    assert 0.4 < before < 0.8, before
    assert after > before + 0.06, (before, after)
