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
ARGUMENTS = ("backend", "mode", "options")  # of torch.compile
_VARIANTS = 64  # of a layer: with a gradient and without, in training and evaluation, of one row or several, by kind of attention


def check_compile(options: Compile, layout: str, gradient_checkpointing: bool | str, offloading: bool) -> None:
    """Refuses what cannot be compiled; a layout that is still to be chosen (``auto``) is not judged.

    Raises:
        UserError: an option that torch.compile has not, a backend that does not exist, or a combination that would silently run
            as if nothing had been compiled.
    """
    if not isinstance(options, bool | dict):
        raise UserError(f"method.torch_compile={options!r}: allowed are true, false, or a mapping of {', '.join(ARGUMENTS)}.")
    if options is False:
        return
    given = options if isinstance(options, dict) else {}
    for name in given:
        if name not in ARGUMENTS:
            raise UserError(
                f"method.torch_compile has no option {name!r}.{nearest(name, ARGUMENTS)} Allowed: {', '.join(ARGUMENTS)}."
            )
    backend, backends = given.get("backend"), torch._dynamo.list_backends(exclude_tags=None)
    if isinstance(backend, str) and backend not in backends:
        raise UserError(
            f"method.torch_compile.backend={backend} is not known.{nearest(backend, backends)} Allowed: {', '.join(backends)}."
        )
    if offloading:
        raise UserError(
            "method.torch_compile with activation_offloading=true would compile the layers anew in every pass: set one of the "
            "two to false."
        )
    if gradient_checkpointing and layout in ("packed", "shared"):
        raise UserError(
            f"method.torch_compile would compile nothing with gradient_checkpointing={gradient_checkpointing} and "
            f"layout={layout}: set method.layout=padded, or method.gradient_checkpointing=false."
        )


def compile_layers(model: PreTrainedModel, options: Compile) -> None:
    """Has each decoder layer compiled at its first call, in place: names of modules and weights stay.

    What surrounds the layers is not compiled: the head has a backward pass of its own, and attention over a forest of segments
    (`workbench.models.attention`) is left out of the graph, which ends there and starts again.

    Dropout above 0 is repeatable, but inductor draws other numbers than layers that are not compiled; with
    ``options={"fallback_random": True}`` it draws the same.

    Args:
        model: the transformers model.
        options: True, or arguments of ``torch.compile``.

    Raises:
        UserError: the model does not say which modules its layers are, or torch refuses the arguments.
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
    try:
        for layer in layers:
            layer.compile(**given)
    except (AssertionError, RuntimeError, TypeError) as error:
        raise UserError(f"method.torch_compile={options}: torch refuses this: {str(error).splitlines()[0]}") from None


def is_compiled(module: nn.Module) -> bool:
    """Whether any of its layers is compiled."""
    return any(m._compiled_call_impl is not None for m in module.modules())


@contextlib.contextmanager
def uncompiled(module: nn.Module) -> Iterator[None]:
    """Inside, compiled layers run as they are written: for passes whose shapes change with every token."""
    aside = [(m, m._compiled_call_impl) for m in module.modules() if m._compiled_call_impl is not None]
    try:
        for layer, _ in aside:
            layer._compiled_call_impl = None
        yield
    finally:
        for layer, call in aside:
            layer._compiled_call_impl = call


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
