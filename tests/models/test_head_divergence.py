"""Divergences in pieces are those of whole distributions, and so are their gradients."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.errors import UserError
from workbench.models import head_divergence as module
from workbench.models.head_divergence import head_divergence
from workbench.models.logps import Head

T, V = 11, 19
KINDS = ["forward_kl", "reverse_kl", "jsd"]


def rig(dtype=torch.float32):
    torch.manual_seed(0)
    head, teacher = nn.Linear(6, V, bias=False).to(dtype), nn.Linear(4, V).to(dtype)
    hidden = (3 * torch.randn(T, 6)).to(dtype).requires_grad_()
    return hidden, Head(head), (3 * torch.randn(T, 4)).to(dtype).requires_grad_(), Head(teacher)


def spelt_out(p, q, kind, beta):
    """One token, by the formulas."""
    if kind == "forward_kl":
        return sum(a * (a / b).log() for a, b in zip(p, q, strict=True))
    if kind == "reverse_kl":
        return sum(b * (b / a).log() for a, b in zip(p, q, strict=True))
    m = beta * p + (1 - beta) * q
    return beta * spelt_out(p, m, "forward_kl", beta) + (1 - beta) * spelt_out(q, m, "forward_kl", beta)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values(kind, temperature):
    hidden, head, teacher_hidden, teacher = rig()
    found = head_divergence(hidden, head, teacher_hidden, teacher, kind=kind, beta=0.3, temperature=temperature)
    p = (teacher(teacher_hidden) / temperature).double().softmax(-1)
    q = (head(hidden) / temperature).double().softmax(-1)
    expected = torch.stack([spelt_out(p[t], q[t], kind, 0.3) for t in range(T)])
    assert torch.allclose(found.double(), expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 4, T])
def test_pieces_have_the_gradients_of_the_whole(monkeypatch, kind, rows):
    grads = []
    for size in (rows * V, 10**9):
        monkeypatch.setattr(module, "_PIECE", size)
        hidden, head, teacher_hidden, teacher = rig()
        (head_divergence(hidden, head, teacher_hidden, teacher, kind=kind) * torch.linspace(-1, 1, T)).sum().backward()
        grads.append((hidden.grad, head.module.weight.grad))
        assert teacher_hidden.grad is None and teacher.module.weight.grad is None
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(monkeypatch, kind):
    monkeypatch.setattr(Head, "__call__", lambda self, h: self.module(h))  # fp64, which the head itself would leave
    hidden, head, teacher_hidden, teacher = rig(torch.float64)
    assert gradcheck(lambda h: head_divergence(h, head, teacher_hidden, teacher, kind=kind), hidden)


def test_a_model_does_not_differ_from_itself():
    hidden, head, *_ = rig()
    for kind in KINDS:
        assert head_divergence(hidden, head, hidden, head, kind=kind).abs().max() < 1e-6


class Largest(TorchDispatchMode):
    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.most = max(self.most, value.numel())
        return out


@pytest.mark.parametrize(("tokens", "vocabulary"), [(2048, 512), (64, 16384)])
def test_no_tensor_grows_with_tokens_times_vocabulary(monkeypatch, tokens, vocabulary):
    monkeypatch.setattr(module, "_PIECE", 2**16)
    heads = [Head(nn.Linear(4, vocabulary, bias=False)) for _ in range(2)]
    hidden = torch.randn(tokens, 4, requires_grad=True)
    with Largest() as largest:
        head_divergence(hidden, heads[0], torch.randn(tokens, 4), heads[1], kind="jsd").sum().backward()
    assert largest.most <= max(2**16, 4 * vocabulary, 4 * tokens) < tokens * vocabulary


def test_refusals():
    hidden, head, teacher_hidden, teacher = rig()
    with pytest.raises(UserError, match="kind"):
        head_divergence(hidden, head, teacher_hidden, teacher, kind="chi")
    with pytest.raises(UserError, match="between 0 and 1"):
        head_divergence(hidden, head, teacher_hidden, teacher, kind="jsd", beta=1.0)
    with pytest.raises(UserError, match="17 logits and the model's 19"):
        head_divergence(hidden, head, teacher_hidden, Head(nn.Linear(4, 17)))
