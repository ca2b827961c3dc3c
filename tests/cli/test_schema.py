"""Signatures -> schema -> one-line errors."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from workbench.cli import check, schema
from workbench.errors import UserError


@dataclass
class Inner:
    """An inner node.

    Args:
        size: how big,
            in metres.
        kind: which one.
    """

    size: int
    kind: Literal["small", "large"] = "small"


class Base:
    """Base.

    Args:
        rate: how fast.
    """

    def __init__(self, rate: float = 0.5, *, tags: list[str] | None = None):
        pass


class Outer(Base):
    """Outer.

    Args:
        beta: strength.
    """

    def __init__(
        self,
        inner: Inner | None,
        beta: float = 0.1,
        names: Sequence[str] = (),
        layers: Literal["all"] | int = "all",
        pair: tuple[int, float] = (1, 2.0),
        table: dict[str, int] | None = None,
        function: Callable[[int], int] | None = None,
        anything: Any = None,
        flag: bool = False,
        **options: Any,
    ):
        pass


@pytest.fixture
def walker(monkeypatch):
    monkeypatch.setattr(schema, "OWN", __name__)
    definitions = {"Outer": schema.describe(Outer), "Inner": schema.describe(Inner)}
    return check._Walker(definitions.get)


def outer(**values):
    return {"_target_": "Outer", "inner": None, **values}


GOOD = [
    {"beta": 1},  # an integer is a number
    {"names": ["a"]},
    {"layers": 3},
    {"pair": [1, 2.5]},
    {"table": {"x": 1}},
    {"function": {"_target_": "unknown.f", "_partial_": True}},
    {"anything": {"a": [1, {"b": None}]}},
    {"flag": True},
    {"rate": 2.0},  # of the base class, through **options
    {"inner": {"_target_": "Inner", "size": 3, "kind": "large"}},
    {"inner": {"_target_": "Inner", "_partial_": True}},
]

BAD = [
    ({"betaa": 1.0}, "node.betaa is not an option of Outer. Did you mean 'beta'?"),
    ({"rates": 1.0}, "node.rates is not an option of Outer. Did you mean 'rate'?"),
    ({"beta": "high"}, "node.beta='high': expects a number."),
    ({"beta": True}, "node.beta=true: expects a number."),
    ({"flag": 1}, "node.flag=1: expects true or false."),
    ({"names": "a"}, "node.names='a': expects a list."),
    ({"names": ["a", 1]}, "node.names[1]=1: expects text."),
    ({"layers": "al"}, "node.layers='al': is not one of the choices. Did you mean 'all'? Allowed: all (or an integer)."),
    ({"layers": 2.0}, "node.layers=2.0: is not one of the choices. Allowed: all (or an integer)."),
    ({"pair": [1]}, "node.pair=[1]: expects 2 items."),
    ({"table": {"x": "y"}}, "node.table.x='y': expects an integer."),
    ({"rate": None}, "node.rate=null: expects a number."),
    ({"inner": {"_target_": "Inner"}}, "node.inner.size is required (how big, in metres): write node.inner.size=..."),
    ({"inner": {"_target_": "Inner", "size": "???"}}, "node.inner.size is required (how big, in metres)"),
    ({"inner": {"_target_": "Inner", "size": 3.0}}, "node.inner.size=3.0: expects an integer. Write 3."),
    (
        {"inner": {"_target_": "Inner", "size": 3, "kind": "smal"}},
        "node.inner.kind='smal': is not one of the choices. Did you mean 'small'? Allowed: small, large.",
    ),
    ({"inner": {"size": 3}}, "expects null or a node with a _target_"),
]


@pytest.mark.parametrize("values", GOOD, ids=str)
def test_accepts(walker, values):
    walker.value("node", outer(**values), {"target": "Outer"})


@pytest.mark.parametrize(("values", "message"), BAD, ids=str)
def test_refuses_in_one_line(walker, values, message):
    with pytest.raises(UserError) as caught:
        walker.value("node", outer(**values), {"target": "Outer"})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_required_argument(walker):
    with pytest.raises(UserError, match=r"node\.inner is required"):
        walker.node("node", {"_target_": "Outer"})


def test_provided_arguments_belong_to_their_groups(monkeypatch):
    monkeypatch.setattr(schema, "OWN", __name__)
    definition = {"properties": {"model": {}, "beta": {}}, "required": ["model"], "additionalProperties": False}
    walker = check._Walker({"M": definition}.get)
    walker.node("method", {"_target_": "M", "beta": 1})
    with pytest.raises(UserError, match=r"method\.model is not set here: write model=\.\.\."):
        walker.node("method", {"_target_": "M", "model": "x"})


def test_inherited_options_keep_descriptions_and_defaults(monkeypatch):
    monkeypatch.setattr(schema, "OWN", __name__)
    described = schema.describe(Outer)
    assert described["properties"]["rate"] == {"type": "number", "default": 0.5, "description": "how fast."}
    assert described["properties"]["beta"]["description"] == "strength."
    assert described["required"] == ["inner"]
    assert described["additionalProperties"] is False


def test_targets_in_yaml_text():
    text = "a:\n  _target_: torch.optim.SGD\nb:\n  - _target_: x.y.Z # note\n"
    assert schema.targets_in(text) == ["torch.optim.SGD", "x.y.Z"]


def test_locate_tells_a_missing_name_from_a_broken_module(tmp_path, monkeypatch):
    (tmp_path / "brokenmodule.py").write_text("import surely_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_there"):
        schema.locate("brokenmodule.Thing")
    with pytest.raises(AttributeError):
        schema.locate("json.Thing")
    with pytest.raises(ImportError, match="no module named 'not_a_package'"):
        schema.locate("not_a_package.Thing")
    assert schema.locate("json.decoder.JSONDecoder") is json.JSONDecoder
