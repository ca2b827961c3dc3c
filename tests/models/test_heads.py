"""Classifiers: a head drawn under its own seed on a backbone that is the language model's."""

import subprocess
import sys

import pytest
import torch

from workbench.errors import UserError
from workbench.models.heads import classification_head, load_classifier
from workbench.models.load import ModelSpec, load_model, record_of
from workbench.models.peft import PeftSpec, apply_peft
from workbench.models.save import save_pretrained
from workbench.tiny.tokenizer import tiny_tokenizer

IDS = torch.arange(4, 20)[None]
# The last two have no classifier of either kind in transformers.
ARCHITECTURES = ("llama", "gpt2", "gemma3_text", "gpt_neox", "mixtral", "granite", "cohere")
KINDS = ("sequence", "token")


def spec(architecture="llama", **fields):
    return ModelSpec(f"tiny:{architecture}", init_kwargs={"size": "pico"}, **fields)


def outputs(model):
    with torch.no_grad():
        return model(IDS).logits


def head_weight(model):
    return classification_head(model).weight.detach().clone()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_come_from_the_language_models_hidden_states(architecture, kind):
    model = load_classifier(spec(architecture), kind=kind, num_labels=2, seed=3)
    with torch.no_grad():
        hidden = load_model(spec(architecture)).base_model(IDS).last_hidden_state
        expected = classification_head(model)(hidden)
    assert torch.equal(outputs(model), expected if kind == "token" else expected[:, -1])
    assert model.config.num_labels == 2 and not model.training
    assert type(model).__name__.endswith(f"For{kind.capitalize()}Classification")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "granite", "gemma3_text"])
def test_every_source_gives_the_same(architecture, kind, tmp_path):
    """By name, from a saved language model, from an object, and from the saved classifier itself."""
    expected = outputs(load_classifier(spec(architecture), kind=kind, seed=3))
    language_model = load_model(spec(architecture))
    save_pretrained(language_model, None, tmp_path / "lm")
    from_directory = load_classifier(str(tmp_path / "lm"), kind=kind, seed=3)
    assert torch.equal(outputs(from_directory), expected)
    assert torch.equal(outputs(load_classifier(language_model, kind=kind, seed=3)), expected)
    save_pretrained(from_directory, tiny_tokenizer(), tmp_path / "classifier")
    again = load_classifier(str(tmp_path / "classifier"), kind=kind, seed=99)
    assert torch.equal(outputs(again), expected)


class TestHead:
    def test_follows_its_seed_alone(self):
        def draw(seed, outside):
            torch.manual_seed(outside)
            weight = head_weight(load_classifier(spec(), seed=seed))
            return weight, torch.get_rng_state()

        first, state = draw(0, outside=1)
        again, _ = draw(0, outside=2)
        other, _ = draw(1, outside=1)
        torch.manual_seed(1)
        assert torch.equal(first, again) and not torch.equal(first, other)
        assert torch.equal(state, torch.get_rng_state())

    def test_is_the_same_in_another_process(self):
        code = (
            "from workbench.models.heads import *\nfrom workbench.models.load import ModelSpec\n"
            "m = load_classifier(ModelSpec('tiny', init_kwargs={'size': 'pico'}, init_seed=7))\n"
            "print(classification_head(m).weight.double().sum().item())"
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        here = head_weight(load_classifier(spec(init_seed=7))).double().sum().item()
        assert float(out.strip().splitlines()[-1]) == here

    def test_spec_seed_is_the_default(self):
        assert torch.equal(head_weight(load_classifier(spec(init_seed=7))), head_weight(load_classifier(spec(), seed=7)))

    def test_dtype_only_rounds_it(self):
        exact = head_weight(load_classifier(spec(), seed=3))
        assert torch.equal(head_weight(load_classifier(spec(dtype="bfloat16"), seed=3)), exact.bfloat16())

    def test_scale_is_the_configs(self):
        weight = head_weight(load_classifier(spec(), num_labels=200, seed=0))
        assert weight.std().item() == pytest.approx(0.05, rel=0.02)  # initializer_range of the nano models
        assert abs(weight.mean().item()) < 0.002

    def test_bias_starts_at_zero(self):
        head = classification_head(load_classifier(spec(), kind="token", num_labels=3))
        assert head.bias.tolist() == [0, 0, 0]

    def test_trained_head_is_kept(self, tmp_path):
        model = load_classifier(spec(), seed=3)
        classification_head(model).weight.data.fill_(0.25)
        save_pretrained(model, tiny_tokenizer(), tmp_path)
        assert (head_weight(load_classifier(str(tmp_path), seed=4)) == 0.25).all()

    def test_receives_gradients(self):
        model = load_classifier(spec()).train()
        model(IDS).logits.sum().backward()
        assert classification_head(model).weight.grad.abs().sum() > 0
        assert model.base_model.embed_tokens.weight.grad.abs().sum() > 0


def test_object_lends_its_backbone():
    language_model = load_model(spec())
    model = load_classifier(language_model)
    assert model.base_model is language_model.base_model
    assert record_of(model).spec.name == "tiny:llama"
    assert load_classifier(model) is model


def test_adapter_trains_and_saves_the_head(tmp_path):
    model = apply_peft(load_classifier(spec(), seed=3), PeftSpec(r=2))
    assert any("score" in name for name, p in model.named_parameters() if p.requires_grad)
    for parameter in model.parameters():
        parameter.data += 0.02 * parameter.requires_grad
    save_pretrained(model, tiny_tokenizer(), tmp_path, merge=True)
    again = load_classifier(str(tmp_path), seed=8)
    assert torch.equal(outputs(again), outputs(model))
    merged = load_classifier(str(tmp_path / "merged"), seed=8)
    torch.testing.assert_close(outputs(merged), outputs(model), rtol=1e-4, atol=1e-5)


def test_random_init():
    first = load_classifier(spec(init="random", init_seed=4))
    assert torch.equal(outputs(first), outputs(load_classifier(spec(init="random", init_seed=4))))


class TestMistakes:
    def test_number_of_labels(self, tmp_path):
        model = load_classifier(spec(), num_labels=2)
        save_pretrained(model, tiny_tokenizer(), tmp_path)
        with pytest.raises(UserError, match=r"score\.weight is \[2, 64\] in the file and \[1, 64\] by the config"):
            load_classifier(str(tmp_path))
        with pytest.raises(UserError, match="the classifier given has 2"):
            load_classifier(model, num_labels=1)

    def test_no_classifier(self):
        with pytest.raises(UserError, match="LlamaForCausalLM has no classification head"):
            classification_head(load_model(spec()))

    def test_kind(self):
        with pytest.raises(UserError, match="Did you mean 'sequence'"):
            load_classifier(spec(), kind="sequenc")

    def test_missing_backbone_weights_are_still_an_error(self, tmp_path):
        from safetensors.torch import load_file, save_file

        save_pretrained(load_model(spec()), None, tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        weights.pop("model.layers.1.mlp.up_proj.weight")
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=r"lacks 1 weight .*up_proj"):
            load_classifier(str(tmp_path))
