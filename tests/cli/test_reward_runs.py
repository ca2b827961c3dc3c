"""A reward model from the command line: what the run leaves, says and goes on with."""

import json

import pytest
import torch
from test_train import SMALL, here  # noqa: F401  runs go into a fresh working folder
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

import workbench
from workbench.cli import main
from workbench.models.heads import classification_head, load_classifier
from workbench.run import read

KINDS = {
    "reward": (AutoModelForSequenceClassification, "sequence", 1, "text-classification"),
    "prm": (AutoModelForTokenClassification, "token", 2, "token-classification"),
}


@pytest.mark.parametrize("method", KINDS)
def test_a_run_leaves_what_it_says(method, capsys):
    auto_class, kind, labels, pipeline = KINDS[method]
    run = workbench.train(f"method={method}", *SMALL)
    out = capsys.readouterr().out
    assert f"({auto_class.__name__}.from_pretrained)" in out
    assert "workbench generate" not in out and "workbench evaluate run=" in out
    card = (run.dir / "model/README.md").read_text()
    assert f"pipeline_tag: {pipeline}" in card and f"{auto_class.__name__}.from_pretrained(" in card
    saved = auto_class.from_pretrained(run.dir / "model")
    trained = classification_head(run.model).weight
    assert saved.config.num_labels == labels and torch.equal(saved.score.weight, trained)
    assert torch.equal(classification_head(read(run.dir).model).weight, trained), "also where another process trained it"

    assert main(["evaluate", f"run={run.dir}", "output=measures.json"]) == 0
    with open("measures.json") as file:
        measures = json.load(file)["metrics"]
    assert measures["val/loss"] == pytest.approx(run.metrics["val/loss"], rel=1e-5)
    assert measures["val/accuracy"] == pytest.approx(run.metrics["val/accuracy"])
    capsys.readouterr()
    assert main(["generate", f"run={run.dir}", "prompt=1+1="]) == 2
    assert "is a classifier" in capsys.readouterr().err
    assert load_classifier(str(run.dir / "model"), kind=kind, num_labels=labels).config.num_labels == labels


def test_an_adapters_card_says_how_to_load_it():
    run = workbench.train("method=reward", "peft=lora", *SMALL, "trainer.max_steps=1")
    card = (run.dir / "model/README.md").read_text()
    assert "from workbench.models.heads import load_classifier" in card
    assert ", kind='sequence', num_labels=1)" in card


def test_inspect_counts_the_head_that_is_trained(capsys):
    """A head of one row, no logits, and where the score is read."""
    assert main(["inspect", "method=reward", *SMALL, "rows=0"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "score read at the last token of each answer" in out
    assert "logits 0 B" in out
