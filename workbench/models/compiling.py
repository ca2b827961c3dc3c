"""`torch.compile`, a decoder layer at a time."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from workbench.errors import UserError, nearest

Compile = bool | dict[str, Any]
_FIXED = ("fullgraph", "dynamic", "recompile_limit")  # of torch.compile, and not for users to set
_VARIANTS = 64  # of a layer: with a gradient and without, in training and evaluation, of one row or several, by kind of attention


def check_compile(options: Compile, layout: str, gradient_checkpointing: bool | str, offloading: bool) -> None:
    """Refuses what cannot be compiled.

    Raises:
        UserError: an option that torch.compile has not, a backend that does not exist, or a combination that would silently run
            as if nothing had been compiled.
    """
    if options is False:
        return
    known = [name for name in inspect.signature(torch.compile).parameters if name not in ("model", "name", *_FIXED)]
    for name in options if isinstance(options, dict) else ():
        if name not in known:
            raise UserError(f"method.torch_compile has no option {name!r}.{nearest(name, known)} Allowed: {', '.join(known)}.")
    backend = options.get("backend", "inductor") if isinstance(options, dict) else "inductor"
    backends = torch._dynamo.list_backends(exclude_tags=None)
    if isinstance(backend, str) and backend not in backends:
        raise UserError(f"method.torch_compile.backend={backend} is not known.{nearest(backend, backends)}")
    if offloading:
        raise UserError(
            "method.torch_compile with activation_offloading=true would compile the layers anew in every pass: set one of the "
            "two to false."
        )
    if gradient_checkpointing and layout != "padded":
        raise UserError(
            f"method.torch_compile would compile nothing with gradient_checkpointing={gradient_checkpointing} and "
            f"layout={layout}: set method.layout=padded, or method.gradient_checkpointing=false."
        )


def compile_layers(model: PreTrainedModel, options: Compile) -> None:
    """Has each decoder layer compiled at its first call, in place: names of modules and weights stay.

    What surrounds the layers is not compiled: the head has a backward pass of its own, and attention over a forest of segments
    (`workbench.models.attention`) is left out of the graph, which ends there and starts again.

    Args:
        model: the transformers model.
        options: True, or arguments of ``torch.compile``.

    Raises:
        UserError: the model does not say which modules its layers are.
    """
    if options is False:
        return
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise UserError(f"{type(model).__name__} does not say which modules its layers are; set method.torch_compile=false.")
    given: dict[str, Any] = {"dynamic": True, **(options if isinstance(options, dict) else {})}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        given["recompile_limit"] = _VARIANTS
    for layer in layers:
        layer.compile(**given)


def is_compiled(module: nn.Module) -> bool:
    """Whether any of its layers is compiled."""
    return any(m._compiled_call_impl is not None for m in module.modules())


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Inside, compiled layers run as they are written: for passes whose shapes change with every token."""
    with torch.compiler.set_stance("force_eager"):
        yield


def check_compiler(device: torch.device, options: Compile) -> None:
    """Refuses to start where there is nothing to compile with.

    Raises:
        UserError: no C++ compiler on a CPU, or no Triton on CUDA, for the backend inductor.
    """
    backend = options.get("backend", "inductor") if isinstance(options, dict) else "inductor"
    if options is False or backend != "inductor":
        return
    if device.type == "cpu":
        from torch._inductor import cpp_builder, exc

        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler:
            raise UserError(
                "method.torch_compile needs a C++ compiler (g++ or clang, or its path in CXX); install one, or set "
                "method.torch_compile=false."
            ) from None
    elif device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise UserError("method.torch_compile needs Triton on CUDA; install triton, or set method.torch_compile=false.")
