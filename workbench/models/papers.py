"""Whom to cite: the papers of methods, losses and options, and which of them a configuration uses."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.models import papers_online


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
    "alphapo": Paper("Aman Gupta and others", 2025, "2501.03884", "AlphaPO: Reward Shape Matters for LLM Alignment"),
    "aot": Paper(
        "Igor Melnyk and others", 2024, "2406.05882", "Distributional Preference Alignment of LLMs via Optimal Transport"
    ),
    "apo": Paper(
        "Karel D'Oosterlinck and others",
        2024,
        "2408.06266",
        "Anchored Preference Optimization and Contrastive Revisions: Addressing Underspecification in Alignment",
    ),
    "bco": Paper(
        "Seungjae Jung and others", 2024, "2404.04656", "Binary Classifier Optimization for Large Language Model Alignment"
    ),
    "bema": Paper(
        "Adam Block and Cyril Zhang", 2025, "2508.00180", "EMA Without the Lag: Bias-Corrected Iterate Averaging Schemes"
    ),
    "centring": Paper(
        "Jacob Eisenstein and others",
        2023,
        "2312.09244",
        "Helping or Herding? Reward Model Ensembles Mitigate but do not Eliminate Reward Hacking",
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
    "discopop": Paper(
        "Chris Lu and others",
        2024,
        "2406.08414",
        "Discovering Preference Optimization Algorithms with and for Large Language Models",
    ),
    "dora": Paper("Shih-Yang Liu and others", 2024, "2402.09353", "DoRA: Weight-Decomposed Low-Rank Adaptation"),
    "dpo": Paper(
        "Rafael Rafailov and Archit Sharma and Eric Mitchell and Stefano Ermon and Christopher D. Manning and Chelsea Finn",
        2023,
        "2305.18290",
        "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
    ),
    "exo": Paper(
        "Haozhe Ji and others", 2024, "2402.00856", "Towards Efficient and Exact Optimization of Language Model Alignment"
    ),
    "f_dpo": Paper(
        "Chaoqi Wang and others",
        2023,
        "2309.16240",
        "Beyond Reverse KL: Generalizing Direct Preference Optimization with Diverse Divergence Constraints",
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
    "ipo": Paper(
        "Mohammad Gheshlaghi Azar and others",
        2023,
        "2310.12036",
        "A General Theoretical Paradigm to Understand Learning from Human Preferences",
    ),
    "irpo": Paper("Richard Yuanzhe Pang and others", 2024, "2404.19733", "Iterative Reasoning Preference Optimization"),
    "kto": Paper(
        "Kawin Ethayarajh and Winnie Xu and Niklas Muennighoff and Dan Jurafsky and Douwe Kiela",
        2024,
        "2402.01306",
        "KTO: Model Alignment as Prospect Theoretic Optimization",
    ),
    "ld_dpo": Paper("Wei Liu and others", 2024, "2409.06411", "Length Desensitization in Direct Preference Optimization"),
    "llama2": Paper("Hugo Touvron and others", 2023, "2307.09288", "Llama 2: Open Foundation and Fine-Tuned Chat Models"),
    "lora": Paper("Edward J. Hu and others", 2021, "2106.09685", "LoRA: Low-Rank Adaptation of Large Language Models"),
    "minillm": Paper(
        "Yuxian Gu and Li Dong and Furu Wei and Minlie Huang",
        2023,
        "2306.08543",
        "MiniLLM: Knowledge Distillation of Large Language Models",
    ),
    "mpo": Paper(
        "Weiyun Wang and others",
        2024,
        "2411.10442",
        "Enhancing the Reasoning Ability of Multimodal Large Language Models via Mixed Preference Optimization",
    ),
    "nash_md": Paper("Rémi Munos and others", 2023, "2312.00886", "Nash Learning from Human Feedback"),
    "nca": Paper(
        "Huayu Chen and others", 2024, "2402.05369", "Noise Contrastive Alignment of Language Models with Explicit Rewards"
    ),
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
        "Jonathan Uesato and others", 2022, "2211.14275", "Solving math word problems with process- and outcome-based feedback"
    ),
    "reward": Paper("Nisan Stiennon and others", 2020, "2009.01325", "Learning to summarize from human feedback"),
    "rloo": Paper(
        "Arash Ahmadian and others",
        2024,
        "2402.14740",
        "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
    ),
    "robust_dpo": Paper(
        "Sayak Ray Chowdhury and Anush Kini and Nagarajan Natarajan",
        2024,
        "2403.00409",
        "Provably Robust DPO: Aligning Language Models with Noisy Feedback",
    ),
    "rpo": Paper(
        "Zhihan Liu and others",
        2024,
        "2405.16436",
        "Provably Mitigating Overoptimization in RLHF: Your SFT Loss is Implicitly an Adversarial Regularizer",
    ),
    "rso": Paper("Tianqi Liu and others", 2023, "2309.06657", "Statistical Rejection Sampling Improves Preference Optimization"),
    "simpo": Paper(
        "Yu Meng and Mengzhou Xia and Danqi Chen",
        2024,
        "2405.14734",
        "SimPO: Simple Preference Optimization with a Reference-Free Reward",
    ),
    "slic_hf": Paper("Yao Zhao and others", 2023, "2305.10425", "SLiC-HF: Sequence Likelihood Calibration with Human Feedback"),
    "sppo": Paper("Yue Wu and others", 2024, "2405.00675", "Self-Play Preference Optimization for Language Model Alignment"),
    "tpo": Paper(
        "Amir Saeidi and others",
        2024,
        "2405.16681",
        "Triple Preference Optimization: Achieving Better Alignment using a Single Step Optimization",
    ),
    "tr_dpo": Paper("Alexey Gorbatovski and others", 2024, "2404.09656", "Learn Your Reference Model for Real Good Alignment"),
    "tulu3": Paper(
        "Nathan Lambert and others", 2024, "2411.15124", "Tulu 3: Pushing Frontiers in Open Language Model Post-Training"
    ),
    "wpo": Paper("Wenxuan Zhou and others", 2024, "2406.11827", "WPO: Enhancing RLHF with Weighted Preference Optimization"),
    "xpo": Paper(
        "Tengyang Xie and others",
        2024,
        "2405.21046",
        "Exploratory Preference Optimization: Harnessing Implicit Q*-Approximation for Sample-Efficient RLHF",
    ),
}


_OF_LOSS: dict[str, tuple[str, ...]] = {
    "dft": ("dft",),
    "hinge": ("slic_hf", "rso"),
    "ipo": ("ipo",),
    "exo_pair": ("exo",),
    "nca_pair": ("nca",),
    "robust": ("robust_dpo",),
    "bco_pair": ("bco",),
    "sppo_hard": ("sppo",),
    "aot": ("aot",),
    "aot_unpaired": ("aot",),
    "discopop": ("discopop",),
    "apo_zero": ("apo",),
    "apo_down": ("apo",),
    "apo_zero_unpaired": ("apo",),
    "sigmoid_norm": ("tulu3", "simpo"),
    "simpo": ("simpo",),
    "alphapo": ("alphapo", "simpo"),
}
# Losses that are a method only together.
_OF_LOSSES: dict[frozenset[str], tuple[str, ...]] = {
    frozenset({"sigmoid", "sft"}): ("rpo", "irpo"),
    frozenset({"sigmoid", "bco_pair", "sft"}): ("mpo",),
}


def papers_of(config: Mapping[str, Any]) -> list[Paper]:
    """The papers behind a run's method, losses and options, each once, the method's own first.

    Args:
        config: a plain configuration.
    """
    known = PAPERS | {key: Paper(*entry) for key, entry in papers_online.PAPERS.items()}
    return [known[key] for key in dict.fromkeys(_keys(config)) if key in known]


def _keys(config: Mapping[str, Any]) -> Iterator[str]:
    method = config["method"]
    losses = method.get("loss") or []
    losses = [losses] if isinstance(losses, str) else list(losses)
    if losses[:1] not in (["simpo"], ["alphapo"]) or method.get("cpo_alpha"):
        yield method["_target_"].rsplit(".", 1)[-1].lower()
    yield from _OF_LOSSES.get(frozenset(losses), ())
    for loss in losses:
        yield from _OF_LOSS.get(loss, ())
    options = {
        "f_dpo": method.get("divergence", "reverse_kl") != "reverse_kl",
        "ld_dpo": method.get("ld_alpha") is not None,
        "wpo": bool(method.get("use_weighting")),
        "tr_dpo": bool(method.get("sync_ref_model")),
        "alphapo": bool(method.get("alpha")),
        "centring": bool(method.get("center_rewards_coefficient")),
        "lora": bool(config.get("peft")),
        "dora": bool((config.get("peft") or {}).get("use_dora")),
        "bema": any("BEMA" in (node or {}).get("_target_", "") for node in (config.get("callbacks") or {}).values()),
    }
    yield from (key for key, is_used in options.items() if is_used)
    yield from papers_online.used(method)
