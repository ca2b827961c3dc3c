"""``workbench inspect``: what a configuration would train on, before it does.

Data is prepared as in training and shared with it through the cache; no weight is read. The exit code is 1 if there is a fault
(`workbench.data.inspection_findings` says what is one), 2 for a mistake in the configuration, else 0.
"""

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from workbench.cli import check as checker
from workbench.cli.flags import quote
from workbench.cli.settings import InspectOptions
from workbench.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    import rich.console

    from workbench.cli.inspect_cost import Cost
    from workbench.data.inspection import SetInspection
    from workbench.data.inspection_findings import Finding
    from workbench.data.inspection_steps import Execution, Steps

PAGE = "inspect.html"
_UNUSED = ("callbacks", "logger")  # parts of a run that have no say here, and need its folder
_SHORT = ("rows", "html", "tolerance", "stream_rows")  # keys that may be typed without their group


def rewrite(argv: list[str]) -> list[str]:
    """``--html [file]``, ``method=null`` and the group's keys without ``inspect.`` in Hydra's own words."""
    words, out = list(argv), []
    while words:
        word = words.pop(0)
        key, equals, value = word.partition("=")
        if key == "--html":
            named = bool(words) and not words[0].startswith("-") and "=" not in words[0]
            value = value if equals else words.pop(0) if named else PAGE
            out.append(f"inspect.html={quote(value)}")
        elif word in ("method=null", "method=none"):
            out.append("~method")
        elif equals and key in _SHORT:
            out.append(f"inspect.{key}={quote(value) if key == 'html' and value != 'null' else value}")
        else:
            out.append(word)
    return out


def main(cfg: DictConfig) -> int:
    """Prints the report; 1 if it lists a fault."""
    found = inspect_config(cfg)
    found.show()
    if cfg.inspect.html is not None:
        print(f"page        {found.write_html(cfg.inspect.html)}")
    return 0 if found.ok else 1


def inspect(*config: "DictConfig | str", **objects: Any) -> "Inspection":
    """What a configuration would train on; the notebook's ``workbench inspect``.

    Args:
        config: one composed configuration, or overrides as on the command line (``"data=file"``, ``"data.train=rows.jsonl"``).
        objects: built parts that replace the configured ones, as for `workbench.train`: ``model``, ``tokenizer``, ``data`` (a
            `DataModule`, or a data set for its ``train``), ``eval``; and ``rows``, how many rows to show or which.

    Raises:
        UserError: for a mistake in the configuration, in one line.
    """
    if len(config) == 1 and not isinstance(config[0], str):
        cfg = OmegaConf.create(OmegaConf.to_container(OmegaConf.create(config[0])))
    elif all(isinstance(c, str) for c in config):
        from workbench.cli.config import load

        cfg = load(rewrite(list(config)), "inspect").cfg
    else:
        raise UserError("inspect takes one configuration (from workbench.compose), or overrides as texts, not both.")
    checker.check(cfg, "inspect")
    return inspect_config(cfg, **objects)


@dataclass
class Inspection:
    """What was found. A notebook shows it as a page; ``print`` as text.

    Args:
        title: name of the run.
        sets: each data set, ``train`` first.
        steps: the plan on the configured devices; None where there is nothing to plan.
        cost: the estimates; None likewise.
        findings: faults, then warnings.
        read_at: where a method that scores reads its score, in words; empty for others.
    """

    title: str
    sets: "dict[str, SetInspection]"
    steps: "Steps | None" = None
    cost: "Cost | None" = None
    findings: "list[Finding]" = field(default_factory=list)
    read_at: str = ""

    @property
    def faults(self) -> list[str]:
        """Sentences about what must be mended."""
        return [f"{f.where}: {f.text}" for f in self.findings if f.level == "fault"]

    @property
    def warnings(self) -> list[str]:
        """Sentences about what is worth a look."""
        return [f"{f.where}: {f.text}" for f in self.findings if f.level == "warning"]

    @property
    def ok(self) -> bool:
        """Whether there is no fault."""
        return not self.faults

    @property
    def report(self) -> dict[str, Any]:
        """All numbers, as JSON can hold them: ``sets``, ``steps``, ``cost``, ``findings``."""
        from workbench.cli import inspect_cost

        steps = None if self.steps is None else asdict(self.steps) | {"padding": self.steps.padding}
        return {
            "sets": {name: data.to_dict() for name, data in self.sets.items()},
            "steps": steps,
            "cost": None if self.cost is None else inspect_cost.to_dict(self.cost),
            "findings": [asdict(f) for f in self.findings],
        }

    @property
    def table(self) -> "pd.DataFrame":
        """The numbers of the data sets, a column for each."""
        import pandas as pd

        return pd.DataFrame({name: pd.Series(data.to_dict(), dtype=object) for name, data in self.sets.items()})

    def show(self, console: "rich.console.Console | None" = None) -> None:
        """Prints the report; trained tokens are coloured or, where there are no colours, in « »."""
        from workbench.cli import inspect_text

        inspect_text.show(self, console)

    def write_html(self, path: str | pathlib.Path) -> pathlib.Path:
        """Writes the report as one page that needs no other file."""
        from workbench.cli.inspect_page import page

        file = pathlib.Path(path).expanduser()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(page(self), encoding="utf-8")
        except OSError as error:
            raise UserError(f"inspect.html={str(path)!r} cannot be written: {error.strerror}.") from None
        return file

    def _repr_html_(self) -> str:
        from workbench.cli.inspect_page import fragment

        return fragment(self)

    def __str__(self) -> str:
        from workbench.cli import inspect_text

        return inspect_text.plain(self)

    def __repr__(self) -> str:
        return f"Inspection({self.title!r}, {len(self.faults)} faults, {len(self.warnings)} warnings)"


def inspect_config(cfg: DictConfig, **objects: Any) -> Inspection:
    """`inspect` with a configuration that has been checked."""
    import lightning as L

    from workbench import run as runs
    from workbench.data.inspection import inspect_sets
    from workbench.data.inspection_findings import find

    node = checker.to_plain(cfg)
    checker.check_targets(OmegaConf.create({key: part for key, part in node.items() if key not in _UNUSED}))
    options = asdict(InspectOptions()) | dict(node.get("inspect") or {})
    rows = objects.pop("rows", options["rows"])
    L.seed_everything(node["seed"], workers=True, verbose=False)  # as training does, for sources that draw at random
    data = runs.build_data(node, objects)
    _check_prompts(node, data)
    model = objects.get("model") or runs.instantiate(node["model"])
    tokenizer = objects.get("tokenizer") or _tokenizer(model)
    sets = inspect_sets(
        data, tokenizer, data_types(node), rows=rows, stream_rows=options["stream_rows"], ends=_config_ends(model)
    )
    found = Inspection(str(node.get("name") or "inspect"), sets, read_at=_read_at(node))
    if sets["train"].rows is not None:
        found.steps, found.cost = _plan(cfg, node, data, model, sets["train"])
    found.findings = find(sets, found.steps, tokenizer, tolerance=options["tolerance"])
    return found


def data_types(node: Mapping[str, Any]) -> tuple[str, ...]:
    """Types that the configured method takes; all of them without one."""
    from workbench.data.formats import DATA_TYPES
    from workbench.run import locate

    if not node.get("method"):
        return DATA_TYPES
    return tuple(getattr(locate(node["method"]["_target_"]), "data_types", None) or DATA_TYPES)


def _read_at(node: Mapping[str, Any]) -> str:
    from workbench.run import locate

    method = locate(node["method"]["_target_"]) if node.get("method") else None
    return "" if getattr(method, "generates", True) else "the last token of each answer"


def _check_prompts(node: Mapping[str, Any], data: Any) -> None:
    from workbench.data.targets import check_prompts_read, check_tokens_read
    from workbench.run import locate

    if node.get("method"):
        method = locate(node["method"]["_target_"])
        check_tokens_read(data.spec.train_on, data.spec.role_weights, method)
        check_prompts_read(data.spec.train_on, method)


def execution(cfg: DictConfig, node: Mapping[str, Any]) -> "Execution":
    """Devices and bounds of the configured run."""
    from workbench.cli.inspect_cost import tensor_parallel
    from workbench.cli.notebook import num_devices
    from workbench.data.inspection_steps import Execution

    trainer, method = node["trainer"], node.get("method") or {}
    processes = num_devices(cfg) * (trainer.get("num_nodes") or 1)
    return Execution(
        world_size=max(1, processes // tensor_parallel(node.get("strategy"))),
        max_epochs=trainer.get("max_epochs"),
        max_steps=trainer.get("max_steps") if trainer.get("max_steps") is not None else -1,
        limit_train_batches=trainer.get("limit_train_batches"),
        layout=_expected_layout(method.get("layout")),
        pad_to_multiple_of=method.get("pad_to_multiple_of"),
        windows={name: method[name] for name in _WINDOWS} if _is_online(method) else None,
        longest=method.get("max_completion_length") or 0,
    )


def _expected_layout(layout: str | None) -> str:
    """What ``auto`` comes to on the models that are known; only a built model can tell."""
    return "shared" if layout == "auto" else layout or "padded"


_WINDOWS = ("num_generations", "steps_per_generation", "num_iterations")


def _is_online(method: Mapping[str, Any]) -> bool:
    return all(name in method for name in _WINDOWS)


def _plan(cfg: DictConfig, node: Mapping[str, Any], data: Any, model: Any, train: "SetInspection") -> "tuple[Steps, Cost]":
    from workbench import run as runs
    from workbench.cli.inspect_cost import estimate_cost
    from workbench.data.inspection_steps import plan_steps

    steps = plan_steps(data, train.rows, execution(cfg, node))
    return steps, estimate_cost(model, node, runs.instantiate(node.get("peft")), steps)


def _tokenizer(model: Any) -> Any:
    from workbench.models.tokenizer import load_tokenizer

    return load_tokenizer(model)


def _config_ends(model: Any) -> Sequence[int]:
    """End tokens that the model's config names."""
    from workbench.models.load import load_config
    from workbench.models.tokenizer import as_list

    return as_list(getattr(load_config(model).get_text_config(), "eos_token_id", None))
