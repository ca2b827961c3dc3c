"""The optimizer's kernel."""

import copy

import pytest
import torch
from torch import nn

import workbench
from workbench.methods.optim import adamw


def groups(module: nn.Module):
    return [{"params": list(module.parameters())}]


def test_on_a_cpu_it_is_fused_and_takes_the_steps_of_the_loop():
    torch.manual_seed(0)
    fused, loop = nn.Linear(7, 5), None
    loop = copy.deepcopy(fused)
    optimizers = adamw(groups(fused), lr=0.1, weight_decay=0.1), adamw(groups(loop), lr=0.1, weight_decay=0.1, fused=False)
    assert [o.param_groups[0]["fused"] for o in optimizers] == [True, False]
    for _ in range(5):
        gradient = torch.randn(5, 7)
        for module, optimizer in zip((fused, loop), optimizers, strict=True):
            module.weight.grad, module.bias.grad = gradient.clone(), gradient.sum(1)
            optimizer.step()
    torch.testing.assert_close(fused.weight, loop.weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_gradients_are_clipped_in_front_of_a_fused_step(tmp_path, precision):
    run = workbench.train(
        "model.init_kwargs={size:pico}",
        "trainer=cpu",
        "trainer.max_steps=2",
        "trainer.gradient_clip_val=0.1",
        f"trainer.precision={precision}",
        f"paths.run_dir={tmp_path}",
        "callbacks=none",
        "logger=none",
        "exact_match=0",
        "save_model=false",
        "optim.fused=true",
    )
    assert run.metrics["steps"] == 2
