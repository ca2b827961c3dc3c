"""Compiled layers compute what they did, keep their names, and are refused where nothing would be compiled."""

import copy

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

import workbench
from tests.models.test_policy import NORM, random_ids, text
from workbench.data.batch import MicroBatch
from workbench.errors import UserError
from workbench.models.compiling import check_compile, check_compiler, is_compiled
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
    return torch.cat(found), {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}, policy


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


def test_a_copy_is_not_compiled_until_it_is_a_policy():
    policy = Policy(tiny_model("llama", size="pico"), torch_compile=TRACED)
    assert is_compiled(policy)
    other = copy.deepcopy(policy.hf)
    assert not is_compiled(other)
    assert is_compiled(Policy(other, torch_compile=policy.torch_compile))


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
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


def test_a_run_follows_the_one_that_is_not_compiled(tmp_path):
    common = (
        "model.init_kwargs={size:pico}",
        "trainer=cpu",
        "callbacks=none",
        "logger=csv",
        "exact_match=0",
        "save_model=false",
        "method.layout=padded",
        "trainer.max_steps=3",
    )
    run = workbench.train(
        *common, "trainer.max_steps=4", f"paths.run_dir={tmp_path / 'a'}", "method.torch_compile={backend: aot_eager}"
    )
    plain = workbench.train(*common, "trainer.max_steps=4", f"paths.run_dir={tmp_path / 'b'}")
    torch.testing.assert_close(run.history["train/loss"].to_numpy(), plain.history["train/loss"].to_numpy(), rtol=1e-5, atol=1e-6)
    assert list(run.method.state_dict()) == list(plain.method.state_dict())
    assert is_compiled(run.method)
