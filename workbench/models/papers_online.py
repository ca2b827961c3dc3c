"""The papers of online methods, and which of their options stands for which."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """Authors, year, number on arXiv and title."""

    authors: str
    year: int
    arxiv: str
    title: str


PAPERS: dict[str, Entry] = {
    "cispo": Entry(
        "MiniMax and others",
        2025,
        "2506.13585",
        "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention",
    ),
    "dapo": Entry("Qiying Yu and others", 2025, "2503.14476", "DAPO: An Open-Source LLM Reinforcement Learning System at Scale"),
    "deepseek_v32": Entry("DeepSeek-AI", 2025, "2512.02556", "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models"),
    "dr_grpo": Entry("Zichen Liu and others", 2025, "2503.20783", "Understanding R1-Zero-Like Training: A Critical Perspective"),
    "gdpo": Entry(
        "Shih-Yang Liu and others",
        2026,
        "2601.05242",
        "GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization",
    ),
    "gmpo": Entry("Yuzhong Zhao and others", 2025, "2507.20673", "Geometric-Mean Policy Optimization"),
    "gspo": Entry("Chujie Zheng and others", 2025, "2507.18071", "Group Sequence Policy Optimization"),
    "high_entropy": Entry(
        "Shenzhi Wang and others",
        2025,
        "2506.01939",
        "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement Learning for LLM Reasoning",
    ),
    "icepop": Entry(
        "Ling Team", 2025, "2510.18855", "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model"
    ),
    "intellect_2": Entry(
        "Prime Intellect Team",
        2025,
        "2505.07291",
        "INTELLECT-2: A Reasoning Model Trained Through Globally Decentralized Reinforcement Learning",
    ),
    "lite_ppo": Entry(
        "Zihe Liu and others", 2025, "2508.08221", "Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning"
    ),
    "long_cot": Entry("Edward Yeo and others", 2025, "2502.03373", "Demystifying Long Chain-of-Thought Reasoning in LLMs"),
    "luspo": Entry(
        "Fanfan Liu and others",
        2026,
        "2602.05261",
        "Length-Unbiased Sequence Policy Optimization: Revealing and Controlling Response Length Variation in RLVR",
    ),
    "reinforce_pp": Entry(
        "Jian Hu and others",
        2025,
        "2501.03262",
        "REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models",
    ),
    "sapo": Entry("Chang Gao and others", 2025, "2511.20347", "Soft Adaptive Policy Optimization"),
    "scalerl": Entry(
        "Devvrit Khatri and others", 2025, "2510.13786", "The Art of Scaling Reinforcement Learning Compute for LLMs"
    ),
    "skywork_or1": Entry("Jujie He and others", 2025, "2505.22312", "Skywork Open Reasoner 1 Technical Report"),
    "two_grpo": Entry("Yihong Wu and others", 2025, "2510.00977", "It Takes Two: Your GRPO Is Secretly DPO"),
    "vespo": Entry(
        "Guobin Shen and others",
        2026,
        "2602.10693",
        "VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM Training",
    ),
}
LOSSES = ("dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")


def used(method: Mapping[str, Any]) -> Iterator[str]:
    """Keys of `PAPERS` that the options of an online method stand for."""
    if "num_generations" not in method:
        return
    loss, sequence = method.get("loss"), method.get("importance_sampling_level") == "sequence"
    restricted = method.get("top_k") is not None or method.get("top_p", 1) < 1 or bool(method.get("min_p"))
    unbiased = bool(method.get("beta")) and bool(method.get("use_bias_correction_kl"))
    found = {
        **{name: loss == name for name in LOSSES},
        "gspo": sequence and loss != "luspo",
        "scalerl": loss == "cispo" and bool(method.get("cast_lm_head_to_fp32")),
        "two_grpo": loss is not None and method["num_generations"] == 2,
        "intellect_2": method.get("delta") is not None,
        "skywork_or1": bool(method.get("use_adaptive_entropy")),
        "high_entropy": method.get("top_entropy_quantile", 1) < 1,
        "lite_ppo": method.get("scale_rewards") == "batch",
        "gdpo": method.get("multi_objective_aggregation") == "normalize_then_sum",
        "icepop": method.get("importance_sampling_clip_min") is not None,
        "deepseek_v32": method.get("off_policy_mask_threshold") is not None or unbiased or restricted,
        "long_cot": any("CosineScaled" in str(reward) for reward in _listed(method.get("rewards"))),
        "reinforce_pp": bool(method.get("normalize_advantages")),
    }
    yield from (key for key, is_used in found.items() if is_used and key in PAPERS)


def _listed(rewards: Any) -> list[Any]:
    return list(rewards) if isinstance(rewards, list | tuple) else [rewards]
