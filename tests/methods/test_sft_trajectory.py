"""One SFT run gives the same trajectory however it is executed (single process; `tests/distributed` has the others)."""

import pytest
import torch
from support import SaveAt, assert_same_trajectory, deviation, run_sft

from workbench.errors import UserError
from workbench.models.peft import PeftSpec

STEPS = {"max_steps": 20}  # 12 steps an epoch: the run crosses an epoch's end
SHUFFLED = {"shuffle": True, "train_on": "assistant"}


@pytest.fixture(scope="module")
def canonical():
    return run_sft(SHUFFLED, trainer=STEPS)[0]


@pytest.mark.parametrize(
    ("data", "method"),
    [
        ({"micro_batch_size": 4}, {}),
        ({"micro_batch_size": 1}, {}),
        ({"micro_batch_size": 2, "balance": "none"}, {}),
        ({"micro_batch_tokens": 150}, {}),
        ({"micro_batch_size": 4}, {"layout": "packed"}),
        ({}, {"layout": "packed", "pad_to_multiple_of": 16}),
        ({}, {"gradient_checkpointing": True}),
        ({"micro_batch_size": 4}, {"gradient_checkpointing": "selective", "pad_to_multiple_of": 8}),
        ({"num_workers": 1, "micro_batch_size": 4}, {}),
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "-",
)
def test_members(canonical, data, method):
    steps, _, _ = run_sft({**SHUFFLED, **data}, method, STEPS)
    assert_same_trajectory(steps, canonical)


def test_the_canonical_run_binds(canonical):
    """Clipping acts, micro-batches are unequal, and the run learns; otherwise the members prove little."""
    assert min(s["train/grad_norm"] for s in canonical) > 1.0
    assert canonical[-1]["train/loss"] < 0.85 * canonical[0]["train/loss"]


@pytest.mark.parametrize("stop", [1, 7, 12, 13])
def test_resume_with_another_micro_batch_size(tmp_path, canonical, stop):
    run_sft({**SHUFFLED, "micro_batch_size": 2}, trainer=STEPS, callbacks=[SaveAt(tmp_path, [stop])])
    steps, _, _ = run_sft({**SHUFFLED, "micro_batch_size": 4}, trainer=STEPS, checkpoint=tmp_path / f"{stop}.ckpt")
    assert steps[0]["step"] == stop + 1
    assert_same_trajectory(steps, canonical[stop:])


def test_resume_after_the_end_of_training_does_nothing(tmp_path):
    first, _, _ = run_sft(trainer={"max_steps": 3}, callbacks=[SaveAt(tmp_path, [3])])
    again, _, _ = run_sft(trainer={"max_steps": 3}, checkpoint=tmp_path / "3.ckpt")
    assert (len(first), len(again)) == (3, 0)


def test_more_epochs_go_on_where_the_run_ended(tmp_path):
    whole, _, _ = run_sft(SHUFFLED, trainer={"max_steps": -1, "max_epochs": 2})
    run_sft(SHUFFLED, trainer={"max_steps": -1, "max_epochs": 1}, callbacks=[SaveAt(tmp_path, [12])])
    rest, _, _ = run_sft(SHUFFLED, trainer={"max_steps": -1, "max_epochs": 2}, checkpoint=tmp_path / "12.ckpt")
    assert len(whole) == 24
    assert_same_trajectory(rest, whole[12:])


def test_resume_with_other_data_settings_is_refused(tmp_path):
    run_sft(trainer={"max_steps": 1}, callbacks=[SaveAt(tmp_path, [1])])
    with pytest.raises(UserError, match="written with data batch_size=8, this run has batch_size=4"):
        run_sft({"batch_size": 4}, trainer={"max_steps": 2}, checkpoint=tmp_path / "1.ckpt")


def test_streaming_is_the_map_style_run(canonical):
    in_order, _, _ = run_sft({"micro_batch_size": 4}, trainer=STEPS)
    stream, _, _ = run_sft({"micro_batch_size": 4, "streaming": True}, trainer=STEPS)
    for name in ("train/loss", "train/grad_norm", "train/num_tokens"):
        assert deviation(stream, in_order, name) <= 1e-5


def test_streaming_resumes_exactly(tmp_path):
    data = {"streaming": True, "micro_batch_size": 4}
    whole, _, _ = run_sft(data, trainer=STEPS, callbacks=[SaveAt(tmp_path, [7, 13])])
    for stop in (7, 13):
        rest, _, _ = run_sft({**data, "micro_batch_size": 2}, trainer=STEPS, checkpoint=tmp_path / f"{stop}.ckpt")
        assert_same_trajectory(rest, whole[stop:])


@pytest.mark.parametrize(
    ("data", "trainer", "message"),
    [
        (
            {"streaming": True},
            {"max_steps": -1, "max_epochs": 1},
            "data.streaming=true has no known length; set trainer.max_steps",
        ),
        ({"streaming": True, "micro_batch_tokens": 99}, {}, "needs all lengths"),
        ({"streaming": True, "num_workers": 2}, {}, "read in order by one worker"),
        ({"micro_batch_size": 4}, {"accumulate_grad_batches": 3}, "accumulate_grad_batches=3 is derived here"),
    ],
)
def test_impossible_runs_say_why(data, trainer, message):
    with pytest.raises(UserError, match=message):
        run_sft(data, trainer=trainer)


def test_an_own_accumulation_that_agrees_is_fine():
    assert len(run_sft({"micro_batch_size": 4}, trainer={"accumulate_grad_batches": 2, "max_steps": 2})[0]) == 2


def test_a_short_epoch_is_a_step_of_its_own():
    """3 rows with a batch of 8 over 4 epochs: one step an epoch, by rule, and max_steps counts the same steps."""
    rows = [{"text": "The river counts the lantern."}, {"text": "The garden."}, {"text": "A violin repairs the mill."}]
    steps, _, trainer = run_sft({"train": rows, "micro_batch_size": 1}, trainer={"max_steps": -1, "max_epochs": 4})
    assert (len(steps), trainer.global_step, trainer.datamodule.total_steps) == (4, 4, 4)
    assert trainer.accumulate_grad_batches == 8


def test_limits_and_intervals_count_optimizer_steps():
    data = {"micro_batch_size": 2, "eval": "tests/parity/data/text.jsonl", "train": "tests/parity/data/text.jsonl"}
    validations = []

    import lightning as L

    class Note(L.Callback):
        def on_validation_start(self, trainer, module):
            validations.append(trainer.global_step)

    trainer = {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 6, "val_check_interval": 3, "num_sanity_val_steps": 0}
    steps, _, _ = run_sft(data, trainer=trainer, callbacks=[Note()])
    assert len(steps) == 12
    assert validations == [3, 6, 9, 12]


def test_repeating_a_run_is_bit_for_bit():
    states = [
        torch.cat([p.detach().flatten() for p in run_sft(SHUFFLED, trainer={"max_steps": 3})[1].parameters()]) for _ in "ab"
    ]
    assert torch.equal(*states)


@pytest.mark.parametrize("peft", [{"use_dora": False}, {"use_dora": True}, {"use_rslora": True}])
def test_adapters_resume_and_keep_only_their_own_weights(tmp_path, peft):
    spec = {"peft": PeftSpec(r=4, alpha=8, **peft)}
    data = {"micro_batch_size": 4}
    whole, module, _ = run_sft(data, spec, {"max_steps": 8}, callbacks=[SaveAt(tmp_path, [5])])
    saved = torch.load(tmp_path / "5.ckpt", weights_only=True)
    trained = {n for n, p in module.named_parameters() if p.requires_grad}
    assert set(saved["state_dict"]) == trained
    assert all("lora" in name for name in trained)
    rest, _, _ = run_sft({"micro_batch_size": 2}, spec, {"max_steps": 8}, checkpoint=tmp_path / "5.ckpt")
    assert_same_trajectory(rest, whole[5:])


def test_an_adapter_checkpoint_is_strict_about_its_own_weights(tmp_path):
    run_sft(method={"peft": PeftSpec(r=4, alpha=8)}, trainer={"max_steps": 1}, callbacks=[SaveAt(tmp_path, [1])])
    with pytest.raises(UserError, match=r"has another shape for .* of the trained weights"):
        run_sft(method={"peft": PeftSpec(r=8, alpha=8)}, trainer={"max_steps": 2}, checkpoint=tmp_path / "1.ckpt")
    with pytest.raises(UserError, match=r"lacks .* of the trained weights"):
        run_sft(trainer={"max_steps": 2}, checkpoint=tmp_path / "1.ckpt")


def test_adapter_gradients_do_not_depend_on_checkpointing(recwarn):
    spec = {"peft": PeftSpec(r=4, alpha=8)}
    plain, _, _ = run_sft(method=spec, trainer={"max_steps": 3})
    recomputed, _, _ = run_sft(method={**spec, "gradient_checkpointing": True}, trainer={"max_steps": 3})
    assert_same_trajectory(recomputed, plain, 1e-7)
    assert not [w for w in recwarn if "requires_grad" in str(w.message)]


def test_dropout_that_would_be_switched_off_is_refused():
    with pytest.raises(UserError, match=r"peft.dropout=0.1 has no effect with method.disable_dropout=true"):
        run_sft(method={"peft": PeftSpec(dropout=0.1)})


def test_micro_batch_means_differ_from_the_steps_mean():
    """The knob that TRL's averaging needs does something, on metrics."""
    step, _, _ = run_sft({"micro_batch_size": 4, "balance": "none"}, trainer={"max_steps": 1})
    micro, _, _ = run_sft({"micro_batch_size": 4, "balance": "none"}, {"scope": "micro_batch"}, {"max_steps": 1})
    assert micro[0]["train/loss"] == pytest.approx(step[0]["train/loss"], rel=1e-6)
    assert abs(micro[0]["train/entropy"] - step[0]["train/entropy"]) > 1e-6
