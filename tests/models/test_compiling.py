"""Compiled layers compute what they did, keep their names, and are refused where nothing would be compiled."""

import copy
import functools

import lightning as L
import pytest
import torch
import torch._dynamo
from peft.tuners.tuners_utils import BaseTunerLayer
from support import DATA, SaveAt, assert_same_trajectory, run_method, run_sft
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from tests.models.test_policy import NORM, random_ids, text
from workbench.data.batch import MicroBatch
from workbench.errors import UserError
from workbench.methods.dpo import DPO
from workbench.models.compiling import check_compile, check_compiler, is_compiled, uncompiled
from workbench.models.peft import PeftSpec, apply_peft
from workbench.models.policy import Policy, set_gradient_checkpointing
from workbench.tiny.model import tiny_model

TRACED = {"backend": "aot_eager"}  # traced and differentiated as with inductor, but not turned into C++
LENGTHS = ((41, 23, 37), (11, 29), (17, 8, 5))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def batch(lengths):
    return MicroBatch.from_rows([text(random_ids(n, seed=n)) for n in lengths], list(range(len(lengths))), NORM)


def outcome(options, layout="padded", mode=False, lora=False, architecture="llama"):
    """Log-probabilities, with a gradient and without, gradients, and the policy."""
    model = tiny_model(architecture, size="pico")
    set_gradient_checkpointing(model, mode)
    policy = Policy(apply_peft(model, PeftSpec(r=4)) if lora else model, layout=layout, torch_compile=options).train()
    found = []
    for lengths in LENGTHS:
        logps = policy(batch(lengths)).logps
        logps.sum().backward()
        with torch.no_grad():
            found += [logps.detach(), policy(batch(lengths)).logps]
    return torch.cat(found), gradients_of(policy), policy


def gradients_of(policy):
    return {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}


def assert_same(a, b):
    torch.testing.assert_close(a[0], b[0], rtol=1e-5, atol=2e-6)
    assert a[1].keys() == b[1].keys()
    assert all((a[1][n] - b[1][n]).norm() <= 1e-5 * a[1][n].norm() + 1e-7 for n in a[1])
    assert list(a[2].state_dict()) == list(b[2].state_dict())


@pytest.mark.parametrize(
    ("layout", "architecture"), [("padded", "llama"), ("shared", "llama"), ("packed", "gemma2"), ("padded", "qwen3_moe")]
)
def test_numbers_and_names_stay(layout, architecture):
    compiled = outcome(TRACED, layout, architecture=architecture)
    assert counters["stats"]["unique_graphs"] > 0
    assert_same(outcome(False, layout, architecture=architecture), compiled)


@pytest.mark.parametrize(("mode", "lora"), [(True, False), ("selective", True)])
def test_with_recomputation_and_adapters(mode, lora):
    compiled = outcome(TRACED, mode=mode, lora=lora)
    assert counters["stats"]["unique_graphs"] > 0
    assert_same(outcome(False, mode=mode, lora=lora), compiled)


class Passes(L.Callback):
    """How a layer was run: in training or not, with a gradient or not, the adapter off or on, under autocast or not."""

    def __init__(self):
        self.seen = set()

    def on_fit_start(self, trainer, module):
        layer = module.policy.causal_lm.model.layers[0]
        adapter = next(m for m in layer.modules() if isinstance(m, BaseTunerLayer))
        cast = functools.partial(torch.is_autocast_enabled, "cpu")
        layer.register_forward_pre_hook(
            lambda *_: self.seen.add((layer.training, torch.is_grad_enabled(), adapter.disable_adapters, cast()))
        )


def test_a_run_that_switches_adapter_mode_and_gradient():
    """DPO with an adapter: the reference is the model without it; dropout, autocast, and evaluations between the steps. Traced
    code computes all of it in the order of what was traced, so that the bits are the same."""
    method = {"layout": "padded", "peft": PeftSpec(r=4, dropout=0.2), "disable_dropout": False}
    data = {"train": str(DATA / "preference.jsonl"), "eval": str(DATA / "preference.jsonl"), "batch_size": 4}
    trainer = {"max_steps": 3, "val_check_interval": 2, "limit_val_batches": 1, "precision": "bf16-mixed"}
    found, passes = [], Passes()
    for options, callbacks in ((False, [passes]), (TRACED, [])):
        torch.manual_seed(5)
        steps, _, fit = run_method(
            DPO, data, {**method, "torch_compile": options}, {**trainer, "num_sanity_val_steps": 0}, callbacks=callbacks
        )
        values = {name: value.item() for name, value in fit.callback_metrics.items()}
        found.append([{k: v for k, v in step.items() if "per_second" not in k} for step in [*steps, values]])
    assert passes.seen == {(True, True, False, True), (False, False, True, True), (False, False, False, True)}
    assert counters["stats"]["unique_graphs"] > 0
    assert found[0][-1]["val/loss"] != found[0][0]["train/loss"]
    assert found[0] == found[1]


@pytest.mark.slow
def test_dropout_of_compiled_code_is_repeatable_and_its_own():
    """Inductor draws other numbers than eager layers unless it is told to."""
    rows, found = batch(LENGTHS[0]), []
    for options in (False, True, {"options": {"fallback_random": True}}):
        torch._dynamo.reset()
        model = tiny_model("llama", size="pico", num_hidden_layers=1, attention_dropout=0.3)
        policy = Policy(model, layout="padded", torch_compile=options).train()
        runs = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            policy.zero_grad()
            logps = policy(rows).logps
            logps.sum().backward()
            runs.append([logps.detach(), *gradients_of(policy).values()])
        assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
        assert not torch.allclose(runs[0][0], runs[2][0], atol=1e-3)
        found.append(runs[0])
    eager, own, told = found
    assert not torch.allclose(own[0], eager[0], atol=1e-3)
    torch.testing.assert_close(told, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_by_inductor(layout):
    assert_same(outcome(False, layout), outcome(True, layout))
    assert counters["inductor"]


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_lengths_compile_nothing_anew(layout):
    policy = Policy(tiny_model("llama", size="pico"), layout=layout, torch_compile=TRACED).train()
    for lengths in LENGTHS[:2]:
        policy(batch(lengths)).logps.sum().backward()
    before = counters["stats"]["unique_graphs"]
    for seed in range(4):
        policy(batch([10 + 7 * seed, 30 - 2 * seed, 19])).logps.sum().backward()
    assert counters["stats"]["unique_graphs"] == before


def test_writing_compiles_nothing():
    policy = Policy(tiny_model("llama", size="pico"), torch_compile=TRACED)
    ids = torch.tensor([random_ids(7, 1)])
    written = policy.generate(ids, torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    assert counters["stats"]["unique_graphs"] == 0
    plain = Policy(tiny_model("llama", size="pico"))
    assert torch.equal(written, plain.generate(ids, torch.ones_like(ids), max_new_tokens=5, do_sample=False))


def test_layers_are_compiled_again_after_an_error():
    policy = Policy(tiny_model("llama", size="pico"), torch_compile=TRACED)
    calls = [m._compiled_call_impl for m in policy.modules()]
    with pytest.raises(ZeroDivisionError), uncompiled(policy):
        assert not is_compiled(policy)
        raise ZeroDivisionError
    assert [m._compiled_call_impl for m in policy.modules()] == calls


def test_what_torch_refuses_is_one_line():
    with pytest.raises(UserError, match=r"torch_compile=\{'mode': 'fast'\}: torch refuses this: "):
        Policy(tiny_model("llama", size="pico"), torch_compile={"mode": "fast"})


def test_a_copy_is_not_compiled_until_it_is_a_policy():
    policy = Policy(tiny_model("llama", size="pico"), torch_compile=TRACED)
    assert is_compiled(policy)
    other = copy.deepcopy(policy.hf)
    assert not is_compiled(other)
    assert is_compiled(Policy(other, torch_compile=policy.torch_compile))


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ("reduce-overhead", {}, "torch_compile='reduce-overhead': allowed are true, false, or a mapping of backend"),
        (None, {}, "torch_compile=None: allowed"),
        (0, {}, "torch_compile=0: allowed"),
        ({"modus": "x"}, {}, r"no option 'modus'. Did you mean 'mode'\?"),
        ({"fullgraph": True}, {}, "no option 'fullgraph'"),
        ({"backend": "inducter"}, {}, r"backend=inducter is not known. Did you mean 'inductor'\?"),
        (True, {"layout": "shared", "gradient_checkpointing": True}, "layout=shared: set method.layout=padded"),
        (True, {"layout": "packed", "gradient_checkpointing": "selective"}, "would compile nothing"),
        (True, {"offloading": True}, "activation_offloading=true would compile the layers anew"),
    ],
)
def test_refusals(options, arguments, message):
    with pytest.raises(UserError, match=message):
        check_compile(options, **{"layout": "padded", "gradient_checkpointing": False, "offloading": False, **arguments})


def test_a_missing_compiler_is_said_before_training(monkeypatch):
    from torch._inductor import cpp_builder, exc

    def missing():
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler"):
        check_compiler(torch.device("cpu"), True)
    check_compiler(torch.device("cpu"), TRACED)
    check_compiler(torch.device("cpu"), False)


def test_a_run_goes_on_compiled_or_not_from_either_checkpoint(tmp_path):
    settings = {"trainer": {"max_steps": 4}, "data": {"micro_batch_size": 4}}
    whole, methods = {}, {"plain": {"layout": "padded"}, "compiled": {"layout": "padded", "torch_compile": TRACED}}
    for name, method in methods.items():
        whole[name], module, _ = run_sft(method=method, callbacks=[SaveAt(tmp_path / name, [2])], **settings)
        assert is_compiled(module) == (name == "compiled")
        module.save_pretrained(tmp_path / f"{name}-model")
    assert_same_trajectory(whole["compiled"], whole["plain"])
    saved = [torch.load(tmp_path / name / "2.ckpt", weights_only=True)["state_dict"] for name in methods]
    assert list(saved[0]) == list(saved[1])
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-model").state_dict() for name in methods]
    assert list(models[0]) == list(models[1])
    for start, other in (("plain", "compiled"), ("compiled", "plain")):
        rest, *_ = run_sft(method=methods[other], checkpoint=tmp_path / start / "2.ckpt", **settings)
        assert_same_trajectory(rest, whole["plain"][2:])
