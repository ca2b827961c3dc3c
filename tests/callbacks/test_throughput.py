"""Throughput: what is counted, what it costs, and by which clock."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from support import DATA, MODEL, SaveAt, run_method, run_sft
from throughput_run import JOBS, run_job

import workbench
from workbench.callbacks import throughput
from workbench.callbacks.history import History
from workbench.callbacks.peak_flops import known_peak, peak_flops
from workbench.callbacks.throughput import Share, Stopwatch, Throughput, rates
from workbench.data.batch import MicroBatch, Role
from workbench.errors import UserError
from workbench.loggers.csv import CSVLogger, read_history
from workbench.losses.reduce import Normalisers
from workbench.methods.dpo import DPO
from workbench.methods.kto import KTO
from workbench.models.peft import PeftSpec, apply_peft, copy_adapter
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
    policy(MicroBatch.empty(batch().norm))  # leaves no trace
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
    forward = Cost.of(Policy(model), backward=False)
    assert forward == Cost(cost.body / 3, cost.head / 3, cost.attention / 3)


def test_frozen_weights_cost_two_thirds():
    model = tiny_model("llama", size="pico", tie_word_embeddings=False)
    whole = Cost.of(Policy(model))
    adapted = apply_peft(model, PeftSpec(r=2, target_modules=["q_proj"]))
    adapters = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    found = Cost.of(Policy(adapted))
    assert found.body == pytest.approx(whole.body * 4 / 6 + 6 * adapters)
    assert found.head == whole.head * 4 / 6
    assert Cost.of(Policy(adapted), backward=False).head == whole.head * 2 / 6
    copy_adapter(adapted, "default", "reference")  # stands beside the one that computes
    assert Cost.of(Policy(adapted)) == found


def test_rates_add_up_work_and_wait_for_the_slowest():
    ranks = [
        Share(Work(60, 50, 40), 1.0, 2.0, Work(40, 40, 40), operations=1000.0, generated=10, generating=0.5),
        Share(Work(60, 30, 20), 2.0, 4.0, operations=600.0, generated=20, generating=0.25),
    ]
    assert rates(ranks, peak=1000.0) == {
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
    assert "mfu" not in rates([Share(Work(1, 1, 1), 1.0, 1.0)], peak=1000.0)
    assert "trained" not in rates([Share(Work(8, 8, 0), 1.0, 1.0)])  # a classifier trains no tokens


@pytest.mark.parametrize(
    ("name", "half", "tf32"),
    [
        ("NVIDIA H200", 989.4, 494.7),
        ("NVIDIA H200 NVL", 835.5, 417.7),
        ("NVIDIA GH200 480GB", 989.4, 494.7),
        ("NVIDIA B200", 2250.0, 1125.0),
        ("NVIDIA GB200", 2500.0, 1250.0),
        ("NVIDIA L40S", 362.05, 183.0),
    ],
)
def test_peaks_of_devices_by_name(monkeypatch, name, half, tf32):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
    monkeypatch.setattr("torch.get_float32_matmul_precision", lambda: "high")
    device = torch.device("cuda", 0)
    assert peak_flops(device, torch.bfloat16) == peak_flops(device, torch.float16) == half * 1e12
    assert peak_flops(device, torch.float32) == tf32 * 1e12
    monkeypatch.setattr("torch.get_float32_matmul_precision", lambda: "highest")
    assert peak_flops(device, torch.float32) < 100e12


def test_peaks_that_lightning_knows_and_that_nobody_does(monkeypatch, recwarn):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    assert peak_flops(torch.device("cuda", 0), torch.bfloat16) == 312e12
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA Z9")
    assert peak_flops(torch.device("cuda", 0), torch.bfloat16) is None and not recwarn
    assert known_peak("NVIDIA Z9", torch.bfloat16) is None and peak_flops(torch.device("cpu"), torch.float32) is None


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


# -- counts of whole runs -------------------------------------------------------------------------------------------


class Watched:
    """The shares that runs hand to `rates`, and a clock that only forward passes move."""

    def __init__(self, monkeypatch):
        self.shares, self.now = [], 0.0
        original, backbone = throughput.rates, Policy._backbone

        def kept(ranks, peak=None):
            self.shares.append(ranks)
            return original(ranks, peak)

        def timed(policy, *args, **kwargs):
            self.now += 1.0 if torch.is_grad_enabled() else 10.0
            return backbone(policy, *args, **kwargs)

        monkeypatch.setattr(throughput, "rates", kept)
        monkeypatch.setattr(Policy, "_backbone", timed)
        monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def take(self):
        shares, self.shares = self.shares, []
        return shares


@pytest.fixture
def watched(monkeypatch):
    return Watched(monkeypatch)


class Lengths(L.Callback):
    """Tokens of every step's sequences, companions' apart."""

    def __init__(self):
        self.steps, self.companions = [[]], [0]

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if not batch.is_empty:
            lengths, parent = batch.starts.diff().tolist(), batch.parent.tolist()
            inner = set(parent)
            whole = [n + (lengths[p] if p >= 0 else 0) for n, p in zip(lengths, parent, strict=True)]
            self.steps[-1].append([n for s, n in enumerate(whole) if s not in inner])
        self.companions[-1] += sum(len(c.tokens) for c in batch.companions)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch.closes_step:
            self.steps.append([]), self.companions.append(0)


def counts(rows, layout):
    """Positions, tokens and pairs of micro-batches of sequences of these lengths, one after the other."""
    if layout == "padded":
        rows = [[max(lengths)] * len(lengths) for lengths in rows]
    flat = [n for lengths in rows for n in lengths]
    return sum(flat), sum(n * (n + 1) // 2 for n in flat)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("micro", [None, 2])
def test_counts_of_accumulated_and_evaluated_steps(watched, layout, micro):
    rows = str(DATA / "messages.jsonl")
    data = {"eval": {"val": rows}, "eval_micro_batch_size": 4, "micro_batch_size": micro}
    lengths = Lengths()
    trainer = {"max_steps": 3, "val_check_interval": 1}
    run_sft(data, {"layout": layout}, trainer, callbacks=[lengths, Throughput()])
    shares = watched.take()
    assert len(shares) == 3
    for (share,), rows in zip(shares, lengths.steps, strict=False):
        positions, pairs = counts(rows, layout)
        assert (share.trained.positions, share.trained.pairs) == (positions, pairs)
        assert share.trained.tokens == sum(map(sum, rows))
        assert share.compared == Work()
        assert share.wall == share.passes == len(rows)  # each forward pass takes a second, those of evaluations none of these


PAIRS = [{"prompt": "the mill", "chosen": " counts" * (i + 1), "rejected": " stops" * (9 - i)} for i in range(8)]


@pytest.mark.parametrize(
    ("options", "asked"),
    [({}, True), ({"reference_free": True}, False), ({"precompute_ref_logps": True}, False), ({"peft": PeftSpec(r=2)}, True)],
    ids=["copy", "free", "precomputed", "adapter_off"],
)
def test_reference_passes_count_where_they_are_made(watched, tmp_path, options, asked):
    data = {"train": PAIRS, "batch_size": 4, "micro_batch_size": 2, "cache_dir": tmp_path}
    _, module, _ = run_method(DPO, data, options, {"max_steps": 2}, callbacks=[Throughput()])
    whole, forward = (Cost.of(module.policy, backward=backward) for backward in (True, False))
    for (share,) in watched.take():
        assert share.compared == (share.trained if asked else Work()) and share.trained.positions > 0
        operations = whole(share.trained) + (forward(share.trained) if asked else 0.0)
        assert share.operations == pytest.approx(operations)
        assert share.passes == share.wall == 2 * (1.0 + 10.0 * asked)


def test_another_models_passes_cost_what_that_model_costs(watched):
    small = tiny_model("llama", size="pico", num_hidden_layers=1, vocab_size=workbench_vocabulary())
    data = {"train": PAIRS, "batch_size": 4}
    _, module, _ = run_method(DPO, data, {"ref_model": small}, {"max_steps": 1}, callbacks=[Throughput()])
    ((share,),) = watched.take()
    own = Cost.of(Policy(small), backward=False)
    assert own.body < Cost.of(module.policy, backward=False).body
    assert share.operations == pytest.approx(Cost.of(module.policy)(share.trained) + own(share.compared))


def workbench_vocabulary():
    return json.loads((Path(MODEL) / "config.json").read_text())["vocab_size"]


def test_the_baseline_of_kto_counts(watched):
    rows = [{"prompt": "the mill", "completion": f" counts {i} lanterns" * (i + 1), "label": i % 2 == 0} for i in range(8)]
    lengths = Lengths()
    data = {"train": rows, "batch_size": 4, "micro_batch_size": 2}
    run_method(KTO, data, {"layout": "packed"}, {"max_steps": 2}, callbacks=[lengths, Throughput()])
    for (share,), companions in zip(watched.take(), lengths.companions, strict=False):
        assert companions > 0 and share.compared.positions == share.trained.positions + 2 * companions


def test_windows_count_the_passes_before_their_first_step(watched, tmp_path):
    online = ["method=grpo", "model=tiny", "model.init_kwargs={size: pico}", "data.batch_size=8", "method.num_generations=4"]
    windows = ["method.steps_per_generation=2", "method.num_iterations=2", "method.max_completion_length=4"]
    run(tmp_path, *online, *windows, "method.beta=0.1", "trainer.max_steps=4", "data.eval=null", "data.micro_batch_size=4")
    first, second, third, fourth = (share for (share,) in watched.take())
    assert first.compared.positions == 2 * (first.trained.positions + second.trained.positions)  # old and reference
    assert second.compared == third.compared == fourth.compared == Work()
    assert (third.trained, fourth.trained) == (first.trained, second.trained)
    assert [share.generated > 0 for share in (first, second, third, fourth)] == [True, False, False, False]
    assert first.passes == 2 + 10.0 * 8 and second.passes == 2  # two micro-batches a step, two steps, two models


def test_a_resumed_run_counts_its_own_steps(watched, tmp_path):
    data = {"micro_batch_size": 4}
    run_sft(data, None, {"max_steps": 4}, callbacks=[Throughput(), SaveAt(tmp_path, [2])])
    whole = watched.take()
    run_sft(data, None, {"max_steps": 4}, callbacks=[Throughput()], checkpoint=tmp_path / "2.ckpt")
    rest = watched.take()
    assert [(share.trained, share.wall) for (share,) in rest] == [(share.trained, share.wall) for (share,) in whole[2:]]


def test_a_peak_given_by_hand(watched):
    history = History()
    _, module, _ = run_sft(None, None, {"max_steps": 2}, callbacks=[history, Throughput(peak_flops=1e9)])
    for (share,), mfu in zip(watched.take(), history.frame["train/throughput/mfu"], strict=True):
        assert mfu == pytest.approx(Cost.of(module.policy)(share.trained) / 1e9 / share.wall)
    with pytest.raises(UserError, match="peak_flops=0 "):
        Throughput(peak_flops=0)


def test_a_line_says_why_there_is_no_mfu(caplog):
    caplog.set_level("INFO", "workbench")
    run_sft(None, None, {"max_steps": 2}, callbacks=[Throughput()])
    assert [r.getMessage() for r in caplog.records if "mfu" in r.getMessage()] == [
        "train/throughput/mfu is left out: the peak of this cpu is not known; give it as callbacks.throughput.peak_flops, in "
        "operations per second."
    ]


def test_history_and_loggers_have_the_same_rows(tmp_path):
    history = History()
    trainer = {"max_steps": 3, "logger": CSVLogger(str(tmp_path)), "log_every_n_steps": 1}
    steps, module, _ = run_sft(None, None, trainer, callbacks=[history, Throughput()])
    names = [name for name in module.step_metrics if name.startswith("train/throughput/")]
    assert "train/throughput/trained_in_passes" in names
    saved = read_history(tmp_path)
    assert list(saved["step"]) == list(history.frame["step"]) == [1, 2, 3]
    ours = history.frame[names].to_numpy().flatten().tolist()
    assert ours == [row[name] for row in steps for name in names]
    assert saved[names].to_numpy().flatten().tolist() == pytest.approx(ours, rel=1e-6)  # Lightning logs fp32


@pytest.mark.slow
def test_two_processes_share_the_work_of_one(watched, tmp_path):
    script = Path(__file__).with_name("throughput_run.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script), str(tmp_path)]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for name, job in JOBS.items():
        run_job(job, {})
        alone = [(share.trained, share.compared, share.operations) for (share,) in watched.take()]
        for rank in range(2):
            together = json.loads((tmp_path / f"{name}-{rank}.json").read_text())
            assert len(together) == len(alone) == 2
            for ranks, (trained, compared, operations) in zip(together, alone, strict=True):
                assert len(ranks) == 2 and all(share["trained"]["tokens"] > 0 for share in ranks)
                for which, expected in (("trained", trained), ("compared", compared)):
                    assert {k: sum(share[which][k] for share in ranks) for k in vars(expected)} == vars(expected)
                assert sum(share["operations"] for share in ranks) == pytest.approx(operations)
