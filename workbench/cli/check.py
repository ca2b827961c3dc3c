"""Checks a composed configuration before anything is built: keys, types, choices, required values, combinations.

`check` needs only ``schema.json`` and imports no torch; `check_targets` then imports what a run builds from other
packages and checks it against the signatures found there. Both raise `UserError` with one line.
"""

import functools
import importlib.metadata
import importlib.util
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from workbench.cli import rules, schema
from workbench.errors import UserError, nearest

# Keys that Hydra's instantiate reads and the target never sees.
RESERVED = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}
# Arguments that are not keys of their node, and where each is set instead.
FROM_GROUPS = {
    "method": {key: f"{key}=..." for key in ("model", "peft", "optim", "scheduler", "seed")},
    "data": {"data_types": "data.data_type=... (the method says which types it takes)"},
    "trainer": {
        **{key: f"{key}=..." for key in ("strategy", "callbacks", "logger")},
        "accumulate_grad_batches": "data.micro_batch_size=... (the accumulation follows from it and data.batch_size)",
        "default_root_dir": "paths.run_dir=...",
        "enable_checkpointing": "callbacks.checkpoint=null to have none",
        "enable_progress_bar": "callbacks.progress=null to have none",
        "overfit_batches": "debug=overfit",
    },
}
MISSING = "???"
MIXTURE_KEYS = {"sources", "interleave", "source_column"}
_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
_WORDS = {"boolean": "true or false", "integer": "an integer", "number": "a number", "string": "text"}
_WORDS |= {"null": "null", "array": "a list", "object": "a mapping"}


def check(cfg: DictConfig, command: str = "train") -> None:
    """Raises `UserError` for the first key of ``cfg`` that the schema of ``command`` does not know, or whose value it refuses."""
    plain = to_plain(_with_run_dir(cfg))
    shipped = _shipped_schema()
    walker = _Walker(functools.partial(_cheap_definition, shipped))
    walker.keys("", plain, shipped["commands"][command], command)
    if "data" in plain:
        walker.sources("data.train", plain["data"].get("train"))
        walker.named_sources("data.eval", plain["data"].get("eval"))
    rules.check(plain, command)


def _with_run_dir(cfg: DictConfig) -> DictConfig:
    """The folder of a run is named when it starts; what points into it is text by then."""
    if OmegaConf.select(cfg, "paths.run_dir", default="") is not None:
        return cfg
    unresolved = OmegaConf.to_container(cfg)
    unresolved["paths"]["run_dir"] = "<run_dir>"
    return OmegaConf.create(unresolved)


def check_keys(path: str, values: dict, definition: dict, owner: str) -> None:
    """Raises `UserError` unless ``values`` fits the keys of ``definition``."""
    _Walker(_imported_definition).keys(path, values, definition, owner)


def check_targets(cfg: DictConfig) -> None:
    """Imports every ``_target_`` of ``cfg`` and checks its keys against the signature; raises `UserError`."""
    walker = _Walker(_imported_definition)
    for path, node in walk_targets(to_plain(cfg)):
        walker.node(path, node)


def to_plain(cfg: DictConfig) -> dict:
    """The configuration as dictionaries and lists, interpolations resolved, missing values as ``???``."""
    try:
        return OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "configuration"
        raise UserError(f"{key}: {str(error).splitlines()[0]}.") from None


def walk_targets(value: Any, path: str = "") -> Iterator[tuple[str, dict]]:
    """Every node with a ``_target_`` below ``value``, with its dotted path, inner nodes first."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from walk_targets(inner, f"{path}.{key}" if path else str(key))
        if "_target_" in value:
            yield path, value
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from walk_targets(inner, f"{path}[{index}]")


@functools.cache
def _shipped_schema() -> dict:
    return schema.load()


def _cheap_definition(shipped: dict, path: str) -> dict | None:
    """The recorded keys of a target; None where only an import can tell (other package, or another version of it)."""
    definition = shipped["$defs"].get(path)
    if definition is None:
        if path.startswith(schema.OWN):
            own = [p for p in shipped["$defs"] if p.startswith(schema.OWN)]
            if _is_written(path):  # added after the schema was made
                return None
            raise UserError(f"_target_ {path!r} does not exist.{nearest(path, own)}")
        return None
    if "from" in definition and definition["from"] != schema.distribution(path):
        return None
    return definition


def _is_written(path: str) -> bool:
    """Whether a module of ours defines the name, or exports it lazily; found in its text, since an import would bring torch."""
    module, _, name = path.rpartition(".")
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return False
    if found is None or found.origin is None:
        return False
    text = pathlib.Path(found.origin).read_text()
    return re.search(rf"^(?:(?:class|def) {re.escape(name)}\b|    \"{re.escape(name)}\": )", text, flags=re.M) is not None


def _imported_definition(path: str) -> dict | None:
    try:
        target = schema.locate(path)
    except (ImportError, AttributeError) as error:
        raise UserError(f"_target_ {path!r} cannot be imported: {error}.{_install_hint(path)}") from None
    return schema.describe(target) if callable(target) else None


def _install_hint(path: str) -> str:
    package = path.split(".")[0]
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f" Is the package {package!r} installed?"
    return ""


class _Walker:
    """Compares values with their schema; ``define`` gives the keys of a ``_target_``, or None if they are not known."""

    def __init__(self, define: Callable[[str], dict | None]):
        self.define = define

    def keys(self, path: str, values: dict, spec: dict, owner: str, provided: Mapping[str, str] | None = None) -> None:
        """Checks the keys of one mapping, each value, and that none is missing; ``provided`` come from elsewhere."""
        provided = provided or {}
        allowed = {k: v for k, v in spec["properties"].items() if k not in provided}
        for key, value in values.items():
            name = f"{path}.{key}" if path else str(key)
            if key in RESERVED and path:
                continue
            if key in provided and key in spec["properties"]:
                raise UserError(f"{name} is not set here: write {provided[key]}.")
            if key in allowed:
                self.value(name, value, allowed[key])
            elif not spec["additionalProperties"]:
                raise UserError(_unknown(name, key, allowed, owner, self._deeper(path, key, allowed)))
        if values.get("_partial_"):
            return
        for key in spec["required"]:
            if key not in values and key not in provided:
                raise UserError(_required(f"{path}.{key}" if path else key, allowed.get(key, {})))

    def _deeper(self, path: str, key: Any, allowed: dict) -> str | None:
        """Where a node below has this very key."""
        for name, spec in allowed.items():
            for option in spec.get("anyOf", [spec]):
                inner = option.get("$ref") or option.get("target", "")
                definition = self.define(inner) if inner.startswith(schema.OWN) else None
                if definition is not None and key in definition["properties"]:
                    return f"{path}.{name}.{key}" if path else f"{name}.{key}"
        return None

    def node(self, path: str, value: dict) -> None:
        """Checks one ``_target_`` node."""
        target = value["_target_"]
        if not isinstance(target, str):
            raise UserError(f"{path}._target_={target!r} is not a dotted path.")
        try:
            definition = self.define(target)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        if definition is None:
            return
        self.keys(path, value, definition, target.rsplit(".", 1)[-1], FROM_GROUPS.get(path, {}))

    def sources(self, path: str, value: Any) -> None:
        """Checks the keys of a data source, or of each source of a mixture."""
        if isinstance(value, dict) and "sources" in value:
            for key in value.keys() - MIXTURE_KEYS:
                raise UserError(_unknown(f"{path}.{key}", key, dict.fromkeys(sorted(MIXTURE_KEYS)), "a mixture", None))
            self.sources(f"{path}.sources", value["sources"])
        elif isinstance(value, list):
            for index, item in enumerate(value):
                self.sources(f"{path}[{index}]", item)
        elif isinstance(value, dict):
            definition = self.define(schema.SOURCE)
            self.keys(path, value, definition, "a source")
        elif value == MISSING:
            raise UserError(_required(path, {}))

    def named_sources(self, path: str, value: Any) -> None:
        """Checks evaluation sources, which may be named."""
        keys = self.define(schema.SOURCE)["properties"]
        if isinstance(value, dict) and "sources" not in value and not value.keys() & keys.keys():
            for name, source in value.items():
                self.sources(f"{path}.{name}", source)
        else:
            self.sources(path, value)

    def value(self, path: str, value: Any, spec: dict) -> None:
        """Checks one value against its schema."""
        if value == MISSING:
            raise UserError(_required(path, spec))
        problem = self.problem(path, value, spec)
        if problem:
            raise UserError(f"{path}={show(value)}: {problem}")

    def problem(self, path: str, value: Any, spec: dict) -> str | None:
        """What is wrong with ``value`` in words, or None; faults inside a fitting container are raised."""
        if isinstance(value, dict) and "_target_" in value:
            self.node(path, value)
            return None
        options = spec.get("anyOf", [spec])
        problems = [self._simple_problem(path, value, option) for option in options]
        return None if None in problems else _join(value, options, problems)

    def _simple_problem(self, path: str, value: Any, spec: dict) -> str | None:
        if "$ref" in spec and isinstance(value, dict):
            self.keys(path, value, self.define(spec["$ref"]), path)
            return None
        if "anyOf" in spec:
            return self.problem(path, value, spec)
        if "enum" in spec:
            # True == 1 in Python, but not in a file
            return None if any(value == e and type(value) is type(e) for e in spec["enum"]) else "enum"
        if "target" in spec or "callable" in spec or "$ref" in spec:
            return "node"
        if "type" not in spec:
            for inner_path, node in walk_targets(value, path):
                self.node(inner_path, node)
            return None
        if not _has_type(value, spec["type"]):
            return spec["type"]
        self._inside(path, value, spec)
        return None

    def _inside(self, path: str, value: Any, spec: dict) -> None:
        if spec["type"] == "array":
            specs = spec.get("prefixItems") or [spec.get("items", {})] * len(value)
            if len(specs) != len(value):
                raise UserError(f"{path}={show(value)}: expects {len(specs)} items.")
            for index, (item, inner) in enumerate(zip(value, specs, strict=True)):
                self.value(f"{path}[{index}]", item, inner)
        elif spec["type"] == "object":
            for key, item in value.items():
                self.value(f"{path}.{key}", item, spec.get("additionalProperties", {}))


def _has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if value != value:  # NaN is no number that an option could mean
        return False
    return isinstance(value, _TYPES[name])


def _join(value: Any, options: list[dict], problems: list[str]) -> str:
    """One sentence for a value that fits none of ``options``."""
    choices = [str(c).lower() if isinstance(c, bool) else str(c) for o in options for c in o.get("enum", [])]
    words = [_WORDS[p] for p in problems if p in _WORDS and p != "null"]
    if "null" in problems:
        words.append("null")
    if "node" in problems:
        words.append("a node with a _target_ (choose an option of its group)")
    if not choices:
        return f"expects {' or '.join(dict.fromkeys(words))}.{_numeric_hint(value, words)}"
    hint = nearest(value, choices) if isinstance(value, str) else ""
    others = f" (or {' or '.join(dict.fromkeys(words))})" if words else ""
    return f"is not one of the choices.{hint} Allowed: {', '.join(dict.fromkeys(choices))}{others}."


def _numeric_hint(value: Any, words: list[str]) -> str:
    if isinstance(value, float) and value.is_integer() and "an integer" in words:
        return f" Write {int(value)}."
    return ""


def _unknown(name: str, key: Any, allowed: dict, owner: str, deeper: str | None) -> str:
    hint = f" Did you mean {deeper!r}?" if deeper else nearest(str(key), allowed)
    listed = "" if hint else f" Options: {', '.join(allowed)}."
    return f"{name} is not an option of {owner}.{hint}{listed}"


def _required(name: str, spec: dict) -> str:
    about = f" ({spec['description'].rstrip('.')})" if "description" in spec else ""
    return f"{name} is required{about}: write {name}=..."


def show(value: Any) -> str:
    """A value as a person would type it, cut to one short line."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
