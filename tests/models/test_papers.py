"""Which papers a configuration cites."""

import re

import pytest

from workbench.cli import check, config
from workbench.models.card import model_card
from workbench.models.papers import PAPERS, papers_of

TINY = ["model=tiny", "data=tiny"]


def cited(*typed: str) -> list[str]:
    return [paper.arxiv for paper in papers_of(check.to_plain(config.load([*typed]).cfg))]


@pytest.mark.parametrize(
    ("typed", "numbers"),
    [
        ([], []),
        (["method.loss=dft"], ["2508.05629"]),
        (["method=dpo"], ["2305.18290"]),
        (["method=dpo", "method.loss=hinge"], ["2305.18290", "2305.10425", "2309.06657"]),
        (["method=dpo", "method.loss=[sigmoid,sft]"], ["2305.18290", "2405.16436", "2404.19733"]),
        (["method=dpo", "method.loss=[aot,aot_unpaired]"], ["2305.18290", "2406.05882"]),
        (
            ["method=dpo", "method.divergence=js_divergence", "peft=dora"],
            ["2305.18290", "2309.16240", "2106.09685", "2402.09353"],
        ),
        (["method=simpo"], ["2405.14734"]),
        (["method=simpo", "method.cpo_alpha=1.0"], ["2401.08417", "2405.14734"]),
        (["method=cpo"], ["2401.08417"]),
        (["method=kto", "method.loss=apo_zero_unpaired"], ["2402.01306", "2408.06266"]),
        (["callbacks=bema"], ["2508.00180"]),
        (["method=grpo"], ["2402.03300", "2503.14476"]),
        (["method=grpo", "method.loss=luspo", "method.importance_sampling_level=sequence"], ["2402.03300", "2602.05261"]),
        (["method=rloo", "method.normalize_advantages=true"], ["2402.14740", "2501.03262"]),
    ],
    ids=lambda v: " ".join(v) if v and not v[0][:1].isdigit() else "",
)
def test_method_losses_and_options(typed, numbers):
    assert cited(*typed) == numbers


PAPER_OF = re.compile(r"arXiv:(\d{4}\.\d{5})")
RECIPES = sorted((config.config_dir() / "experiment").glob("*.yaml"))
NOT_IN_THE_CONFIGURATION = {  # what they bring is no option of the method
    "f_dpo_reverse_kl",  # is DPO
    "fewer_truncations",
    "t5_packing",
    "selective_checkpointing",
    "llama2_margin",  # a column of the rows
    "deepseek_r1",  # is GRPO
}


@pytest.mark.parametrize("file", RECIPES, ids=lambda f: f.stem)
def test_a_model_cites_the_paper_of_its_experiment(file):
    named = PAPER_OF.findall("\n".join(line for line in file.read_text().splitlines() if line.startswith("#")))
    if named and file.stem not in NOT_IN_THE_CONFIGURATION:
        assert named[0] in cited(f"experiment={file.stem}", *TINY)


def test_every_paper_has_a_number_of_its_own_and_a_card_prints_it():
    numbers = [paper.arxiv for paper in PAPERS.values()]
    assert len(set(numbers)) == len(numbers)
    text = model_card(name="x", method="dpo", papers=papers_of({"method": {"_target_": "a.DPO", "loss": "exo_pair"}}))
    assert "2402.00856" in text and "Haozhe Ji" in text and "2305.18290" in text
