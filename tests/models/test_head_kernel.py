"""The head by another package's kernel: the same numbers by a stand-in of plain torch, and refused where it cannot be used."""

import sys
import types

import pytest
import torch
from support import DATA, run_method, run_sft
from torch import nn
from torch.nn.functional import linear

from tests.methods.online_rig import run_online, spread
from workbench.cli import config
from workbench.errors import UserError
from workbench.methods.cpo import CPO
from workbench.methods.dpo import DPO
from workbench.methods.gmpo import GMPO
from workbench.methods.grpo import GRPO
from workbench.methods.kto import KTO
from workbench.methods.orpo import ORPO
from workbench.methods.prm import PRM
from workbench.methods.reward import Reward
from workbench.methods.rloo import RLOO
from workbench.methods.sft import SFT
from workbench.models import head_kernel
from workbench.models.head_kernel import check_device, check_head, check_precision
from workbench.models.logps import Head, token_logps
from workbench.models.peft import PeftSpec, apply_peft
from workbench.models.policy import Policy
from workbench.tiny.model import tiny_model

T, H, V = 70, 16, 300
CUT = {"head_kernel": "cut_cross_entropy"}
CPU = torch.device("cpu")


class Scaled(torch.autograd.Function):
    """What a kernel does that forgets the factor of each token: the gradient of a mean."""

    @staticmethod
    def forward(ctx, losses):
        return losses.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.mean().expand_as(grad)


class Package(types.ModuleType):
    """``cut_cross_entropy`` in plain torch, with the arguments of release 25.1.1; ``fault`` plants a wrong result."""

    def __init__(self, fault=None):
        super().__init__("cut_cross_entropy")
        self.fault, self.calls, self.with_gradient = fault, 0, 0

    def linear_cross_entropy(
        self, e, c, targets, ignore_index=-100, softcap=None, reduction="mean", shift=False, filter_eps="high", impl="cce"
    ):
        return self.losses(e, c, None, targets, softcap, reduction, filter_eps)

    def losses(self, e, c, bias, targets, softcap, reduction, filter_eps):
        assert reduction == "none" and filter_eps is None
        assert e.dtype == c.dtype and e.ndim == c.ndim == 2
        self.calls += 1
        self.with_gradient += torch.is_grad_enabled() and (e.requires_grad or c.requires_grad)
        logits = linear(e, c, bias).float()
        if softcap is not None and self.fault != "softcap":
            logits = softcap * torch.tanh(logits / softcap)
        losses = nn.functional.cross_entropy(logits, targets, reduction="none")
        if self.fault == "offset":
            losses = losses * 1.02
        return Scaled.apply(losses) if self.fault == "gradient" else losses


class Biased(Package):
    """A later release, which takes a bias."""

    def linear_cross_entropy(self, e, c, targets, bias=None, softcap=None, reduction="mean", shift=0, filter_eps="auto"):
        return self.losses(e, c, bias, targets, softcap, reduction, filter_eps)


@pytest.fixture
def package(monkeypatch):
    """Puts a stand-in where the package would be imported from, and lets it compute on a CPU in fp32."""

    def install(module):
        monkeypatch.setitem(sys.modules, "cut_cross_entropy", module)
        monkeypatch.setattr(head_kernel, "_checked", set())
        for name in ("check_device", "_check_dtype"):
            monkeypatch.setattr(head_kernel, name, lambda *_: None)
        for name in ("check_device", "check_precision"):
            monkeypatch.setattr(f"workbench.methods.base.{name}", lambda *_: None)
        return module

    return install


def rig(kernel="cut_cross_entropy", *, dtype=torch.float32, bias=False, frozen=False, **head):
    generator = torch.Generator().manual_seed(0)
    module = nn.Linear(H, V, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            parameter.requires_grad_(not frozen)
    hidden = torch.randn(T, H, generator=generator).to(dtype).requires_grad_()
    return hidden, Head(module, kernel=kernel, **head), torch.randint(0, V, (T,), generator=generator)


def outcome(kernel, **options):
    given = {name: options.pop(name) for name in ("temperature", "want") if name in options}
    hidden, head, targets = rig(kernel, **options)
    stats = token_logps(hidden, head, targets, **given)
    (stats.logps * torch.linspace(-1, 2, T)).sum().backward()
    return stats, [hidden.grad, *(p.grad for p in head.module.parameters())]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"scale": 0.25},
        {"softcap": 3.0},
        {"softcap": 3.0, "scale": 0.5, "temperature": 1.3},
        {"bias": True, "scale": 2.0, "temperature": 0.9},
        {"frozen": True},
    ],
    ids=str,
)
def test_numbers_are_those_of_torch(package, options):
    stand_in = package(Biased())
    found, gradients = outcome("cut_cross_entropy", **options)
    assert stand_in.calls == 2  # the comparison, and the call itself
    expected, theirs = outcome("torch", **options)
    torch.testing.assert_close(found.logps, expected.logps, rtol=1e-5, atol=2e-6)
    for ours, other in zip(gradients, theirs, strict=True):
        assert (ours is None) == (other is None)
        assert ours is None or (ours - other).norm() <= 1e-6 * other.norm()


def test_statistics_are_added_by_torch_without_gradient(package):
    stand_in = package(Package())
    names = ("logps", "entropy", "top1", "mean_logit", "log_collision")
    found, gradients = outcome("cut_cross_entropy", want=names)
    expected, theirs = outcome("torch", want=names)
    assert stand_in.calls == 2
    for name in names:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=5e-6)
    assert not found.entropy.requires_grad
    assert all((a - b).norm() <= 1e-6 * b.norm() for a, b in zip(gradients, theirs, strict=True))


def test_half_precision_passes_the_comparison(package):
    package(Package())
    hidden, head, targets = rig(dtype=torch.bfloat16)
    assert token_logps(hidden, head, targets).logps.dtype == torch.float32
    hidden, head, targets = rig()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        logps = token_logps(hidden, head, targets).logps
    assert len(head_kernel._checked) == 1  # of the same numbers
    exact = token_logps(hidden, rig("torch")[1], targets).logps
    assert 1e-4 < (logps - exact).abs().max() < 0.2


def test_compared_once_per_kind(package):
    stand_in = package(Package())
    for _ in range(3):
        outcome("cut_cross_entropy")
    assert stand_in.calls == 4
    outcome("cut_cross_entropy", temperature=0.5)
    assert stand_in.calls == 6


def test_compared_in_inference_mode_too(package):
    stand_in = package(Package())
    hidden, head, targets = rig()
    with torch.inference_mode():
        token_logps(hidden * 1.0, head, targets * 1)
    assert stand_in.with_gradient == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fault", "options", "message"),
    [
        ("offset", {}, "computes log-probabilities that are up to"),
        ("softcap", {"softcap": 3.0}, "computes log-probabilities that are up to"),
        ("gradient", {}, "computes gradients of the hidden states that are up to"),
    ],
)
def test_a_wrong_kernel_is_refused(package, dtype, fault, options, message):
    package(Package(fault))
    hidden, head, targets = rig(dtype=dtype, **options)
    with pytest.raises(UserError, match=rf"{message} [\d.]+ .*away from torch's.*; set method.head_kernel=torch\.$"):
        token_logps(hidden, head, targets)


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.2}, {"support": (torch.zeros(T).long(), torch.ones(T).long())}, {"entropy_grad": True}]
)
def test_what_it_does_not_compute_is_refused(package, options):
    package(Package())
    with pytest.raises(UserError, match="knows no restriction to some tokens, no repetition penalty and no gradient"):
        token_logps(*rig(), **options)


def test_nothing_to_compute_is_left_to_torch(package):
    stand_in = package(Package())
    hidden, head, targets = rig()
    assert token_logps(hidden[:0], head, targets[:0]).logps.shape == (0,)
    assert stand_in.calls == 0


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_cpu_is_refused():
    with pytest.raises(UserError, match=r"needs a CUDA device, and this run computes on cpu: set trainer.accelerator=gpu, or"):
        check_device(CPU)
    with pytest.raises(UserError, match="needs a CUDA device"):
        run_sft(method=CUT)


@pytest.mark.parametrize(("capability", "deterministic"), [((7, 5), False), ((8, 0), True), ((9, 0), False)])
def test_old_gpus_and_deterministic_kernels_are_refused(monkeypatch, capability, deterministic):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    if capability == (9, 0):
        return check_device(torch.device("cuda"))
    with pytest.raises(UserError, match="which T4 is not" if capability < (8, 0) else "trainer.deterministic=false"):
        check_device(torch.device("cuda"))


def test_full_precision_is_refused(package):
    for precision, dtype in (("32-true", torch.float32), ("16-true", torch.float32), ("64-true", torch.float64)):
        with pytest.raises(UserError, match=rf"does not take trainer.precision={precision}: set it to bf16-mixed, bf16-true or"):
            check_precision(precision, dtype)
    for precision, dtype in (("bf16-mixed", torch.float32), ("16-mixed", torch.float32), ("32-true", torch.bfloat16)):
        check_precision(precision, dtype)
    with pytest.raises(UserError, match="computes in bfloat16 or float16, and the head is to compute in float32"):
        head_kernel._check_dtype(torch.float32)


def test_a_missing_package_is_said_before_training(monkeypatch):
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)
    with pytest.raises(UserError, match=r"needs its package .*: pip install 'workbench\[cut-cross-entropy\]', or set"):
        Policy(tiny_model("llama", size="pico"), **CUT)


def test_heads_that_are_no_matrix_are_refused(package):
    package(Package())
    spec = PeftSpec(r=4, modules_to_save=["lm_head"])
    with pytest.raises(UserError, match="needs the head as one whole matrix, and ModulesToSaveWrapper is an adapter's"):
        Policy(apply_peft(tiny_model("llama", size="pico", tie_word_embeddings=False), spec), **CUT)
    with pytest.raises(UserError, match="knows no bias in the installed version"):
        check_head(rig(bias=True)[1])
    package(Biased())
    check_head(rig(bias=True)[1])
    with torch.device("meta"), pytest.raises(UserError, match="counts to 2\\^31, and the head is 262144 x 8192"):
        check_head(Head(nn.Linear(8192, 262144, bias=False)))


@pytest.mark.parametrize("kind", [Reward, PRM])
def test_methods_without_an_lm_head_refuse_it(kind):
    with pytest.raises(UserError, match="head_kernel=cut_cross_entropy has no effect on a method that trains no LM head"):
        kind("tiny", **CUT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, "leave out method.top_k, top_p, min_p and repetition_penalty"),
        ({"repetition_penalty": 1.1}, "leave out method.top_k"),
        ({"cast_lm_head_to_fp32": True}, "set method.cast_lm_head_to_fp32=false"),
        ({"entropy_coef": 0.01}, "set method.entropy_coef=0"),
    ],
)
def test_options_that_the_kernel_cannot_follow(options, message):
    with pytest.raises(UserError, match=message):
        GRPO("tiny", rewards=spread, **CUT, **options)


def test_an_unknown_kernel():
    with pytest.raises(UserError, match=r"head_kernel='cut_cross_entropi' is not known. Did you mean 'cut_cross_entropy'\?"):
        SFT("tiny", head_kernel="cut_cross_entropi")
    with pytest.raises(UserError, match=r"method.head_kernel='liger'"):
        config.compose("method.head_kernel=liger")
    assert config.compose("method=dpo", "method.head_kernel=cut_cross_entropy").method.head_kernel == "cut_cross_entropy"


# -- methods ----------------------------------------------------------------------------------------------------------


LEFT_OUT = {"train/entropy", "train/mean_token_accuracy", "train/logits/chosen", "train/logits/rejected"}
SHORT = {"max_steps": 2, "gradient_clip_val": None}


@pytest.mark.parametrize("kind", [SFT, DPO])
def test_gradients_of_a_step_are_those_of_torch(package, kind):
    stand_in = package(Package())
    runs = []
    for method in (CUT, {}):
        found = {}

        class Keeping(kind):
            def on_before_optimizer_step(self, optimizer, kept=found):
                super().on_before_optimizer_step(optimizer)
                for name, parameter in self.policy.named_parameters():
                    kept.setdefault(name, parameter.grad.clone())

        name = "messages" if kind is SFT else "preference"
        steps = run_method(Keeping, {"train": str(DATA / f"{name}.jsonl")}, method, SHORT)[0]
        runs.append((steps, found))
    (steps, gradients), (plain, theirs) = runs
    assert stand_in.with_gradient > 1
    assert gradients.keys() == theirs.keys()
    assert all((gradients[n] - theirs[n]).norm() <= 1e-6 * theirs[n].norm() + 1e-9 for n in theirs)
    assert steps[0]["train/loss"] == pytest.approx(plain[0]["train/loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (SFT, {}),
        (DPO, {}),
        (DPO, {"use_weighting": True}),
        (KTO, {}),
        (CPO, {}),
        (ORPO, {}),
        (GRPO, {"beta": 0.1}),
        (GRPO, {"top_entropy_quantile": 0.5, "temperature": 0.8}),
        (RLOO, {}),
        (GMPO, {}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_methods_train_by_it(package, caplog, kind, method):
    stand_in = package(Package())
    online = kind in (GRPO, RLOO, GMPO)
    name = {SFT: "messages", KTO: "unpaired"}.get(kind, "preference")
    data = {} if online else {"train": str(DATA / f"{name}.jsonl")}
    run = run_online if online else run_method
    with caplog.at_level("INFO", "workbench"):
        runs = [run(kind, data=data, method={**method, **extra}, trainer=SHORT)[0] for extra in (CUT, {})]
    said = [r.getMessage() for r in caplog.records if "head_kernel" in r.getMessage()]
    ours, theirs = runs
    assert stand_in.with_gradient > len(ours)
    left_out = theirs[0].keys() - ours[0].keys()
    assert left_out <= LEFT_OUT
    assert left_out or "top_entropy_quantile" in method
    assert len(said) == bool(left_out)
    for a, b in zip(ours, theirs, strict=True):
        for name in a:
            if "second" not in name:
                assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-4, nan_ok=True), name


def test_evaluation_has_every_metric(package):
    package(Package())
    logged = []
    for method in (CUT, {}):
        data = dict.fromkeys(("train", "eval"), str(DATA / "preference.jsonl"))
        _, _, trainer = run_method(DPO, data, method, {"max_steps": 1, "limit_val_batches": 1, "val_check_interval": 1})
        logged.append({n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith("val/")})
    assert logged[0].keys() == logged[1].keys() and {"val/entropy", "val/mean_token_accuracy"} <= logged[0].keys()
    assert all(logged[0][n] == pytest.approx(logged[1][n], rel=1e-4, abs=1e-5) for n in logged[0])
