"""SFT losses against hand numbers, and their gradients."""

import torch

from workbench.losses.sft import dft_loss, nll_loss


def test_nll_by_hand():
    assert torch.allclose(nll_loss(torch.log(torch.tensor([0.5, 0.25]))), torch.tensor([0.6931472, 1.3862944]))


def test_dft_by_hand():
    # -p log p at p = 0.5 and 0.25.
    assert torch.allclose(dft_loss(torch.log(torch.tensor([0.5, 0.25]))), torch.tensor([0.3465736, 0.3465736]))


def test_dft_weight_carries_no_gradient():
    logps = torch.log(torch.tensor([0.5, 0.25])).requires_grad_()
    dft_loss(logps).sum().backward()
    assert torch.allclose(logps.grad, torch.tensor([-0.5, -0.25]))


def test_gradients_numerically():
    logps = -torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.1
    assert torch.autograd.gradcheck(nll_loss, logps.requires_grad_())


def test_dft_equals_nll_for_certain_tokens():
    logps = torch.full((3,), -1e-7)
    assert torch.allclose(dft_loss(logps), nll_loss(logps))
