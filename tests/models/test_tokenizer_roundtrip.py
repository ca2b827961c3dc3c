"""A saved nano tokenizer gives the same ids beside every family's config."""

import pytest

from workbench.models.save import save_pretrained
from workbench.models.tokenizer import load_tokenizer
from workbench.tiny import tiny_model, tiny_tokenizer

TEXT = "12+34= user assistant?\n<think>x</think>  two  spaces"


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gpt2", "gemma2"])
def test_ids_survive(tmp_path, architecture):
    tokenizer = tiny_tokenizer()
    save_pretrained(tiny_model(architecture, size="pico"), tokenizer, tmp_path / "model")
    again = load_tokenizer(str(tmp_path / "model"))
    assert again(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert again.chat_template == tokenizer.chat_template
    assert (again.eos_token_id, again.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
