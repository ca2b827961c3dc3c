"""The head in pieces: the numbers and gradients of the whole logits, without ever holding them."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.models import logps
from workbench.models.logps import STATS, Head, token_logps
from workbench.models.peft import PeftSpec, apply_peft
from workbench.tiny.model import tiny_model

T, H, V = 23, 16, 61


def rig(*, bias=False, frozen=False, dtype=torch.float64, seed=0, **head):
    torch.manual_seed(seed)
    module = nn.Linear(H, V, bias=bias).to(dtype)
    module.requires_grad_(not frozen)
    hidden = torch.randn(T, H, dtype=dtype, requires_grad=True)
    return hidden, Head(module, **head), torch.randint(0, V, (T,))


def both(hidden, head, targets, **options):
    """Values and gradients, in pieces and whole."""
    found = []
    for chunked in (True, False):
        hidden.grad = None
        head.module.zero_grad()
        stats = token_logps(hidden, head, targets, want=STATS, chunked=chunked, **options)
        weights = torch.linspace(-1, 2, T, dtype=stats.logps.dtype)
        (stats.logps * weights).sum().backward()
        grads = [hidden.grad.clone(), *(None if p.grad is None else p.grad.clone() for p in head.module.parameters())]
        found.append((stats, grads))
    return found


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(logps, "_PIECE", 5 * V)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"softcap": 1.5}, {"scale": 0.3}, {"scale": 2.0, "softcap": 2.0, "temperature": 1.3}],
    ids=str,
)
def test_pieces_are_the_whole(small_pieces, options, bias, frozen):
    options = dict(options)
    temperature = {"temperature": options.pop("temperature", 1.0)}
    (ours, our_grads), (theirs, their_grads) = both(*rig(bias=bias, frozen=frozen, **options), **temperature)
    for name in STATS:
        assert torch.allclose(getattr(ours, name).double(), getattr(theirs, name).double(), atol=1e-5), name
    for a, b in zip(our_grads, their_grads, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, atol=2e-6)


def test_the_gradient_is_that_of_finite_differences(small_pieces):
    """Logits are formed in fp32, so the steps are wide."""
    hidden, head, targets = rig(softcap=3.0)

    def loss(h):
        return token_logps(h, head, targets, chunked=True).logps.double().sum()

    (gradient,) = torch.autograd.grad(loss(hidden), hidden)
    direction = torch.randn_like(hidden)
    with torch.no_grad():
        slope = (loss(hidden + 1e-2 * direction) - loss(hidden - 1e-2 * direction)) / 2e-2
    assert slope.item() == pytest.approx((gradient * direction).sum().item(), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_the_plain_head(small_pieces, dtype):
    (ours, our_grads), (theirs, their_grads) = both(*rig(dtype=dtype))
    exact = both(*rig(dtype=torch.float32))[1]
    assert torch.equal(ours.logps, theirs.logps)
    for a, b, c in zip(our_grads, their_grads, exact[1], strict=True):
        assert (a - c).norm() <= 1.5 * (b - c).norm() + 1e-3 * c.norm()


def test_autocast_computes_products_in_half_precision_and_keeps_gradients_exact(small_pieces):
    hidden, head, targets = rig(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        (ours, our_grads), (theirs, their_grads) = both(hidden, head, targets)
    assert torch.equal(ours.logps, theirs.logps)
    for a, b in zip(our_grads, their_grads, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.02 * b.norm()


class Largest(TorchDispatchMode):
    """The most elements that any operation's result has."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.most = max(self.most, value.numel())
        return out


@pytest.mark.parametrize("kind", ["plain", "frozen", "adapter"])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(4096, 512), (512, 4096), (64, 65536)])
def test_no_tensor_grows_with_tokens_times_vocabulary(monkeypatch, kind, tokens, vocabulary):
    monkeypatch.setattr(logps, "_PIECE", 2**16)
    module = nn.Linear(4, vocabulary, bias=False)
    module.requires_grad_(kind == "plain")
    if kind == "adapter":
        model = tiny_model("llama", size="pico", tie_word_embeddings=False)
        model.lm_head = nn.Linear(4, vocabulary, bias=False)
        module = apply_peft(model, PeftSpec(r=2, target_modules=["lm_head"])).get_base_model().lm_head
    hidden = torch.randn(tokens, 4, requires_grad=True)
    with Largest() as largest:
        targets = torch.zeros(tokens, dtype=torch.int64)
        stats = token_logps(hidden, Head(module), targets, want=("entropy",), chunked=True)
        stats.logps.sum().backward()
    assert hidden.grad.abs().sum() > 0
    assert largest.most <= max(2**16, 4 * vocabulary, 4 * tokens)
    assert largest.most < tokens * vocabulary


def test_an_adapter_on_the_head_is_computed_through_the_adapter(small_pieces):
    model = apply_peft(
        tiny_model("llama", size="pico", tie_word_embeddings=False),
        PeftSpec(r=4, target_modules=["lm_head"], init_lora_weights=False),
    )
    head = Head.of(model.get_base_model())
    assert not head.is_plain
    width = model.config.hidden_size
    hidden, targets = torch.randn(T, width, requires_grad=True), torch.randint(0, 50, (T,))
    (ours, our_grads), (theirs, their_grads) = both(hidden, head, targets)
    assert torch.allclose(ours.logps, theirs.logps, atol=1e-5)
    for a, b in zip(our_grads, their_grads, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, atol=1e-4)


def test_hooks_on_the_head_are_called():
    hidden, head, targets = rig(dtype=torch.float32)
    head.module.register_forward_hook(lambda module, args, out: out * 2)
    (ours, _), (theirs, _) = both(hidden, head, targets)
    assert torch.allclose(ours.logps, theirs.logps)
    assert not head.is_plain


def test_few_logits_are_formed_at_once_and_many_in_pieces(monkeypatch):
    hidden, head, targets = rig(dtype=torch.float32)
    taken = []
    monkeypatch.setattr(logps._HeadStats, "apply", lambda *args: taken.append(1) or (args[0].sum(-1),))
    token_logps(hidden, head, targets)
    assert not taken
    monkeypatch.setattr(logps, "_FEW", T * V - 1)
    token_logps(hidden, head, targets)
    assert taken
