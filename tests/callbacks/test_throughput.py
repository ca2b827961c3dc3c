"""Throughput: what is counted, what it costs, and by which clock."""

import lightning as L
import pytest
import torch
from support import DATA, MODEL

import workbench
from workbench.callbacks.throughput import Share, Stopwatch, Throughput, rates
from workbench.data.batch import MicroBatch, Role
from workbench.losses.reduce import Normalisers
from workbench.models.peft import PeftSpec, apply_peft
from workbench.models.policy import Policy
from workbench.models.work import Cost, Work
from workbench.tiny.model import tiny_model

PAIR = {  # a prompt of 6, completions of 4 and 2, all of which are trained
    "input_ids": [*range(1, 13)],
    "weights": [0.0] * 6 + [1.0] * 6,
    "lengths": [6, 4, 2],
    "parents": [-1, 0, 0],
    "roles": [int(Role.PROMPT), int(Role.CHOSEN), int(Role.REJECTED)],
}


def batch():
    return MicroBatch.from_rows([PAIR], [0], Normalisers(6.0, 2.0, 2.0, 1.0))


@pytest.mark.parametrize(
    ("layout", "positions", "tokens", "pairs"),
    [
        ("padded", 2 * 10, 10 + 8, 2 * 55),
        ("packed", 10 + 8, 10 + 8, 55 + 36),
        ("shared", 12, 12, 21 + (4 * 6 + 10) + (2 * 6 + 3)),
    ],
)
def test_work_by_layout(layout, positions, tokens, pairs):
    policy = Policy(tiny_model("llama", size="pico"), layout=layout)
    policy(batch())
    with torch.no_grad():
        policy(batch())  # leaves no trace
    assert policy.work.take() == Work(positions, tokens, 6, pairs)
    assert policy.work.take() == Work()


def test_cost_of_a_weight_and_of_a_pair():
    model = tiny_model("llama", size="pico", tie_word_embeddings=False)
    config = model.config
    body = sum(p.numel() for p in model.model.parameters()) - model.model.embed_tokens.weight.numel()
    width = config.num_attention_heads * config.head_dim
    cost = Cost.of(Policy(model))
    assert cost == Cost(6 * body, 6 * model.lm_head.weight.numel(), 12 * width * config.num_hidden_layers)
    assert cost(Work(positions=10, outputs=3, pairs=7)) == 10 * cost.body + 3 * cost.head + 7 * cost.attention


def test_frozen_weights_cost_two_thirds():
    model = tiny_model("llama", size="pico", tie_word_embeddings=False)
    whole = Cost.of(Policy(model))
    adapted = apply_peft(model, PeftSpec(r=2, target_modules=["q_proj"]))
    adapters = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    found = Cost.of(Policy(adapted))
    assert found.body == pytest.approx(whole.body * 4 / 6 + 6 * adapters)
    assert found.head == whole.head * 4 / 6


def test_rates_add_up_work_and_wait_for_the_slowest():
    ranks = [
        Share(Work(100, 90, 40, 0), passes=1.0, wall=2.0, generated=10, generating=0.5),
        Share(Work(60, 30, 20, 0), passes=2.0, wall=4.0, generated=20, generating=0.25),
    ]
    assert rates(ranks, Cost(10.0, 0.0, 0.0), peak=1000.0) == {
        "forwarded": 160 / 4,
        "forwarded_in_passes": 160 / 2,
        "trained": 60 / 4,
        "trained_in_passes": 60 / 2,
        "padding": 0.25,
        "generated": 30 / 4,
        "generated_in_generation": 30 / 0.5,
        "mfu": pytest.approx(1600 / 2000 / 4),
        "mfu_in_passes": pytest.approx(1600 / 2000 / 2),
    }
    assert "mfu" not in rates(ranks) and "generated" not in rates([Share(Work(1, 1, 1), 1.0, 1.0)])
    assert "trained" not in rates([Share(Work(8, 8, 0), 1.0, 1.0)])  # a classifier trains no tokens


def test_the_watch_counts_what_runs_alone(monkeypatch):
    now = iter([1.0, 2.0, 10.0, 13.0])
    monkeypatch.setattr("workbench.callbacks.throughput.time.perf_counter", lambda: next(now))
    watch = Stopwatch(torch.device("cpu"))
    watch.stop()
    watch.start()
    watch.start()
    watch.stop()
    watch.start()
    watch.stop()
    assert watch.take() == 4.0 and watch.take() == 0.0


def run(tmp_path, *overrides):
    small = ["trainer=cpu", "logger=csv", "save_model=false", "exact_match=0", f"paths.root={tmp_path}"]
    return workbench.train("callbacks=throughput", "callbacks.progress.style=off", *small, *overrides).history


def test_a_run_logs_it(tmp_path):
    sft = ["model=hf", f"model.name={MODEL}", "data=file", f"data.train={DATA / 'prompt_completion.jsonl'}"]
    steps = run(tmp_path, *sft, "data.batch_size=4", "data.micro_batch_size=2", "trainer.max_steps=3", "method.layout=padded")
    wall, passes = steps["train/throughput/forwarded"], steps["train/throughput/forwarded_in_passes"]
    assert (passes >= wall).all() and (wall > 0).all()
    assert steps["train/throughput/padding"].between(0.01, 0.99).all()
    assert "train/throughput/generated" not in steps and "train/throughput/mfu" not in steps


def test_a_window_is_counted_where_it_is_written(tmp_path):
    online = ["method=grpo", "model=tiny", "model.init_kwargs={size: pico}", "data.batch_size=8", "method.num_generations=4"]
    windows = ["method.steps_per_generation=2", "method.num_iterations=2", "method.max_completion_length=4"]
    steps = run(tmp_path, *online, *windows, "trainer.max_steps=8", "data.eval=null")
    generated = steps.dropna(subset=["train/loss"])["train/throughput/generated"]
    assert list(generated.notna()) == [True, False, False, False] * 2


def test_a_checkpoint_that_an_earlier_callback_saves_costs_that_steps_rates_alone(tmp_path, monkeypatch):
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "own.ckpt")

    whole = Throughput.on_train_batch_end
    monkeypatch.setattr(
        Throughput,
        "on_train_batch_end",
        lambda self, trainer, *args: (Saves().on_train_batch_end(trainer, *args), whole(self, trainer, *args))[1],
    )
    sft = ["model=hf", f"model.name={MODEL}", "data=file", f"data.train={DATA / 'prompt_completion.jsonl'}"]
    steps = run(tmp_path, *sft, "data.batch_size=4", "trainer.max_steps=3")
    assert list(steps["step"]) == [1, 2, 3]
    assert list(steps["train/throughput/forwarded"].notna()) == [True, False, True]
