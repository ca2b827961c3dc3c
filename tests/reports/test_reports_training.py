"""What goes wrong in training runs in practice: steps, rates, checkpoints, ends of answers, what is saved."""

import functools
import json
import logging
from datetime import timedelta
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from peft import PeftModel
from report_rig import Fit, assert_same_gradient, nano
from rig import CHATML, M6, assistant, t2, t3, user, with_template
from support import SaveAt, run_sft
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from workbench.callbacks import progress
from workbench.callbacks.exact_match import exact_match
from workbench.callbacks.progress import State, StepProgress
from workbench.callbacks.samples import GenerationSamples
from workbench.errors import UserError
from workbench.methods.optim import adamw, schedule
from workbench.models.peft import PeftSpec

ROWS = [{"text": "abcdefghij"[: 3 + i % 7]} for i in range(20)]
ALL = {"max_steps": -1}
LINEAR = functools.partial(schedule, name="linear")


@pytest.fixture
def shown(monkeypatch):
    """Every state of the progress bar."""

    class Recorder:
        interval = 0.0

        def __init__(self):
            self.states = []

        def show(self, state):
            self.states.append(State(**{**vars(state), "values": {}}))

        def close(self):
            pass

    recorder = Recorder()
    monkeypatch.setattr(progress, "_display", lambda style, seconds: recorder)
    return recorder


# -- steps and rates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "data", "trainer", "sizes"),
    [
        (3, {"micro_batch_size": 1}, {"max_epochs": 4}, [3, 3, 3, 3]),
        (20, {"micro_batch_size": 2}, {"max_epochs": 2}, [8, 8, 4, 8, 8, 4]),
        (20, {"micro_batch_size": 2, "drop_last": True}, {"max_epochs": 2}, [8, 8, 8, 8]),
        (20, {"micro_batch_size": 2}, {"max_epochs": 2, "limit_train_batches": 0.7}, [8, 8, 8, 8]),
        (20, {"micro_batch_size": 2}, {"max_epochs": 3, "limit_train_batches": 1}, [8, 8, 8]),
        (20, {"micro_batch_size": 2}, {"max_epochs": 9, "max_steps": 4}, [8, 8, 4, 8]),
        (20, {"micro_batch_size": 2, "streaming": True}, {"max_steps": 4}, [8, 8, 4, 8]),
        (20, {"micro_batch_size": 4, "streaming": True}, {"max_steps": 4, "limit_train_batches": 2}, [8, 8, 4, 8]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_bar_schedule_and_bounds_count_the_same_steps(shown, rows, data, trainer, sizes):
    """Lightning-AI/pytorch-lightning #21808: a step at every epoch's end, whatever accumulate_grad_batches says, so that the
    counters part. A short epoch ends with a step of its own here, over the rows that it holds, and is counted everywhere."""
    settings = {**ALL, "enable_progress_bar": True, **trainer}
    run = Fit(ROWS[:rows], t2(), method={"scheduler": LINEAR}, trainer=settings, callbacks=[StepProgress()], **data)
    count = len(sizes)
    assert (len(run.steps), run.trainer.global_step, run.data.total_steps) == (count, count, count)
    assert {state.total for state in shown.states} == {count} and shown.states[-1].step == count
    assert [step["train/lr"] for step in run.steps] == pytest.approx([1 - i / count for i in range(count)])
    per_step = run.data.num_micro
    assert len(run.batches) == count * per_step
    taken = [sum(b.num_rows for b in run.batches[i : i + per_step]) for i in range(0, len(run.batches), per_step)]
    assert taken == sizes


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"accumulate_grad_batches": 8}, "accumulate_grad_batches=8 is derived here .* gives 4"),
        ({"val_check_interval": 9}, r"val_check_interval=9 is more than the 3 optimizer steps of an epoch; set at most 3"),
        ({"val_check_interval": timedelta(seconds=1)}, "may end within an optimizer step"),
        ({"limit_train_batches": 0.1}, r"limit_train_batches=0\.1 is less than one of an epoch's 3 optimizer steps"),
        ({"overfit_batches": 1}, "replaces the order of the rows; use trainer.limit_train_batches"),
    ],
)
def test_counts_that_do_not_fit_name_both_numbers(trainer, message):
    """Lightning-AI/pytorch-lightning #19684."""
    with pytest.raises(UserError, match=message):
        Fit(ROWS, t2(), micro_batch_size=2, eval=ROWS[:1], trainer=trainer)


@pytest.mark.parametrize(
    ("interval", "at"), [(1.0, [3, 6]), (0.5, [1, 2, 3, 4, 5, 6]), (0.01, [1, 2, 3, 4, 5, 6]), (2, [2, 5]), (3, [3, 6])]
)
def test_validation_comes_between_steps(interval, at):
    """A share of an epoch in micro-batches would end within a step."""
    seen = []

    class Note(L.Callback):
        def on_validation_start(self, trainer, module):
            seen.append((trainer.global_step, trainer.fit_loop._should_accumulate()))

    settings = {**ALL, "max_epochs": 2, "val_check_interval": interval, "num_sanity_val_steps": 0}
    Fit(ROWS, t2(), micro_batch_size=2, eval=ROWS[:1], trainer=settings, callbacks=[Note()])
    assert seen == [(step, False) for step in at]


def test_an_evaluation_set_that_is_never_reached_is_told(caplog):
    Fit(ROWS, t2(), eval=ROWS[:1], trainer={"max_steps": 2})
    assert any("never evaluated: that would come after step 3, and the run ends at 2" in m for m in caplog.messages)
    caplog.clear()
    Fit(ROWS, t2(), eval=ROWS[:1], trainer={"max_steps": 3})
    assert not any("never evaluated" in m for m in caplog.messages)


def test_the_rate_changes_once_a_step_and_goes_on_after_a_resume(tmp_path):
    """Lightning-AI/pytorch-lightning #20436: stepped per epoch by default, or per micro-batch with accumulation."""
    warm_up = functools.partial(schedule, name="linear", warmup_steps=4)
    options = {"batch_size": 6, "method": {"scheduler": warm_up}, "trainer": {"max_steps": 8}}
    closed_form = [min(step / 4, (8 - step) / 4) for step in range(8)]
    tokenizer = t2()
    run = Fit(ROWS, tokenizer, micro_batch_size=2, callbacks=[SaveAt(tmp_path, [3, 5])], **options)
    assert run.data.num_micro == 3
    assert [step["train/lr"] for step in run.steps] == pytest.approx(closed_form)
    for stop, micro in ((3, 2), (5, 3)):
        rest = Fit(ROWS, tokenizer, micro_batch_size=micro, checkpoint=tmp_path / f"{stop}.ckpt", **options)
        assert [step["train/lr"] for step in rest.steps] == pytest.approx(closed_form[stop:])


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (functools.partial(schedule, name="constant", options={"num_cycles": 2}), "no effect with scheduler name=constant"),
        (functools.partial(schedule, name="cosine_with_min_lr"), "min_lr"),
        (torch.optim.lr_scheduler.ReduceLROnPlateau, "waits for a measure"),
    ],
)
def test_schedules_that_cannot_act_are_refused(factory, message):
    with pytest.raises(UserError, match=message):
        Fit(ROWS, t2(), method={"scheduler": factory})


def test_a_step_without_a_trained_token_moves_nothing_and_has_no_numbers_of_nothing():
    """allenai/open-instruct #1685: a fully masked batch gives NaN."""
    rows = [{"prompt": "p" * 29, "completion": "ab"}]
    run = Fit(rows, t2(), packing="bfd_split", max_length=10, batch_size=1, trainer={**ALL, "max_epochs": 1})
    assert run.trained() == [""] and run.trained(2) == ["a"]
    assert (run.steps[0]["train/loss"], run.steps[0]["train/grad_norm"]) == (0.0, 0.0)
    assert all(value - value == 0 for step in run.steps for value in step.values())
    assert "train/entropy" in run.steps[2] and "train/entropy" not in run.steps[0]


def test_a_search_for_batch_sizes_is_refused():
    """huggingface/trl #3842: it changes the rows of a step; the bound on one forward changes no number."""
    with pytest.raises(UserError, match=r"BatchSizeFinder changes data\.batch_size"):
        Fit(ROWS, t2(), callbacks=[BatchSizeFinder()])


# -- evaluation ---------------------------------------------------------------------------------------------------------


def test_several_evaluation_sets_are_prepared_once_and_measured_again(monkeypatch):
    """huggingface/trl #6370: sets too small to pack, prepared anew for every evaluation."""
    from workbench.data.features import RowPreparer

    sets = {"a": [{"text": "a b c"}, {"text": "d"}, {"text": "ef"}], "b": [{"text": "gh"}]}
    settings = {"max_steps": 2, "val_check_interval": 1}
    run = Fit(ROWS, t2(), eval=sets, packing="bfd", max_length=16, trainer=settings, optim=adamw)
    assert [len(rows) for rows in run.data._evals.values()] == [1, 1]
    first = run.validation()
    assert {"val/a/loss", "val/b/loss", "val/a/entropy"} <= first.keys() and first["val/a/loss"] != first["val/b/loss"]
    monkeypatch.setattr(RowPreparer, "features", None)
    again = run.trainer.validate(run.method, datamodule=run.data, verbose=False)
    assert {k: v for part in again for k, v in part.items() if k.startswith("val/")} == first


class Half:
    """Metrics as people write them."""

    def __call__(self, prompts, completions, **columns):
        return [0.5] * len(completions)

    def bound(self, prompts, completions, **columns):
        return [0.25] * len(completions)


def constant(prompts, completions, value, **columns):
    return [value] * len(completions)


def test_metrics_may_be_any_callable_and_keep_names_of_their_own(tmp_path):
    """huggingface/trl #6313: partials, instances and bound methods have no ``__name__``."""
    rows = [{"prompt": "a", "completion": "b"}]
    metrics = {
        "one": functools.partial(constant, value=1.0),
        "two": functools.partial(constant, value=2.0),
        "instance": Half(),
        "bound": Half().bound,
        "anonymous": lambda prompts, completions, **columns: [4.0],
    }
    settings = {"max_steps": 1, "val_check_interval": 1, "default_root_dir": tmp_path}
    samples = GenerationSamples(1, max_new_tokens=2, metrics=metrics, print_rows=0)
    share = functools.partial(lambda predictions, scale: {"rows": scale * len(predictions.rows)}, scale=3)
    run = Fit(rows, t2(), eval=rows, trainer=settings, method={"compute_metrics": share}, callbacks=[samples])
    expected = {"one": 1.0, "two": 2.0, "instance": 0.5, "bound": 0.25, "anonymous": 4.0, "rows": 3.0}
    assert {name: run.validation()[f"val/{name}"] for name in expected} == expected
    alone = GenerationSamples(1, max_new_tokens=2, metrics=functools.partial(constant, value=1.0), print_rows=0)
    assert Fit(rows, t2(), eval=rows, trainer=settings, callbacks=[alone]).validation()["val/constant"] == 1.0


# -- ends of answers, and what is saved ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ends():
    """Learnt by heart under a template whose end of a turn is not the tokenizer's end of sequence."""
    rows = [
        {"prompt": [user("Hi")], "completion": [assistant("Yes.")]},
        {"prompt": [user("Bye")], "completion": [assistant("See you.")]},
    ]
    settings = {"max_steps": 60}
    optim = functools.partial(adamw, lr=1e-2)
    tokenizer = with_template(t3(), M6)
    model = nano(tokenizer)
    model.generation_config = GenerationConfig(eos_token_id=[0], max_length=40)
    return Fit(rows, tokenizer, model=model, eval=rows, optim=optim, trainer=settings)


def test_answers_end_by_themselves_in_the_run_and_after_it(two_ends, tmp_path):
    """huggingface/trl #931: generation does not stop; transformers #48016: an end id exported as padding, 0 of 164 tasks."""
    run, prompts = two_ends, [row["prompt"] for row in two_ends.data.eval_rows()]
    answers = run.method.generate(prompts, max_new_tokens=20, skip_special_tokens=False)
    assert answers == ["Yes.<end_of_turn>", "See you.<end_of_turn>"]
    assert exact_match(run.method, run.data, 2, 20) == 1.0
    run.method.save_pretrained(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    ends = settings["eos_token_id"]
    assert ends == [0, tokenizer.convert_tokens_to_ids("<end_of_turn>")] and settings["max_length"] == 40
    assert settings.get("pad_token_id") not in ends
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**ids, do_sample=False)
        assert tokenizer.decode(out[0, ids["input_ids"].shape[1] :]) == answer


def test_an_adapters_checkpoint_holds_the_adapter_and_its_folder_loads_plainly(tmp_path):
    """Lightning-AI/pytorch-lightning #21053: every checkpoint holds the frozen base."""
    tokenizer = t2()
    nano(tokenizer).save_pretrained(tmp_path / "base")
    spec = {"peft": PeftSpec(r=2, alpha=4)}
    options = {"optim": adamw, "batch_size": 4, "trainer": {"max_steps": 4}}
    start = functools.partial(AutoModelForCausalLM.from_pretrained, tmp_path / "base")
    whole = Fit(ROWS, tokenizer, model=start(), method=spec, callbacks=[SaveAt(tmp_path, [2])], **options)
    saved = torch.load(tmp_path / "2.ckpt", weights_only=True)
    trained = {name: p for name, p in whole.method.named_parameters() if p.requires_grad}
    assert set(saved["state_dict"]) == set(trained) and all("lora" in name for name in trained)
    stored = sum(t.numel() for state in saved["optimizer_states"] for p in state["state"].values() for t in p.values())
    size = sum(p.numel() for p in trained.values())
    assert stored == 2 * size + len(trained)  # two moments and a counter
    assert Path(tmp_path / "2.ckpt").stat().st_size < 3 * 4 * size + 100_000
    rest = Fit(ROWS, tokenizer, model=start(), method=spec, checkpoint=tmp_path / "2.ckpt", **options)
    assert [s["train/loss"] for s in rest.steps] == [s["train/loss"] for s in whole.steps[2:]]
    whole.method.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 4 * size + 20_000
    plain = PeftModel.from_pretrained(start(), tmp_path / "adapter")
    ids = torch.arange(2, 12)[None]
    assert torch.equal(plain.eval()(ids).logits, whole.model.eval()(ids).logits)


def test_a_checkpoint_of_a_model_in_memory_is_that_of_its_files(tmp_path):
    """transformers #24252: what one kind of run wrote does not load in the other."""
    tokenizer = t2()
    nano(tokenizer).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    options = {"optim": adamw, "batch_size": 4, "trainer": {"max_steps": 4}}
    whole = Fit(ROWS, tokenizer, callbacks=[SaveAt(tmp_path, [2])], **options)
    saved = torch.load(tmp_path / "2.ckpt", weights_only=True)["state_dict"]
    assert set(saved) == {f"policy.hf.{name}" for name in whole.model.state_dict()}
    by_name = run_sft(
        {"train": ROWS, "batch_size": 4},
        {"model": str(tmp_path / "base"), "optim": adamw},
        {"max_steps": 4, "gradient_clip_val": None},
        checkpoint=tmp_path / "2.ckpt",
    )[0]
    assert [s["train/loss"] for s in by_name] == [s["train/loss"] for s in whole.steps[2:]]


@pytest.mark.parametrize("checkpointing", [True, "selective"])
def test_an_adapter_learns_the_same_with_recomputation_and_without_a_word(tmp_path, checkpointing, recwarn, caplog):
    """huggingface/trl #2671: a frozen base and checkpointing give no gradient, or a flood of warnings, and a slow generation."""
    tokenizer = with_template(t2(), CHATML)
    rows = [{"messages": [user("q" * i), assistant("a" * i)]} for i in range(1, 5)]
    spec = {"peft": PeftSpec(r=2, alpha=4)}
    plain = Fit(rows, tokenizer, method=spec, trainer={"max_steps": 2})
    again = Fit(rows, tokenizer, method={**spec, "gradient_checkpointing": checkpointing}, trainer={"max_steps": 2})
    state = lambda run: {n: p.detach() for n, p in run.method.named_parameters() if p.requires_grad}  # noqa: E731
    assert_same_gradient(state(again), state(plain), 1e-7)
    assert [s["train/grad_norm"] for s in again.steps] == pytest.approx([s["train/grad_norm"] for s in plain.steps], rel=1e-6)
    assert plain.steps[0]["train/grad_norm"] > 0
    widths = []
    embedding = again.method.policy.causal_lm.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda module, inputs, output: widths.append(inputs[0].shape[-1]))
    again.method.generate(["abc"], max_new_tokens=4, eos_token_id=len(tokenizer) - 1)
    hook.remove()
    assert widths == [3, 1, 1, 1]  # with the cache
    again.method.save_pretrained(tmp_path, merge=True)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["use_cache"] is True
    words = [str(w.message) for w in recwarn] + [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert not [w for w in words if "requires_grad" in w or "use_cache" in w or "checkpoint" in w]
