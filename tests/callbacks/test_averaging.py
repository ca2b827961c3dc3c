"""EMA and BEMA against hand numbers and closed forms, and that they change nothing they should not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_run import SmallModule, trainer

from workbench.callbacks.averaging import BEMA, EMA
from workbench.callbacks.checkpoint import Checkpoint, resolve_checkpoint
from workbench.errors import UserError
from workbench.strategies.checkpoint_io import read_checkpoint

QUIET = {"limit_val_batches": 0}


class _Path(Callback):
    """The trained weights after every optimizer step, the initial ones first."""

    def __init__(self):
        self.weights = []

    def on_train_start(self, run, module):
        self._add(module)

    def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
        if run.global_step == len(self.weights):
            self._add(module)

    def _add(self, module):
        self.weights.append(torch.cat([p.detach().flatten() for p in module.layer.parameters()]).double())


def _flat(weights):
    return torch.cat([weights[f"layer.{name}"].flatten() for name in ("weight", "bias")]).double()


def _fit(folder, average, **options):
    path, module = _Path(), SmallModule()
    trainer(folder, path, average, **(QUIET | options)).fit(module)
    return path.weights, module


def test_bema_by_hand():
    bema = BEMA(ema_power=0.5, bias_power=0.5, lag=3)
    bema.start({"w": torch.tensor([0.0])})
    bema.update({"w": torch.tensor([1.0])}, step=1)  # age 4: alpha = beta = 1/2
    assert bema.ema["w"].item() == 0.5 and bema.average["w"].item() == 0.5 * 1 + 0.5
    bema.update({"w": torch.tensor([3.0])}, step=6)  # age 9: alpha = beta = 1/3
    assert bema.ema["w"].item() == pytest.approx(4 / 3) and bema.average["w"].item() == pytest.approx(3 / 3 + 4 / 3)


@pytest.mark.parametrize(
    ("options", "alpha", "beta"),
    [
        ({}, 14**-0.2, 14**-0.5),  # The paper's constants: lag 10, multiplier 1, powers 0.5 and 0.2.
        ({"multiplier": 2.0}, 18**-0.2, 18**-0.5),
        ({"lag": 0}, 4**-0.2, 4**-0.5),
        ({"ema_power": 0.0}, 14**-0.2, 1.0),
        ({"ema_power": 1.0}, 14**-0.2, 14**-1.0),
        ({"bias_power": 0.0}, 1.0, 14**-0.5),
        ({"min_ema_multiplier": 0.9}, 14**-0.2, 0.9),
    ],
)
def test_each_option_of_bema(options, alpha, beta):
    bema = BEMA(**options)
    bema.start({"w": torch.tensor([2.0])})
    bema.update({"w": torch.tensor([5.0])}, step=4)
    assert bema.average["w"].item() == pytest.approx(alpha * 3 + 2 + beta * 3, rel=1e-6)


@pytest.mark.parametrize(("freq", "after"), [(1, 0), (3, 0), (2, 3), (1, 8)])
def test_bema_over_a_run(tmp_path, freq, after):
    bema = BEMA(update_freq=freq, update_after=after, lag=2, apply_at_end=False)
    weights, module = _fit(tmp_path, bema)
    assert len(weights) == 9
    ema = average = weights[after]
    for step in range(after + 1, 9):
        if (step - after) % freq == 0:
            age = 2 + step
            ema = ema + age**-0.5 * (weights[step] - ema)
            average = age**-0.2 * (weights[step] - weights[after]) + ema
    assert torch.allclose(_flat(bema.average), average, atol=1e-6)
    assert torch.equal(_flat(dict(module.named_parameters())), weights[8])


@pytest.mark.parametrize(("freq", "after"), [(1, 0), (3, 0), (2, 3)])
def test_ema_is_its_closed_form(tmp_path, freq, after):
    ema = EMA(decay=0.7, update_freq=freq, update_after=after, apply_at_end=False)
    weights, _ = _fit(tmp_path, ema)
    used = weights[after::freq]
    n = len(used) - 1
    expected = 0.7**n * used[0] + sum(0.3 * 0.7 ** (n - i) * used[i] for i in range(1, n + 1))
    assert torch.allclose(_flat(ema.average), expected, atol=1e-6)


def test_an_average_does_not_change_training(tmp_path):
    plain = SmallModule()
    trainer(tmp_path / "a").fit(plain)
    averaged = SmallModule()
    trainer(tmp_path / "b", EMA(0.5, evaluate=True, apply_at_end=False)).fit(averaged)
    assert averaged.weights() == plain.weights()


class _Seen(SmallModule):
    def __init__(self):
        super().__init__()
        self.evaluated = {}

    def validation_step(self, batch, batch_idx):
        self.evaluated[self.trainer.global_step] = _flat(dict(self.named_parameters()))
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("evaluate", [True, False])
def test_validation_with_the_average(tmp_path, evaluate):
    path, module, ema = _Path(), _Seen(), EMA(0.5, evaluate=evaluate, apply_at_end=False)
    trainer(tmp_path, path, ema, Checkpoint(keep=None)).fit(module)
    average = path.weights[0]
    for step in range(1, 9):
        average = (average + path.weights[step]) / 2
        if step % 4 == 0:
            expected = average if evaluate else path.weights[step]
            assert torch.allclose(module.evaluated[step], expected, atol=1e-6)
            saved = read_checkpoint(resolve_checkpoint(step, tmp_path))
            assert torch.equal(_flat(saved["state_dict"]), path.weights[step])  # Checkpoints hold the current weights.
            assert torch.allclose(_flat(saved["callbacks"]["EMA"]["average"]), average, atol=1e-6)
    assert torch.allclose(path.weights[0], _flat(dict(_Seen().named_parameters())))


def test_an_error_in_validation_leaves_the_current_weights(tmp_path):
    class Failing(_Seen):
        def validation_step(self, batch, batch_idx):
            raise RuntimeError("boom")

    path, module = _Path(), Failing()
    with pytest.raises(RuntimeError, match="boom"):
        trainer(tmp_path, path, EMA(0.5, evaluate=True)).fit(module)
    assert torch.equal(_flat(dict(module.named_parameters())), path.weights[4])


@pytest.mark.parametrize("apply", [True, False])
def test_the_end(tmp_path, apply):
    class Saving(SmallModule):
        def save_pretrained(self, folder):
            self.exported = folder, self.weights()

    module, ema = Saving(), EMA(0.5, apply_at_end=apply, export_dir="somewhere")
    path = _Path()
    trainer(tmp_path, path, ema, **QUIET).fit(module)
    average = torch.tensor(module.exported[1]).double()
    assert module.exported[0] == "somewhere" and torch.allclose(average, _flat(ema.average), atol=1e-7)
    final = average if apply else path.weights[8]
    assert torch.allclose(torch.tensor(module.weights()).double(), final, atol=1e-7)
    assert not torch.allclose(average, path.weights[8], atol=1e-4)


@pytest.mark.parametrize("make", [lambda: EMA(0.7, 2), lambda: BEMA(2, update_after=1, lag=2), lambda: BEMA(3)])
def test_a_resumed_average_is_the_same(tmp_path, make):
    whole = make()
    trainer(tmp_path / "a", whole, Checkpoint(every_n_steps=1, keep=None), **QUIET).fit(SmallModule())
    for step in (1, 3, 6):
        resumed = make()
        path = resolve_checkpoint(step, tmp_path / "a")
        trainer(tmp_path / "b", resumed, Checkpoint(), **QUIET).fit(SmallModule(), ckpt_path=path)
        for attribute in whole.kept:
            one, other = getattr(whole, attribute), getattr(resumed, attribute)
            assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_only_trained_parameters_and_none_of_it_in_the_module(tmp_path):
    bema, module = BEMA(1), SmallModule()
    trainer(tmp_path, bema, Checkpoint(), **QUIET).fit(module)
    saved = read_checkpoint(resolve_checkpoint("last", tmp_path))
    assert set(saved["state_dict"]) == {"layer.weight", "layer.bias", "frozen"}
    assert {n: set(w) for n, w in saved["callbacks"]["BEMA"].items()} == {
        n: {"layer.weight", "layer.bias"} for n in ("average", "ema", "initial")
    }


def test_low_precision_weights_are_averaged_in_fp32():
    """In bf16 a decay of 0.999 would never move the average."""
    ema = EMA(0.999)
    module = torch.nn.Linear(1, 1, bias=False).bfloat16()
    ema._parameters = dict(module.named_parameters())
    with torch.no_grad():
        module.weight.fill_(1.0)
        ema.start(ema._copy())
        module.weight.fill_(2.0)
    for step in range(1, 11):
        ema.update(ema._read(), step)
    assert ema.average["weight"].item() == pytest.approx(2 - 0.999**10, rel=1e-5)
    with ema.applied():
        assert module.weight.dtype == torch.bfloat16 and module.weight.item() == pytest.approx(1.01, abs=0.005)
    assert module.weight.item() == 2.0


def test_an_average_of_other_parameters_is_refused(tmp_path):
    trainer(tmp_path, EMA(), Checkpoint(), max_steps=1, **QUIET).fit(SmallModule())
    module = SmallModule()
    module.frozen.requires_grad = True
    module.on_load_checkpoint = lambda checkpoint: checkpoint.update(optimizer_states=[])
    with pytest.raises(UserError, match="of other trained parameters than this run's: frozen"):
        trainer(tmp_path, EMA(), **QUIET).fit(module, ckpt_path=resolve_checkpoint("last", tmp_path))


def test_wrong_options():
    for make in (
        lambda: EMA(decay=1.0),
        lambda: EMA(update_freq=0),
        lambda: BEMA(update_after=-1),
        lambda: BEMA(lag=-1),
        lambda: BEMA(lag=0, multiplier=0.0),
        lambda: BEMA(min_ema_multiplier=2.0),
    ):
        with pytest.raises(UserError):
            make()


def test_no_average_is_said(tmp_path, caplog):
    _fit(tmp_path, EMA(update_after=100))
    assert "EMA has no average: training ended at step 8, update_after=100" in caplog.text


@pytest.mark.slow
@pytest.mark.distributed
def test_two_fsdp2_processes_average_as_one(tmp_path):
    script = Path(__file__).with_name("averaged_run.py")
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(script.parents[2]))
    for steps in ("3", "8"):  # The second one resumes.
        command = [sys.executable, str(script), str(tmp_path / "fsdp2"), steps]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
    ema, bema, weights, applied, after = torch.load(tmp_path / "fsdp2" / "result.pt")
    one = [EMA(decay=0.8, apply_at_end=False), BEMA(update_freq=2, lag=1, apply_at_end=False)]
    module = SmallModule()
    trainer(tmp_path / "one", *one, **QUIET).fit(module)
    for state, average in ((ema, one[0]), (bema, one[1])):
        for attribute in average.kept:
            assert torch.allclose(_flat(state[attribute]), _flat(getattr(average, attribute)), atol=1e-6), attribute
    assert torch.allclose(_flat(weights), torch.tensor(module.weights()).double(), atol=1e-6)
    assert torch.allclose(_flat(applied), _flat(ema["average"]), atol=1e-7)
    assert torch.equal(_flat(after), _flat(weights))
