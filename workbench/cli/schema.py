"""The schema of the configuration, generated from signatures: ``python -m workbench.cli.schema`` rewrites
``schema.json``.

The file lets the command line check a configuration without importing torch. Its words are JSON Schema's (``type``,
``enum``, ``anyOf``, ``items``, ``properties``, ``required``, ``additionalProperties``, ``$ref``: a mapping with the
keys of that dataclass) and two more: ``target``, a node that is built from some ``_target_``, and ``callable``, a
function (built from a ``_target_``). ``$defs`` maps every ``_target_`` to its keys.
"""

import enum
import importlib.metadata
import inspect
import json
import pathlib
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Literal, Union

from workbench.cli.settings import COMMAND_SETTINGS, Target

SCHEMA_FILE = pathlib.Path(__file__).with_name("schema.json")
OWN = "workbench."
SOURCE = "workbench.data.source_spec.SourceSpec"  # what a mapping in data.train and data.eval describes
# Whose ``**kwargs`` go to another package's class.
OPTIONS_FROM = {"lightning.pytorch.strategies.ddp.DDPStrategy": "torch.nn.parallel.DistributedDataParallel"}
_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", pathlib.Path: "string"}
_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def load() -> dict:
    """The schema as shipped."""
    return json.loads(SCHEMA_FILE.read_text())


def describe_type(annotation: Any, refs: set[str] | None = None) -> dict:
    """Schema of one annotation; names of own classes it refers to are added to ``refs``."""
    refs = set() if refs is None else refs
    if annotation in _SCALARS:
        return {"type": _SCALARS[annotation]}
    if annotation in (list, tuple, set, Sequence, Iterable):
        return {"type": "array"}
    if annotation in (dict, Mapping):
        return {"type": "object"}
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is not None:
        return _describe_generic(origin, arguments, refs)
    if isinstance(annotation, type) and annotation not in (object, Any):
        return _describe_class(annotation, refs)
    return {}  # Any, TypeVar, forward references that could not be resolved: anything goes


def _describe_generic(origin: Any, arguments: tuple, refs: set[str]) -> dict:
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is Annotated:
        marks = [a for a in arguments[1:] if isinstance(a, Target)]
        return _target(marks[0].path, refs) if marks else describe_type(arguments[0], refs)
    if origin in (Union, types.UnionType):
        options = [describe_type(a, refs) for a in arguments]
        return {} if {} in options else {"anyOf": options}
    if origin is Callable:
        return {"callable": True}
    if origin is type:
        return {"target": "type"}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        values = describe_type(arguments[1], refs)
        return {"type": "object", "additionalProperties": values} if values else {"type": "object"}
    if isinstance(origin, type) and issubclass(origin, (Sequence, AbstractSet, Iterable)):
        inner = [a for a in arguments if a is not Ellipsis]
        if origin is tuple and Ellipsis not in arguments:
            return {"type": "array", "prefixItems": [describe_type(a, refs) for a in inner]}
        items = describe_type(inner[0], refs)
        return {"type": "array", "items": items} if items else {"type": "array"}
    return _describe_class(origin, refs) if isinstance(origin, type) else {}


def _describe_class(annotation: type, refs: set[str]) -> dict:
    if issubclass(annotation, enum.Enum):
        return {"enum": [member.value for member in annotation]}
    if annotation.__module__ == "builtins":
        return {}
    path = f"{annotation.__module__}.{annotation.__qualname__}"
    if annotation.__module__ == COMMAND_SETTINGS["train"][1].__module__:
        refs.add(path)
        return {"$ref": path}
    return _target(path, refs)


def _target(path: str, refs: set[str]) -> dict:
    if path.startswith(OWN):
        refs.add(path)
    return {"target": path}


def describe(target: Callable, refs: set[str] | None = None) -> dict:
    """Schema of a class's or function's keyword arguments.

    ``**kwargs`` of a class of ours are those of its ``options_from``, a class that it builds from them, else those of the class
    it derives from.
    """
    refs = set() if refs is None else refs
    described = _describe_one(target, refs)
    base = _options_from(target)
    if described["additionalProperties"] and base is not None:
        inherited = describe(base, refs)
        described["properties"] = inherited["properties"] | described["properties"]
        if base.__module__.startswith(OWN):  # others' required arguments are filled in by who takes them
            described["required"] = list(dict.fromkeys(described["required"] + inherited["required"]))
        described["additionalProperties"] = inherited["additionalProperties"]
    return described


def _options_from(target: Callable) -> type | None:
    """The class that takes the ``**kwargs`` of ``target``, if it is known."""
    if not isinstance(target, type) or hasattr(target, "options_from"):
        return getattr(target, "options_from", None)
    name = f"{target.__module__}.{target.__qualname__}"
    if name in OPTIONS_FROM:
        return locate(OPTIONS_FROM[name])
    owners = [c for c in target.__mro__ if "__init__" in vars(c) and c.__module__.startswith(OWN)]
    return owners[1] if len(owners) > 1 else None


def _describe_one(target: Callable, refs: set[str]) -> dict:
    function = target.__init__ if isinstance(target, type) else target
    hints = _type_hints(target, function)
    described = descriptions(inspect.getdoc(target) or "")
    properties, required, is_open = {}, [], False
    for name, parameter in inspect.signature(target).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            is_open = True
        if parameter.kind not in _KEYWORDS:
            continue
        node = describe_type(hints.get(name, Any), refs)
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
        elif _is_plain(parameter.default):
            node["default"] = parameter.default
        if name in described:
            node["description"] = described[name]
        properties[name] = node
    return {"properties": properties, "required": required, "additionalProperties": is_open}


def _type_hints(target: Callable, function: Callable) -> dict:
    for source in (function, target):
        try:
            hints = typing.get_type_hints(source, include_extras=True)
        except (NameError, TypeError, AttributeError):  # names imported for type checkers only
            continue
        if hints:
            return hints
    return {}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def descriptions(docstring: str) -> dict[str, str]:
    """``name -> text`` of a docstring's ``Args:`` section."""
    section = re.search(r"^Args:\n(.*?)(?:\n\n\S|\n\S|\Z)", docstring + "\n", flags=re.M | re.S)
    if not section:
        return {}
    entries = re.findall(r"^ {4}(\w+)(?: \([^)]*\))?: (.*(?:\n {5,}.*)*)", section.group(1), flags=re.M)
    return {name: re.sub(r"\s+", " ", text).strip() for name, text in entries}


def locate(path: str) -> Callable:
    """The class or function at a dotted path; raises ImportError or AttributeError."""
    parts = path.split(".")
    for split in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:split])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and not f"{name}.".startswith(f"{error.name}."):
                raise  # the module exists and imports something that does not
            continue
        for part in parts[split:]:
            found = getattr(found, part)
        return found
    raise ImportError(f"no module named {parts[0]!r}")


def targets_in(text: str) -> list[str]:
    """Every ``_target_`` written in a YAML text."""
    return re.findall(r"^\s*(?:- )?_target_:\s*([\w.]+)", text, flags=re.M)


def distribution(path: str) -> str:
    """Name and version of the installed package that holds ``path``, such as ``torch 2.13.0``."""
    package = path.split(".")[0]
    try:
        return f"{package} {importlib.metadata.version(package).split('+')[0]}"
    except importlib.metadata.PackageNotFoundError:
        return package


def build() -> dict:
    """The whole schema: the commands' top levels, and every target named in ``conf/`` or reached from another."""
    from workbench.cli.config import config_dir

    refs: set[str] = {SOURCE}
    commands = {}
    for command, (_, settings) in COMMAND_SETTINGS.items():
        commands[command] = describe(settings, refs)
    for file in sorted(config_dir().rglob("*.yaml")):
        if "hydra" not in file.relative_to(config_dir()).parts:  # its own plugins
            refs.update(targets_in(file.read_text()))
    definitions: dict[str, dict] = {}
    while pending := sorted(refs - definitions.keys()):
        for path in pending:
            definitions[path] = describe(locate(path), refs)
            if not path.startswith(OWN):
                definitions[path]["from"] = distribution(path)
    return {"commands": commands, "$defs": dict(sorted(definitions.items()))}


def main() -> None:
    SCHEMA_FILE.write_text(json.dumps(build(), indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {SCHEMA_FILE}")


if __name__ == "__main__":
    main()
