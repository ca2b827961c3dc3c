"""Saving: what others load, whole or not at all, with the base model's settings and not the run's."""

import json
import resource
import signal
import types

import httpx
import peft
import pytest
import torch
import yaml
from huggingface_hub import errors
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import workbench.models.save as saving
from workbench.errors import UserError
from workbench.models.card import model_card
from workbench.models.heads import load_classifier
from workbench.models.load import ModelSpec, base_spec, load_model
from workbench.models.papers import PAPERS
from workbench.models.peft import PeftSpec, apply_peft, copy_adapter
from workbench.models.save import atomic_directory, merged_state_dict, push_to_hub, save_pretrained
from workbench.models.tokenizer import load_tokenizer
from workbench.tiny.tokenizer import tiny_tokenizer

IDS = torch.arange(4, 20)[None]


def base(architecture="llama", dtype="float32", seed=0, **config):
    config = {"size": "pico"} | config
    return load_model(ModelSpec(f"tiny:{architecture}", dtype=dtype, init_seed=seed, init_kwargs=config))


def adapted(architecture="llama", config=None, seed=0, **spec):
    """A model with an adapter that has been trained, or nearly."""
    model = apply_peft(base(architecture, seed=seed, **(config or {})), PeftSpec(**{"r": 4} | spec))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def read(path):
    return json.loads(path.read_text())


def snapshot(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def message(call):
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestFull:
    @pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "mixtral", "gemma2"])
    def test_loads_with_transformers(self, architecture, tmp_path):
        model = base(architecture)
        save_pretrained(model, tiny_tokenizer(), tmp_path / "out")
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))

    def test_tokenizer_and_template(self, tmp_path):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = "{{ messages[0].content }}"
        save_pretrained(base(), tokenizer, tmp_path / "out")
        again = AutoTokenizer.from_pretrained(tmp_path / "out")
        assert again.chat_template == tokenizer.chat_template
        assert again("2+3=5<|im_end|>").input_ids == tokenizer("2+3=5<|im_end|>").input_ids

    def test_tied_head_is_written_once(self, tmp_path):
        model = base(tie_word_embeddings=True)
        gathered = {name: value.clone() for name, value in model.state_dict().items()}
        for number, state in enumerate((None, gathered)):
            save_pretrained(model, None, tmp_path / str(number), state_dict=state)
            assert "lm_head.weight" not in load_file(tmp_path / str(number) / "model.safetensors")
            assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / str(number))), logits(model))

    def test_untied_head_is_written(self, tmp_path):
        save_pretrained(base(tie_word_embeddings=False), None, tmp_path / "out")
        assert "lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")

    def test_state_dict_takes_the_place_of_the_models_own(self, tmp_path):
        model, other = base(), base(seed=1)
        save_pretrained(model, None, tmp_path / "out", state_dict=other.state_dict())
        assert torch.equal(logits(load_model(str(tmp_path / "out"))), logits(other))

    def test_dtype_is_recorded(self, tmp_path):
        save_pretrained(base(dtype="bfloat16"), None, tmp_path / "own")
        save_pretrained(base(), None, tmp_path / "cast", dtype="bfloat16")
        for name in ("own", "cast"):
            assert read(tmp_path / name / "config.json")["dtype"] == "bfloat16"
            loaded = load_model(ModelSpec(str(tmp_path / name), dtype="auto"))
            assert loaded.dtype == torch.bfloat16
            assert torch.equal(logits(loaded), logits(base(dtype="bfloat16")))
        gathered = {name: value.half() for name, value in base().state_dict().items()}
        save_pretrained(base(), None, tmp_path / "state", state_dict=gathered)
        assert read(tmp_path / "state" / "config.json")["dtype"] == "float16"

    def test_shards(self, tmp_path):
        model = base()
        save_pretrained(model, None, tmp_path / "out", max_shard_size="100KB")
        assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
        assert torch.equal(logits(load_model(str(tmp_path / "out"))), logits(model))
        save_pretrained(model, None, tmp_path / "out")
        assert [p.name for p in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]

    def test_model_is_left_as_it_was(self, tmp_path):
        model = base().train()
        model.config.use_cache = False
        before, settings = {n: v.clone() for n, v in model.state_dict().items()}, model.generation_config
        save_pretrained(model, tiny_tokenizer(), tmp_path / "out", dtype="bfloat16")
        assert model.training and model.config.use_cache is False and model.generation_config is settings
        assert model.dtype == torch.float32
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_merge_without_adapter(self, tmp_path):
        assert "merge=true has no effect" in message(lambda: save_pretrained(base(), None, tmp_path, merge=True))

    def test_classifier_can_find_the_last_token(self, tmp_path):
        model = load_classifier(ModelSpec("tiny", init_kwargs={"size": "pico"}))
        model.config.pad_token_id = None
        save_pretrained(model, tiny_tokenizer(), tmp_path / "out")
        assert read(tmp_path / "out" / "config.json")["pad_token_id"] == 0
        assert not (tmp_path / "out" / "generation_config.json").exists()


class TestSettings:
    def saved(self, tmp_path, settings, *, tokenizer=None, during=None, **config):
        """The settings in a directory saved from a model that came with ``settings``."""
        start = base(**config)
        start.generation_config = GenerationConfig(**settings)
        start.generation_config.to_json_file(tmp_path / "settings.json")
        start.save_pretrained(tmp_path / "start") if not settings.get("temperature") else None
        if settings.get("temperature"):  # transformers would not save these
            start.generation_config = GenerationConfig()
            start.save_pretrained(tmp_path / "start")
            (tmp_path / "settings.json").rename(tmp_path / "start" / "generation_config.json")
        model = load_model(str(tmp_path / "start"))
        if during is not None:
            during(model)
        save_pretrained(model, tokenizer or tiny_tokenizer(), tmp_path / "out")
        return read(tmp_path / "out" / "generation_config.json")

    def test_both_end_ids_stay(self, tmp_path):
        assert self.saved(tmp_path, {"eos_token_id": [7, 3], "pad_token_id": 0})["eos_token_id"] == [7, 3]

    def test_turn_terminator_is_added(self, tmp_path):
        tokenizer = tiny_tokenizer()
        tokenizer.eos_token = "<|pad|>"
        assert self.saved(tmp_path, {"eos_token_id": 7}, tokenizer=tokenizer)["eos_token_id"] == [7, 0, 3]

    def test_padding_never_becomes_one_of_the_ends(self, tmp_path):
        tokenizer = tiny_tokenizer()
        tokenizer.pad_token = tokenizer.eos_token

        def pad_like_the_tokenizer(model):
            model.generation_config.pad_token_id = tokenizer.pad_token_id

        written = self.saved(tmp_path, {"eos_token_id": [7, 3]}, tokenizer=tokenizer, during=pad_like_the_tokenizer)
        assert written["eos_token_id"] == [7, 3] and "pad_token_id" not in written

    def test_a_padding_token_of_its_own_is_written(self, tmp_path):
        assert self.saved(tmp_path, {"eos_token_id": 3})["pad_token_id"] == 0

    def test_padding_that_the_base_shares_with_its_end_is_kept(self, tmp_path):
        assert self.saved(tmp_path, {"eos_token_id": 3, "pad_token_id": 3})["pad_token_id"] == 3

    def test_settings_that_transformers_refuses_to_save(self, tmp_path):
        written = self.saved(tmp_path, {"eos_token_id": 3, "temperature": 0.6, "do_sample": False})
        assert written["temperature"] == 0.6

    @pytest.mark.parametrize("came_with", [True, False])
    def test_cache_setting_is_the_bases(self, came_with, tmp_path):
        self.saved(tmp_path, {"eos_token_id": 3}, during=lambda m: setattr(m.config, "use_cache", False), use_cache=came_with)
        assert read(tmp_path / "out" / "config.json")["use_cache"] is came_with

    def test_generation_before_and_after(self, tmp_path):
        model = base()
        model.generation_config = GenerationConfig(eos_token_id=[5, 3], pad_token_id=0, max_new_tokens=12)
        save_pretrained(model, tiny_tokenizer(), tmp_path / "out")
        after = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        mask = torch.ones_like(IDS)
        assert torch.equal(model.generate(IDS, attention_mask=mask), after.generate(IDS, attention_mask=mask))

    def test_cloned_end_token_reaches_the_config(self, tmp_path):
        tokenizer = tiny_tokenizer()
        tokenizer.eos_token = "<|im_start|>"
        self.saved(tmp_path, {"eos_token_id": 3}, tokenizer=tokenizer)
        assert read(tmp_path / "out" / "config.json")["eos_token_id"] == [2, 3]


class TestWholeOrNotAtAll:
    def test_previous_one_survives_a_write_that_fails(self, tmp_path):
        """A real failure: files above 64 kB are refused by the system while the weights are written."""
        save_pretrained(base(seed=1), tiny_tokenizer(), tmp_path / "out")
        before = snapshot(tmp_path)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
        try:
            text = message(lambda: save_pretrained(base(), tiny_tokenizer(), tmp_path / "out"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)
        assert "Could not save to" in text and "the previous one there is intact" in text
        assert snapshot(tmp_path) == before

    def test_full_disk_is_named(self, tmp_path, monkeypatch):
        tokenizer = tiny_tokenizer()

        def full(folder):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(tokenizer, "save_pretrained", full)
        text = message(lambda: save_pretrained(base(), tokenizer, tmp_path / "out"))
        assert "the disk is full; nothing was left there" in text
        assert list(tmp_path.iterdir()) == []

    def test_other_errors_clean_up_too(self, tmp_path):
        with pytest.raises(ZeroDivisionError), atomic_directory(tmp_path / "out") as folder:
            (folder / "x").touch()
            raise ZeroDivisionError
        assert list(tmp_path.iterdir()) == []

    def test_replaces_models_and_keeps_the_rest(self, tmp_path):
        out = tmp_path / "out"
        save_pretrained(adapted(), tiny_tokenizer(), out, merge=True, card="old")
        (out / "notes.txt").write_text("mine")
        (out / "checkpoints").mkdir()
        (out / "checkpoints" / "last.ckpt").write_text("1")
        save_pretrained(base(), None, out)
        names = {p.name for p in out.iterdir()}
        assert names == {*("config.json", "generation_config.json", "model.safetensors", "notes.txt", "checkpoints", "README.md")}
        assert (out / "README.md").read_text() == "old"
        assert (out / "checkpoints" / "last.ckpt").read_text() == "1"
        save_pretrained(base(), None, out, card="new")
        assert (out / "README.md").read_text() == "new"
        assert [p.name for p in tmp_path.iterdir()] == ["out"]

    def test_leftovers_of_a_killed_save(self, tmp_path):
        (tmp_path / ".out.tmp").mkdir()
        (tmp_path / ".out.tmp" / "model.safetensors").write_text("half")
        (tmp_path / ".out.old").mkdir()
        (tmp_path / ".out.old" / "notes.txt").write_text("mine")
        save_pretrained(base(), None, tmp_path / "out")
        assert [p.name for p in tmp_path.iterdir()] == ["out"]
        assert (tmp_path / "out" / "notes.txt").read_text() == "mine"

    def test_folder_is_as_readable_as_any(self, tmp_path):
        (tmp_path / "plain").mkdir()
        save_pretrained(base(), None, tmp_path / "a" / "out")
        assert (tmp_path / "a" / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode

    def test_a_file_in_the_way(self, tmp_path):
        (tmp_path / "file").touch()
        assert "Could not save" in message(lambda: save_pretrained(base(), None, tmp_path / "file" / "out"))


class TestAdapter:
    def test_loads_with_plain_peft(self, tmp_path):
        model = adapted(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
        save_pretrained(model, tiny_tokenizer(), tmp_path / "out", card="card")
        again = peft.PeftModel.from_pretrained(base(), str(tmp_path / "out"))
        assert torch.equal(logits(again), logits(model))
        assert read(tmp_path / "out" / "adapter_config.json")["base_model_name_or_path"] == "tiny:llama"
        assert (tmp_path / "out" / "README.md").read_text() == "card"

    def test_holds_the_adapter_alone(self, tmp_path):
        model = adapted()
        save_pretrained(model, None, tmp_path / "out")
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert sum(value.numel() for value in load_file(tmp_path / "out" / "adapter_model.safetensors").values()) == trained
        assert not (tmp_path / "out" / "config.json").exists()

    def test_reference_copy_is_not_saved(self, tmp_path):
        model = adapted()
        copy_adapter(model, "default", "reference")
        save_pretrained(model, None, tmp_path / "out")
        assert not any(p.is_dir() for p in (tmp_path / "out").iterdir())
        assert torch.equal(logits(load_model(str(tmp_path / "out"))), logits(model))

    def test_named_adapter_lies_at_the_top(self, tmp_path):
        model = adapted(adapter_name="mine")
        save_pretrained(model, None, tmp_path / "out")
        assert torch.equal(logits(peft.PeftModel.from_pretrained(base(), str(tmp_path / "out"))), logits(model))

    def test_directory_is_a_model_by_itself(self, tmp_path):
        model = adapted(seed=5, config={"hidden_size": 96, "num_attention_heads": 3})
        save_pretrained(model, tiny_tokenizer(), tmp_path / "out")
        again = load_model(str(tmp_path / "out"))
        assert torch.equal(logits(again), logits(model))
        assert not again.training and any(p.requires_grad for p in again.parameters())
        assert load_model(ModelSpec(str(tmp_path / "out"), dtype="bfloat16")).get_base_model().dtype == torch.bfloat16
        assert load_tokenizer(str(tmp_path / "out")).chat_template == tiny_tokenizer().chat_template

    def test_on_a_base_directory(self, tmp_path, monkeypatch):
        save_pretrained(base(seed=3), tiny_tokenizer(), tmp_path / "base")
        monkeypatch.chdir(tmp_path)
        model = apply_peft(load_model("base"), PeftSpec())
        save_pretrained(model, None, "out")
        monkeypatch.chdir("/")
        again = load_model(str(tmp_path / "out"))
        assert torch.equal(logits(again), logits(base(seed=3)))
        assert len(load_tokenizer(str(tmp_path / "out"))) == 109  # of the base, as it was saved without

    def test_a_checkpoint_names_no_code(self, tmp_path):
        (tmp_path / "adapter_config.json").write_text("{}")
        (tmp_path / "base_model.json").write_text(
            json.dumps({"name": "a/b", "trust_remote_code": True, "init_kwargs": {"attn_implementation": "x/y"}})
        )
        spec = base_spec(ModelSpec(str(tmp_path), dtype="bfloat16"), tmp_path)
        assert (spec.name, spec.trust_remote_code, spec.init_kwargs, spec.dtype) == ("a/b", False, None, "bfloat16")

    def test_base_unknown(self, tmp_path):
        (tmp_path / "adapter_config.json").write_text("{}")
        assert "does not name its base" in message(lambda: load_model(str(tmp_path)))

    @pytest.mark.parametrize("train_new_tokens", [True, False])
    def test_grown_vocabulary_comes_back(self, train_new_tokens, tmp_path):
        source = tiny_tokenizer()
        source.add_special_tokens({"extra_special_tokens": ["[S]", "[/S]"]})
        source.chat_template = "{% for m in messages %}[S]{{ m.content }}[/S]{% endfor %}"
        source.save_pretrained(tmp_path / "source")
        spec = ModelSpec("tiny", init_kwargs={"size": "pico"}, chat_template=str(tmp_path / "source"))
        model = load_model(spec)
        tokenizer = load_tokenizer(spec, model)
        model = apply_peft(model, PeftSpec(r=2, train_new_tokens=train_new_tokens))
        for parameter in model.parameters():
            parameter.data += 0.01 * parameter.requires_grad
        save_pretrained(model, tokenizer, tmp_path / "out", merge=True)
        ids = torch.tensor([tokenizer("[S]a[/S]").input_ids])
        expected = model(ids).logits
        assert torch.equal(load_model(str(tmp_path / "out"))(ids).logits, expected)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-5, atol=1e-5)
        assert read(tmp_path / "out" / "merged" / "generation_config.json")["eos_token_id"] == [3, 110]


KINDS = {
    "lora": ("llama", {}),
    "rslora": ("llama", {"use_rslora": True}),
    "dora": ("llama", {"use_dora": True}),
    "head_in_full": ("llama", {"modules_to_save": ["lm_head"]}),
    "rows": ("llama", {"trainable_token_indices": [5, 6]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "pissa": ("llama", {"init_lora_weights": "pissa"}),
    "named": ("llama", {"adapter_name": "mine"}),
    "bias": ("qwen2", {"bias": "all"}),
    "conv1d": ("gpt2", {}),
    "experts": ("mixtral", {}),
}
TIED_TOO = ("lora", "head_in_full", "rows", "embedding")


class TestMerged:
    @pytest.mark.parametrize(("kind", "tied"), [(k, t) for k in KINDS for t in (False, True) if not t or k in TIED_TOO])
    def test_computes_what_the_adapter_does(self, kind, tied, tmp_path):
        architecture, spec = KINDS[kind]
        model = adapted(architecture, config={"tie_word_embeddings": tied}, **spec)
        before, expected = {n: v.clone() for n, v in model.state_dict().items()}, logits(model)
        save_pretrained(model, None, tmp_path / "out", merge=True)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")
        torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(logits(base(architecture, tie_word_embeddings=tied)), expected, atol=1e-2)
        after = model.state_dict()
        assert after.keys() == before.keys() and all(torch.equal(after[n], before[n]) for n in before)

    @pytest.mark.parametrize("kind", KINDS)
    def test_from_gathered_tensors(self, kind):
        """As for a sharded model: full tensors are given, the module's own are worthless."""
        architecture, spec = KINDS[kind]
        model = adapted(architecture, **spec)
        expected = {name: value.clone() for name, value in merged_state_dict(model).items()}
        gathered = {name: value.clone() for name, value in model.state_dict().items()}
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        merged = merged_state_dict(model, gathered)
        assert merged.keys() == expected.keys() == base(architecture).state_dict().keys()
        assert all(torch.equal(merged[name], expected[name]) for name in expected)

    def test_of_an_adapter_that_is_not_active(self):
        model = adapted()
        expected = logits(model)
        apply_peft(model, PeftSpec(r=2, adapter_name="second"))
        plain = base()
        plain.load_state_dict(merged_state_dict(model, adapter="default"))
        torch.testing.assert_close(logits(plain), expected, rtol=1e-4, atol=1e-4)

    def test_what_has_no_merged_form(self, tmp_path):
        model = apply_peft(base(), peft.PromptTuningConfig(num_virtual_tokens=4))
        assert "PROMPT_TUNING adapter cannot be merged" in message(lambda: merged_state_dict(model))
        model = adapted()
        model.get_base_model().is_quantized = True
        assert "few bits" in message(lambda: save_pretrained(model, None, tmp_path / "out", merge=True))
        assert not (tmp_path / "out").exists()

    def test_broken_adapter_is_named(self):
        model = adapted()
        model.get_submodule("base_model.model.model.layers.1.mlp.up_proj.lora_B.default").weight.data.fill_(torch.nan)
        assert "model.layers.1.mlp.up_proj cannot be merged" in message(lambda: merged_state_dict(model))


CARD = {
    "name": "tuned",
    "method": "dpo",
    "base_model": "owner/base",
    "datasets": ["owner/pairs", "/home/someone/rows.jsonl"],
    "hyperparameters": {"optim": {"lr": 1e-3}, "data": {"path": "/home/someone/rows.jsonl"}, "betas": (0.9, 0.99)},
    "metrics": {"val/loss": 0.693147, "val/accuracy": float("nan")},
}


class TestCard:
    def front(self, **changes):
        return yaml.safe_load(model_card(**CARD | changes).split("---")[1])

    def test_front_matter(self):
        front = self.front(license="apache-2.0", tags=["math", "dpo"])
        assert front["base_model"] == "owner/base" and front["datasets"] == ["owner/pairs"]
        assert front["tags"] == ["workbench", "dpo", "math"] and front["library_name"] == "transformers"
        assert front["license"] == "apache-2.0"
        assert self.front(adapter=True)["library_name"] == "peft"
        assert "base_model" not in self.front(base_model="tiny:llama")

    def test_text(self):
        text = model_card(**CARD)
        assert "| val/loss | 0.6931 |" in text and "| val/accuracy | nan |" in text
        assert "lr: 0.001" in text and "| torch |" in text
        assert "2305.18290" in text and "Rafael Rafailov" in text
        assert "Rafailov" not in model_card(**CARD | {"method": "sft"})
        assert "2402.03300" in model_card(**CARD | {"papers": [PAPERS["grpo"]]})

    def test_paths_of_the_machine_stay_private(self):
        text = model_card(**CARD | {"base_model": "/home/someone/base"})
        assert "/home" not in text and "rows.jsonl" in text and "`base`" in text

    def test_front_matter_is_what_the_hub_reads(self):
        from huggingface_hub import ModelCard

        assert ModelCard(model_card(**CARD)).data.base_model == "owner/base"


class TestPush:
    @pytest.fixture
    def hub(self, monkeypatch):
        """A stand-in for the hub's client that records what it was asked for."""
        calls = []

        class Api:
            failure = None

            def __init__(self, token=None):
                calls.append(("token", token))

            def create_repo(self, repo_id, **kwargs):
                if self.failure is not None:
                    raise self.failure
                calls.append(("create", repo_id, kwargs))
                return f"https://hub/{repo_id}"

            def create_branch(self, repo_id, **kwargs):
                calls.append(("branch", repo_id, kwargs))

            def upload_folder(self, **kwargs):
                calls.append(("upload", kwargs))

        monkeypatch.setattr(saving, "HfApi", Api)
        monkeypatch.setattr(saving.constants, "HF_HUB_OFFLINE", False)
        return types.SimpleNamespace(calls=calls, api=Api)

    @pytest.fixture
    def saved(self, tmp_path):
        return save_pretrained(base(), None, tmp_path / "out")

    def test_creates_and_uploads(self, hub, saved):
        url = push_to_hub(saved, "me/model", private=True, token="t", revision="v1", commit_message="m")
        assert url == "https://hub/me/model"
        token, create, branch, upload = hub.calls
        assert token == ("token", "t")
        assert create == ("create", "me/model", {"private": True, "exist_ok": True})
        assert branch == ("branch", "me/model", {"branch": "v1", "exist_ok": True})
        assert upload[1]["folder_path"] == saved and upload[1]["repo_id"] == "me/model"
        assert upload[1]["revision"] == "v1" and "*.ckpt" in upload[1]["ignore_patterns"]

    def test_main_needs_no_branch(self, hub, saved):
        push_to_hub(saved, "me/model")
        assert [call[0] for call in hub.calls] == ["token", "create", "upload"]

    @pytest.mark.parametrize(
        ("failure", "said"),
        [
            (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set"),
            (errors.LocalTokenNotFoundError("no"), "hf auth login"),
            (errors.HFValidationError("bad id\nmore"), "not a repository id"),
            (ConnectionError("no route"), "no route"),
        ],
    )
    def test_failures_are_one_line(self, failure, said, hub, saved):
        hub.api.failure = failure
        text = message(lambda: push_to_hub(saved, "me/model"))
        assert said in text and f"The model is safe in {saved}" in text

    @pytest.mark.parametrize(("status", "said"), [(401, "no valid token"), (403, "may not write there")])
    def test_refusals(self, status, said, hub, saved):
        response = httpx.Response(status, request=httpx.Request("POST", "https://hub"))
        hub.api.failure = errors.HfHubHTTPError("refused", response=response)
        assert said in message(lambda: push_to_hub(saved, "me/model"))

    def test_really_offline(self, saved):
        assert "HF_HUB_OFFLINE is set" in message(lambda: push_to_hub(saved, "me/model"))

    def test_nothing_to_push(self, hub, tmp_path):
        assert "holds no saved model" in message(lambda: push_to_hub(tmp_path, "me/model"))
        assert hub.calls == []
