"""Activations that wait on the host come back as they were, and nothing else leaves the device."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn

from tests.models.test_policy import NORM, random_ids, text
from workbench.data.batch import MicroBatch
from workbench.errors import UserError
from workbench.methods.sft import SFT
from workbench.models import offload
from workbench.models.offload import Offload, Waiting
from workbench.models.peft import PeftSpec, apply_peft
from workbench.models.policy import Policy, set_gradient_checkpointing
from workbench.models.reference import AdapterView
from workbench.tiny.model import tiny_model


@pytest.fixture
def moved(monkeypatch):
    """What has been moved, as (address, bytes)."""
    seen = []

    class Noted(Waiting):
        def __init__(self, tensor, *args):
            seen.append((tensor.untyped_storage().data_ptr(), tensor.nbytes))
            super().__init__(tensor, *args)

    monkeypatch.setattr(offload, "Waiting", Noted)
    return seen


def gradients(layout, mode, offloading, lora=False, dropout=0.0, seed=0, reference=False):
    model = tiny_model("llama", size="pico", attention_dropout=dropout)
    set_gradient_checkpointing(model, mode)
    hf = apply_peft(model, PeftSpec(r=4, dropout=dropout)) if lora else model
    policy = Policy(hf, layout=layout, activation_offloading=offloading).train()
    batch = MicroBatch.from_rows([text(random_ids(n, seed=n)) for n in (41, 23, 37)], [0, 1, 2], NORM)
    torch.manual_seed(seed)
    logps = policy(batch).logps
    beside = AdapterView(policy, None).outputs(batch).logps if reference else 0.0
    (logps - beside).sigmoid().sum().backward() if reference else logps.sum().backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_gradients_are_the_same_bit_for_bit(moved, layout, mode, lora):
    expected = gradients(layout, mode, False, lora)
    assert not moved
    found = gradients(layout, mode, True, lora)
    assert moved
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_parameters_and_small_tensors_stay(moved):
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x = torch.randn(32, 64, requires_grad=True)
    with Offload(model):
        model(x).sum()
        model(x[:2]).sum()
    addresses = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert not addresses & {address for address, _ in moved}
    # The input, and the result of tanh: it is saved by tanh and by the layer after it, and moved once.
    assert [size for _, size in moved] == [32 * 64 * 4] * 2


def test_repeated_elements_stay(moved):
    wide = torch.randn(1, 64, requires_grad=True).expand(4096, 64)
    with Offload(nn.Module()):
        (wide * wide).sum()
    assert not moved


def test_a_tensor_that_is_changed_after_it_was_saved_comes_back_as_it_was():
    x = torch.randn(64, 64, requires_grad=True)
    before = x.detach().clone()
    with Offload(nn.Module()):
        y = x * 1.0
        out = (y * y).sum()
        with torch.no_grad():
            y.add_(1.0)
    out.backward()
    assert torch.allclose(x.grad, 2 * before)


def test_a_change_between_two_saves_is_seen():
    x = torch.randn(64, 64, requires_grad=True)
    with Offload(nn.Module()):
        y = x * 1.0
        first = (y * y).sum()
        with torch.no_grad():
            y.add_(1.0)
        second = (y * y).sum()
    first.backward(retain_graph=True)
    once = x.grad.clone()
    second.backward()
    assert torch.allclose(x.grad - once, once + 2.0, atol=1e-5)


def test_a_change_of_what_stays_is_an_error():
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    with Offload(layer):
        out = layer(x).sum()
    with torch.no_grad():
        layer.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        out.backward()


def test_copies_of_weights_that_autocast_keeps_stay(moved):
    layer = nn.Linear(64, 64)
    x = torch.randn(32, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), Offload(layer):
        layer(layer(x).float()).sum()
    assert {size for _, size in moved} == {32 * 64 * 2}  # inputs of the layers alone


@pytest.mark.parametrize("transposed", [False, True])
def test_frozen_weights_are_cast_again_and_do_not_move(moved, transposed):
    layer = nn.Linear(64, 96).requires_grad_(False)
    if transposed:
        layer.weight.data = layer.weight.data.t().contiguous().t()
    x = torch.randn(32, 64, requires_grad=True)
    found = []
    for within in (contextlib.nullcontext(), Offload(layer)):
        with torch.autocast("cpu", torch.bfloat16), within:
            out = layer(x).float().square().sum()
        found.append(torch.autograd.grad(out, x)[0])
    assert torch.equal(*found)
    assert {size for _, size in moved} == {32 * 96 * 4}  # what the square keeps
    with torch.autocast("cpu", torch.bfloat16), Offload(layer):
        out = layer(x).sum()
    layer.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        out.backward()


@pytest.mark.parametrize("mode", [False, True])
def test_an_adapter_under_autocast_moves_no_weights(moved, mode):
    """And computes the same, where the reference is computed between the forward pass and the backward pass too."""
    found = []
    for offloading in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(gradients("padded", mode, offloading, lora=True, reference=True))
        assert bool(moved) == offloading
    assert all(torch.equal(found[1][name], found[0][name]) for name in found[0])
    model = tiny_model("llama", size="pico")
    sizes = {p.numel() * 2 for p in model.model.layers.parameters() if p.dim() == 2}
    assert not {size for _, size in moved} & sizes


@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_dropout_draws_the_same_numbers(moved, layout, mode):
    found = []
    for offloading, seed in ((False, 3), (True, 3), (True, 4)):
        found.append(gradients(layout, mode, offloading, lora=True, dropout=0.3, seed=seed))
    assert moved
    assert all(torch.equal(found[1][name], found[0][name]) for name in found[0])
    assert not all(torch.allclose(found[1][name], found[2][name], rtol=1e-2) for name in found[0])


def test_passes_without_a_gradient_move_nothing(moved):
    """Neither a reference beside the policy, nor what a layer computes without a gradient."""
    adapted = apply_peft(tiny_model("llama", size="pico"), PeftSpec(r=4))
    policy = Policy(adapted, layout="padded", activation_offloading=True).train()
    batch = MicroBatch.from_rows([text(random_ids(n, seed=n)) for n in (41, 23)], [0, 1], NORM)
    AdapterView(policy, None).outputs(batch)
    x = torch.randn(64, 64, requires_grad=True)
    with Offload(policy), torch.no_grad():
        (x.exp() * x).tanh()
    assert not moved


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_held_after_the_backward_pass_or_an_error(monkeypatch, fails):
    alive = []

    class Noted(Waiting):
        def __init__(self, *args):
            super().__init__(*args)
            alive.append(weakref.ref(self))

    monkeypatch.setattr(offload, "Waiting", Noted)
    x = torch.randn(64, 64, requires_grad=True)
    with contextlib.suppress(ZeroDivisionError), Offload(nn.Module()):
        out = x.exp().tanh().sum(1, keepdim=True).exp().sum()  # the second result is small, and stays
        if fails:
            del out
            raise ZeroDivisionError
    if not fails:
        out.backward()
        del out
    gc.collect()
    assert alive
    assert not any(reference() for reference in alive)


class FakeCuda:
    """Streams that note what is asked of them, in one list."""

    def __init__(self):
        self.log = []

    def stream_of(self, name):
        cuda = self

        class Stream:
            def wait_stream(self, other):
                cuda.log.append((name, "waits for stream"))

            def wait_event(self, event):
                cuda.log.append((name, "waits for", event))

            def record_event(self):
                cuda.log.append((name, "event", len(cuda.log)))
                return len(cuda.log) - 1

        return Stream()


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    current = fake.stream_of("current")

    sides = iter([fake.stream_of("out"), fake.stream_of("back")])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(sides))
    streams = fake.streams = offload.Streams(torch.device("cpu"))

    def streams_of(self, device):
        self._streams[device] = streams
        return streams

    monkeypatch.setattr(offload.Offload, "_streams_of", streams_of)
    monkeypatch.setattr(offload, "_host_memory", lambda tensor, pinned: torch.empty_like(tensor))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return fake


def test_copies_to_the_host_stay_a_few_behind_and_the_next_ones_are_fetched_ahead(cuda):
    x = torch.randn(64, 64, requires_grad=True)
    with Offload(nn.Module()):
        y = x
        for _ in range(8):
            y = y.tanh()  # saves its result, 8 in all
        out = y.sum()
    waits = [i for i, entry in enumerate(cuda.log) if entry[:2] == ("current", "waits for")]
    copies = [i for i, entry in enumerate(cuda.log) if entry[:2] == ("out", "event")]
    assert len(waits) == len(copies) == 8
    assert copies[offload.IN_FLIGHT] < waits[0] < copies[offload.IN_FLIGHT + 1]  # a few behind
    assert not streams_left(cuda)
    cuda.log.clear()
    out.backward()
    fetched = [i for i, entry in enumerate(cuda.log) if entry[:2] == ("back", "event")]
    used = [i for i, entry in enumerate(cuda.log) if entry[:2] == ("current", "waits for")]
    assert len(fetched) == len(used) == 8
    assert fetched[offload.AHEAD] < used[0]  # the first to be used, and those after it
    expected = torch.func.grad(lambda v: _tanhs(v, 8).sum())(x.detach())
    assert torch.equal(x.grad, expected)


def streams_left(cuda):
    """Tensors that are still held for a copy."""
    return len(cuda.streams._leaving)


def test_a_change_while_it_is_copied_is_an_error(cuda):
    x = torch.randn(64, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="while it was offloaded"), Offload(nn.Module()):
        y = x * 1.0
        _ = y * y
        with torch.no_grad():
            y.add_(1.0)


def _tanhs(value, times):
    for _ in range(times):
        value = value.tanh()
    return value


def test_what_selective_checkpointing_keeps_cannot_be_moved():
    with pytest.raises(UserError, match="gradient_checkpointing=selective"):
        SFT("tiny", gradient_checkpointing="selective", activation_offloading=True)
