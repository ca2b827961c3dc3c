"""The README.md of a saved model: what it is, how it was trained, how to load it, and whom to cite."""

import importlib.metadata
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from huggingface_hub import ModelCardData

import workbench
from workbench.models.heads import load_classifier
from workbench.models.load import load_model, plain
from workbench.models.papers import PAPERS, Paper

_PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}
_KINDS = {"AutoModelForSequenceClassification": "sequence", "AutoModelForTokenClassification": "token"}
_PACKAGES = ("torch", "lightning", "transformers", "datasets", "peft")


def model_card(
    *,
    name: str,
    method: str,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    hyperparameters: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    adapter: bool = False,
    auto_class: str = "AutoModelForCausalLM",
    num_labels: int | None = None,
    papers: Sequence[Paper] | None = None,
    license: str | None = None,
    language: str | list[str] | None = None,
    tags: Sequence[str] = (),
    description: str | None = None,
) -> str:
    """Text of a README.md with the front matter that the hub reads.

    Paths of the machine it was trained on are cut to their last part.

    Args:
        name: of the model, a heading.
        method: as in ``conf/method``; chooses the paper from `workbench.models.papers.PAPERS`.
        base_model: hub id, or whatever it was loaded from.
        datasets: hub ids, or file names.
        hyperparameters: the settings of the run, nested or flat.
        metrics: final values by name.
        adapter: whether the directory holds an adapter rather than a whole model.
        auto_class: of transformers, that loads the model (an adapter's base).
        num_labels: outputs of a classifier.
        papers: to cite; None looks ``method`` up.
        license: hub identifier, such as ``apache-2.0``.
        language: ISO codes.
        tags: further ones for the hub.
        description: first paragraph.
    """
    base, data = _public(base_model), [_public(d) for d in datasets]
    papers = [PAPERS[method]] if papers is None and method in PAPERS else papers or []
    front = ModelCardData(
        base_model=base if _is_hub_id(base) else None,
        datasets=[d for d in data if _is_hub_id(d)] or None,
        library_name="peft" if adapter else "transformers",
        license=license,
        language=language,
        pipeline_tag=_PIPELINES[auto_class],
        tags=[*dict.fromkeys(["workbench", method, *(["lora"] if adapter else []), *tags])],
    )
    parts = [
        f"---\n{front.to_yaml()}\n---\n",
        f"# {name}\n",
        f"{description}\n" if description else "",
        _training_text(method, base, data),
        _usage(name, base, adapter, auto_class, num_labels),
        _table("Results", ("metric", "value"), [(k, _number(v)) for k, v in (metrics or {}).items()]),
        _settings(hyperparameters),
        _table("Versions", ("package", "version"), _versions()),
        _citations(papers),
    ]
    return "\n".join(part for part in parts if part)


def _training_text(method: str, base: str | None, datasets: Sequence[str]) -> str:
    text = f"Trained with `{method}`" + (f" from `{base}`" if base else "")
    if datasets:
        text += " on " + ", ".join(f"`{d}`" for d in datasets)
    return text + " by workbench.\n"


def _usage(name: str, base: str | None, adapter: bool, auto_class: str, num_labels: int | None) -> str:
    labels = "" if num_labels is None else f", num_labels={num_labels}"
    if adapter and not _is_hub_id(base):
        load = load_model if num_labels is None else load_classifier
        kind = "" if num_labels is None else f", kind={_KINDS[auto_class]!r}"
        lines = [f"from {load.__module__} import {load.__name__}", "", f"model = {load.__name__}({name!r}{kind}{labels})"]
    elif adapter:
        lines = [
            "from peft import PeftModel",
            f"from transformers import {auto_class}",
            "",
            f"base = {auto_class}.from_pretrained({base!r}{labels})",
            f"model = PeftModel.from_pretrained(base, {name!r})",
        ]
    else:
        lines = [f"from transformers import {auto_class}", "", f"model = {auto_class}.from_pretrained({name!r})"]
    return "\n".join(["## Use\n", "```python", *lines, "```\n"])


def _settings(hyperparameters: Mapping[str, Any] | None) -> str:
    if not hyperparameters:
        return ""
    text = yaml.safe_dump(_printable(plain(hyperparameters)), sort_keys=False, allow_unicode=True).rstrip()
    return f"## Settings\n\n```yaml\n{text}\n```\n"


def _printable(value: Any) -> Any:
    """What YAML can hold: anything else as text, paths without their folders."""
    if isinstance(value, dict):
        return {str(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    if isinstance(value, str) or not (value is None or isinstance(value, bool | int | float)):
        return _public(str(value))
    return value


def _table(title: str, head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return ""
    lines = [f"| {a} | {b} |" for a, b in (head, ("---", "---"), *rows)]
    return "\n".join([f"## {title}\n", *lines, ""])


def _versions() -> list[tuple[str, str]]:
    rows = [("workbench", workbench.__version__), ("python", platform.python_version())]
    for package in _PACKAGES:
        try:
            rows.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return rows


def _citations(papers: Sequence[Paper]) -> str:
    if not papers:
        return ""
    return "## Citation\n\n```bibtex\n" + "\n\n".join(paper.bibtex() for paper in papers) + "\n```\n"


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def _public(name: str | None) -> str | None:
    """Absolute and home paths by their last part: the rest is nobody's business."""
    if name is None or not name.startswith((os.sep, "~")):
        return name
    return os.path.basename(name.rstrip(os.sep))


def _is_hub_id(name: str | None) -> bool:
    return name is not None and not os.path.exists(name) and bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name))
