"""Weights laid out for products with few rows, for the time of a generation on a CPU.

Writing a token multiplies a handful of rows with every matrix of the model. The general routine reads a matrix as it is stored,
more slowly than oneDNN's, which wants its blocks side by side (8 rows, 8 layers of width 512, 32,000 tokens: 28 ms against 17.5).
Laying out costs a copy of the weights, in time and in memory, about what a few tokens take.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

FEW = 32  # steps below which laying out does not pay
_ROWS = 8  # oneDNN is told of one number of rows; others run as well


@contextlib.contextmanager
def prepacked(module: nn.Module, steps: int) -> Iterator[None]:
    """Linear layers compute with laid-out copies of their weights inside; where that cannot be, they stay as they are.

    Args:
        module: nothing in it may be trained, moved or changed inside.
        steps: forward passes that are to come.
    """
    layers = _eligible(module) if steps >= FEW and is_available() else []
    try:
        for layer in layers:
            weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS)
            layer.forward = functools.partial(_product, weight, None if layer.bias is None else layer.bias.detach())
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _eligible(module: nn.Module) -> list[nn.Linear]:
    """Layers that are one fp32 matrix on the CPU. (Compiled modules have traced the forward that they were given.)"""
    if any(m._compiled_call_impl is not None for m in module.modules()):
        return []
    return [m for m in module.modules() if type(m) is nn.Linear and "forward" not in vars(m) and _is_plain(m.weight)]


def _is_plain(weight: Tensor) -> bool:
    return type(weight) in (Tensor, nn.Parameter) and weight.device.type == "cpu" and weight.dtype == torch.float32


def _product(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@functools.cache
def is_available() -> bool:
    """Whether this torch has these products (they have no public name) and they give what `nn.functional.linear` gives."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((3, 1, 24), (40, 24), (40,)))
    try:
        found = _product(torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS), bias, x)
    except (AttributeError, RuntimeError):  # not built in, or under another name
        return False
    return torch.allclose(found, nn.functional.linear(x, weight, bias), atol=1e-4)
