"""Planted bugs: each replaces a piece of one function's source, in this process, for as long as a block lasts.

The function keeps its identity, only its code is another: whoever has imported it runs the bug. `planted_bugs` lists them with
the class that must fail under each.
"""

import ast
import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import Any

from workbench.errors import UserError, nearest

CANONICAL = "recorded"


@dataclass(frozen=True)
class Mutant:
    """A bug.

    Args:
        name: in a few words.
        layer: part of the product that it lies in.
        target: ``module:function`` or ``module:Class.method``.
        old: a piece of its source, found there once.
        new: what stands there instead.
        killer: the class that must fail.
        member: the member of it that must fail; ``recorded``: the canonical run against the reference file.
    """

    name: str
    layer: str
    target: str
    old: str
    new: str
    killer: str
    member: str = CANONICAL


def mutant(name: str) -> Mutant:
    """The bug of that name."""
    from workbench.invariants.planted_bugs import MUTANTS

    if name not in MUTANTS:
        raise UserError(f"{name!r} is no mutant.{nearest(name, MUTANTS)}")
    return MUTANTS[name]


@contextlib.contextmanager
def planted(bug: Mutant | str) -> Iterator[None]:
    """Runs the block with a bug in place.

    Raises:
        ValueError: the piece of source is not there, or more than once: the bug has to be planted anew.
    """
    bug = mutant(bug) if isinstance(bug, str) else bug
    function = function_at(bug.target)
    changed = rewritten(function, bug.old, bug.new)
    names = ("__code__", "__defaults__", "__kwdefaults__")
    before = {name: getattr(function, name) for name in names}
    try:
        for name in names:
            setattr(function, name, getattr(changed, name))
        yield
    finally:
        for name, value in before.items():
            setattr(function, name, value)


def function_at(target: str) -> FunctionType:
    """The plain function behind an import path, under decorators, properties and caches."""
    module, _, path = target.partition(":")
    value: Any = importlib.import_module(module)
    for part in path.split("."):
        value = inspect.getattr_static(value, part)
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, cached_property):
        value = value.func
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    return inspect.unwrap(value)


def rewritten(function: FunctionType, old: str, new: str) -> FunctionType:
    """The function with ``new`` for ``old`` in its source, in the same module and, for ``super()``, the same class."""
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise ValueError(f"{function.__qualname__} holds {old!r} {source.count(old)} times, not once")
    tree = ast.parse(source.replace(old, new))
    definition = tree.body[0]
    definition.decorator_list = []
    free = function.__code__.co_freevars
    # A function around it whose parameters are the variables that the original closes over (`__class__` for super()).
    arguments = ", ".join(free)
    outer = ast.parse(f"def outer({arguments}):\n    pass\n    return {definition.name}").body[0]
    outer.body[0] = definition
    module = ast.fix_missing_locations(ast.Module([outer], []))
    names: dict[str, Callable] = {}
    exec(compile(module, inspect.getfile(function), "exec"), function.__globals__, names)
    changed = names["outer"](*[cell.cell_contents for cell in function.__closure__ or ()])
    if changed.__code__.co_freevars != free:
        raise ValueError(f"{function.__qualname__}: {new!r} closes over other variables than {free}")
    return changed
