"""The README.md of a saved model: what it is, how it was trained, how to load it, and whom to cite."""

import importlib.metadata
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from huggingface_hub import ModelCardData

import workbench
from workbench.models.load import load_model, plain

_PACKAGES = ("torch", "lightning", "transformers", "datasets", "peft")


@dataclass(frozen=True)
class Paper:
    """A paper on arXiv, as a citation needs it.

    Args:
        authors: ``First Last and others``.
        year: of the first version.
        arxiv: number, such as ``2305.18290``.
        title: as printed.
    """

    authors: str
    year: int
    arxiv: str
    title: str

    def bibtex(self) -> str:
        """The entry as BibTeX."""
        key = re.sub(r"\W", "", self.authors.split(" and ")[0].split()[-1]).lower() + str(self.year)
        fields = {"title": self.title, "author": self.authors, "year": self.year, "eprint": self.arxiv}
        lines = [f"  {name} = {{{value}}}," for name, value in fields.items()]
        return "\n".join([f"@misc{{{key},", *lines, "  archivePrefix = {arXiv},", "}"])


PAPERS: dict[str, Paper] = {
    "bco": Paper(
        "Seungjae Jung and others",
        2024,
        "2404.04656",
        "Binary Classifier Optimization for Large Language Model Alignment",
    ),
    "cpo": Paper(
        "Haoran Xu and others",
        2024,
        "2401.08417",
        "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine Translation",
    ),
    "dft": Paper(
        "Yongliang Wu and others",
        2025,
        "2508.05629",
        "On the Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification",
    ),
    "dpo": Paper(
        "Rafael Rafailov and Archit Sharma and Eric Mitchell and Stefano Ermon and Christopher D. Manning and Chelsea Finn",
        2023,
        "2305.18290",
        "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
    ),
    "gkd": Paper(
        "Rishabh Agarwal and others",
        2023,
        "2306.13649",
        "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
    ),
    "grpo": Paper(
        "Zhihong Shao and others",
        2024,
        "2402.03300",
        "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    ),
    "kto": Paper(
        "Kawin Ethayarajh and Winnie Xu and Niklas Muennighoff and Dan Jurafsky and Douwe Kiela",
        2024,
        "2402.01306",
        "KTO: Model Alignment as Prospect Theoretic Optimization",
    ),
    "minillm": Paper(
        "Yuxian Gu and Li Dong and Furu Wei and Minlie Huang",
        2023,
        "2306.08543",
        "MiniLLM: Knowledge Distillation of Large Language Models",
    ),
    "nash_md": Paper("Rémi Munos and others", 2023, "2312.00886", "Nash Learning from Human Feedback"),
    "online_dpo": Paper("Shangmin Guo and others", 2024, "2402.04792", "Direct Language Model Alignment from Online AI Feedback"),
    "orpo": Paper(
        "Jiwoo Hong and Noah Lee and James Thorne",
        2024,
        "2403.07691",
        "ORPO: Monolithic Preference Optimization without Reference Model",
    ),
    "ppo": Paper(
        "John Schulman and Filip Wolski and Prafulla Dhariwal and Alec Radford and Oleg Klimov",
        2017,
        "1707.06347",
        "Proximal Policy Optimization Algorithms",
    ),
    "prm": Paper(
        "Jonathan Uesato and others",
        2022,
        "2211.14275",
        "Solving math word problems with process- and outcome-based feedback",
    ),
    "reward": Paper("Nisan Stiennon and others", 2020, "2009.01325", "Learning to summarize from human feedback"),
    "rloo": Paper(
        "Arash Ahmadian and others",
        2024,
        "2402.14740",
        "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
    ),
    "xpo": Paper(
        "Tengyang Xie and others",
        2024,
        "2405.21046",
        "Exploratory Preference Optimization: Harnessing Implicit Q*-Approximation for Sample-Efficient RLHF",
    ),
}


def model_card(
    *,
    name: str,
    method: str,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    hyperparameters: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    adapter: bool = False,
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
        method: as in ``conf/method``; chooses the paper from `PAPERS`.
        base_model: hub id, or whatever it was loaded from.
        datasets: hub ids, or file names.
        hyperparameters: the settings of the run, nested or flat.
        metrics: final values by name.
        adapter: whether the directory holds an adapter rather than a whole model.
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
        pipeline_tag="text-generation",
        tags=[*dict.fromkeys(["workbench", method, *(["lora"] if adapter else []), *tags])],
    )
    parts = [
        f"---\n{front.to_yaml()}\n---\n",
        f"# {name}\n",
        f"{description}\n" if description else "",
        _training_text(method, base, data),
        _usage(name, base, adapter),
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


def _usage(name: str, base: str | None, adapter: bool) -> str:
    if adapter and not _is_hub_id(base):
        lines = [f"from {load_model.__module__} import load_model", "", f"model = load_model({name!r})"]
    elif adapter:
        lines = [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM",
            "",
            f"base = AutoModelForCausalLM.from_pretrained({base!r})",
            f"model = PeftModel.from_pretrained(base, {name!r})",
        ]
    else:
        lines = [
            "from transformers import AutoModelForCausalLM",
            "",
            f"model = AutoModelForCausalLM.from_pretrained({name!r})",
        ]
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
