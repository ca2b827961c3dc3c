import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from workbench.errors import UserError
from workbench.tiny.model import ARCHITECTURES, local_seed, tiny_config, tiny_model
from workbench.tiny.tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
IDS = torch.tensor([TOKENIZER("<|im_start|>user\nThe quick brown fox jumps over 13 dogs.<|im_end|>\n").input_ids])


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_parameter_counts():
    vocabulary, width, layers, hidden = 109, 128, 3, 384
    attention = width * width * 2 + width * width // 2 * 2
    expected = 2 * vocabulary * width + width + layers * (attention + 3 * width * hidden + 2 * width)
    assert sum(p.numel() for p in tiny_model().parameters()) == expected == 618_624
    assert sum(p.numel() for p in tiny_model(size="pico").parameters()) == 112_576


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architecture_trains_every_parameter_and_depends_on_its_seed(architecture):
    model = tiny_model(architecture, size="pico")
    assert model.training and all(p.dtype == torch.float32 for p in model.parameters())
    output = model(input_ids=IDS, labels=IDS)
    output.loss.backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert still == []
    assert abs(output.loss.item() - np.log(len(TOKENIZER))) < 0.5, "a random model is close to uniform"
    torch.testing.assert_close(logits(tiny_model(architecture, size="pico")), output.logits, rtol=0, atol=0)
    assert (logits(tiny_model(architecture, size="pico", seed=1)) - output.logits).abs().max() > 0.1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architecture_is_causal_and_has_no_dropout(architecture):
    model = tiny_model(architecture, size="pico")
    changed = IDS.clone()
    changed[0, 30] = 50
    before, after = logits(model), logits(model, changed)
    torch.testing.assert_close(before[:, :30], after[:, :30], rtol=0, atol=1e-5)
    assert (before[:, 30] - after[:, 30]).abs().max() > 1e-2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_saved_model_is_the_same(architecture, tmp_path):
    model = tiny_model(architecture, size="pico")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-6)
    assert type(loaded) is type(model)
    assert (loaded.generation_config.eos_token_id, loaded.generation_config.pad_token_id) == (3, 0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_token_ids_are_the_tokenizers(architecture):
    model = tiny_model(architecture, size="pico")
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, None, 3)
    assert model.get_input_embeddings().weight.shape[0] == len(TOKENIZER)


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a not in ("mamba", "gpt_neox", "bloom")])
def test_heads_are_32_wide(architecture):
    for size in ("nano", "pico"):
        config = tiny_config(architecture, size=size)
        assert (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) == 32


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3_text", "gpt_oss"])
def test_window_binds_on_short_rows(architecture):
    wide = tiny_model(architecture, size="pico", sliding_window=512)
    difference = (logits(tiny_model(architecture, size="pico")) - logits(wide)).abs()[0].amax(-1)
    assert difference[:16].max() < 1e-5 and difference[17:].min() > 1e-4


@pytest.mark.parametrize(
    ("architecture", "plain"),
    [
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("granite", {"embedding_multiplier": 1.0}),
        ("granite", {"attention_multiplier": 1.0}),
        ("granite", {"residual_multiplier": 1.0}),
        ("granite", {"logits_scaling": 1.0}),
        ("cohere", {"logit_scale": 1.0}),
        ("cohere", {"use_qk_norm": False}),
        ("falcon", {"alibi": False}),
        ("smollm3", {"no_rope_layers": [1, 1]}),
        ("qwen3_moe", {"num_experts_per_tok": 1}),
        ("mixtral", {"num_experts_per_tok": 1}),
    ],
)
def test_feature_binds(architecture, plain):
    difference = logits(tiny_model(architecture, size="pico")) - logits(tiny_model(architecture, size="pico", **plain))
    assert difference.abs().max() > 1e-4


def test_building_leaves_random_state_alone():
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    before = states()
    for architecture in ("llama", "gpt2", "qwen3_moe"):
        tiny_model(architecture, size="pico", seed=5)
    assert states() == before


def test_weights_do_not_depend_on_random_state_or_default_device():
    torch.manual_seed(1)
    first = logits(tiny_model(size="pico"))
    torch.manual_seed(2)
    with torch.device("meta"):
        model = tiny_model(size="pico")
    torch.testing.assert_close(logits(model), first, rtol=0, atol=0)


def test_local_seed_restores_the_state_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), local_seed(3):
        torch.rand(1)
        raise RuntimeError
    assert torch.equal(torch.get_rng_state(), before)


def test_overrides_reach_the_model():
    model = tiny_model("gpt2", num_hidden_layers=1, hidden_size=32, num_attention_heads=1, vocab_size=130, seed=2)
    assert len(model.transformer.h) == 1 and model.transformer.wte.weight.shape == (130, 32)
    tied = tiny_model(size="pico", tie_word_embeddings=True)
    assert tied.lm_head.weight is tied.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"architecture": "lama"}, "Did you mean 'llama'"),
        ({"size": "mini"}, "Allowed: nano, pico"),
        ({"hiden_size": 64}, "'hiden_size' is not a config key of llama. Did you mean 'hidden_size'"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        tiny_model(**arguments)
