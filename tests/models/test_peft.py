"""Adapters: exact at the start, seeded, strict about names, and never without anything to train."""

import json
import logging
import warnings

import peft
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from workbench.errors import UserError
from workbench.models.load import ModelSpec, load_model
from workbench.models.peft import (
    PeftSpec,
    apply_peft,
    check_trainable,
    copy_adapter,
    prepare_quantized,
    trainable_parameters,
    use_adapter,
)
from workbench.models.tokenizer import grow_embeddings

IDS = torch.arange(4, 20)[None]


def base(architecture="llama", dtype="float32", **config):
    config = {"size": "pico"} | config
    return load_model(ModelSpec(f"tiny:{architecture}", dtype=dtype, init_kwargs=config))


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def disturb(model, seed=0):
    """A stand-in for training: every trained parameter moves."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained(model).values():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def checkpoint_activations(model):
    base_model = model.get_base_model()
    enable = getattr(base_model, "activation_checkpointing_enable", None) or base_model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def message(model, *args, **kwargs):
    with pytest.raises(UserError) as caught:
        apply_peft(model, PeftSpec(*args, **kwargs))
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestFresh:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("adapter_dtype", ["float32", "base"])
    @pytest.mark.parametrize("kind", [{}, {"use_dora": True}, {"use_rslora": True}, {"init_lora_weights": "gaussian"}])
    def test_output_is_the_bases_bit_for_bit(self, kind, dtype, adapter_dtype):
        model = base(dtype=dtype)
        before = logits(model)
        assert torch.equal(logits(apply_peft(model, PeftSpec(adapter_dtype=adapter_dtype, **kind))), before)

    @pytest.mark.parametrize("architecture", ["gpt2", "phi3", "mixtral"])
    def test_other_layer_types(self, architecture):
        model = base(architecture)
        before = logits(model)
        adapted = apply_peft(model, PeftSpec(r=4))
        assert torch.equal(logits(adapted), before)
        assert not torch.equal(logits(disturb(adapted)), before)

    def test_dora_magnitudes_move_with_training(self):
        model = apply_peft(base(), PeftSpec(use_dora=True))
        model(IDS, labels=IDS).loss.backward()
        magnitudes = [p.grad.abs().max() for name, p in trained(model).items() if "magnitude" in name]
        assert len(magnitudes) == 14 and all(g > 0 and g.isfinite() for g in magnitudes)

    def test_base_is_frozen(self):
        model = apply_peft(base(), PeftSpec(r=4))
        assert all("lora_" in name for name in trained(model))
        assert trainable_parameters(model)[0] == sum(p.numel() for p in trained(model).values())

    @pytest.mark.parametrize(("adapter_dtype", "expected"), [("float32", torch.float32), ("base", torch.bfloat16)])
    def test_dtype_on_a_bfloat16_base(self, adapter_dtype, expected):
        model = apply_peft(base(dtype="bfloat16"), PeftSpec(adapter_dtype=adapter_dtype))
        assert {p.dtype for p in trained(model).values()} == {expected}
        assert model.get_base_model().model.norm.weight.dtype == torch.bfloat16

    def test_weights_follow_the_seed_alone(self):
        def weights(seed, outside):
            torch.manual_seed(outside)
            model = apply_peft(base(), PeftSpec(seed=seed))
            return torch.cat([p.flatten() for p in trained(model).values()]), torch.get_rng_state()

        first, state = weights(0, outside=1)
        again, _ = weights(0, outside=2)
        other, _ = weights(1, outside=1)
        torch.manual_seed(1)
        assert torch.equal(first, again) and not torch.equal(first, other)
        assert torch.equal(state, torch.get_rng_state())

    def test_scaling(self):
        plain = apply_peft(base(), PeftSpec(r=4, alpha=8))
        stable = apply_peft(base(), PeftSpec(r=4, alpha=8, use_rslora=True))
        name = "model.layers.0.self_attn.q_proj"
        assert plain.get_base_model().get_submodule(name).scaling == {"default": 2.0}
        assert stable.get_base_model().get_submodule(name).scaling == {"default": 4.0}

    def test_no_warning_for_correct_input(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for architecture in ("llama", "gpt2", "mixtral"):
                apply_peft(base(architecture), PeftSpec(r=2))


class TestTargets:
    def targets(self, **options):
        return set(apply_peft(base(), PeftSpec(r=2, **options)).targeted_module_names)

    def test_all_linear_leaves_the_head(self):
        names = self.targets()
        assert len(names) == 14 and not any("lm_head" in name for name in names)

    def test_list_regex_and_exclusion(self):
        assert len(self.targets(target_modules=["q_proj", "v_proj"])) == 4
        assert self.targets(target_modules=r".*\.1\..*q_proj") == {"model.layers.1.self_attn.q_proj"}
        assert not any("q_proj" in name for name in self.targets(exclude_modules=["q_proj"]))

    def test_layers(self):
        assert {name.split(".")[2] for name in self.targets(layers_to_transform=[1])} == {"1"}
        assert len(self.targets(layers_to_transform=1)) == 7

    def test_parameters_of_experts(self):
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = apply_peft(base("mixtral"), PeftSpec(r=2, target_modules=["q_proj"], target_parameters=names))
        before = logits(model)
        experts = [p for name, p in trained(model).items() if "experts" in name]
        assert len(experts) == 8
        for parameter in experts:
            parameter.data += 0.1
        assert not torch.equal(logits(model), before)

    def test_rank_pattern(self):
        model = apply_peft(base(), PeftSpec(r=2, rank_pattern={"q_proj": 4}))
        assert {m.r["default"] for n, m in model.named_modules() if n.endswith("q_proj")} == {4}
        assert {m.r["default"] for n, m in model.named_modules() if n.endswith("k_proj")} == {2}

    def test_modules_to_save_are_trained_in_full(self):
        model = apply_peft(base(), PeftSpec(target_modules=["q_proj"], modules_to_save=["lm_head"]))
        assert any("lm_head" in name for name in trained(model))

    def test_bias(self):
        names = trained(apply_peft(base("qwen2"), PeftSpec(target_modules=["q_proj"], bias="lora_only")))
        assert any(name.endswith("q_proj.base_layer.bias") for name in names)
        assert not any("k_proj" in name for name in names)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"target_modules": ["q_proj", "v_poj"]}, "'v_poj' is not in the model. Did you mean 'v_proj'?"),
            ({"target_modules": "[qv]_proj"}, "matches no full name; they look like 'model.layers.0"),
            ({"exclude_modules": ["kproj"]}, "Did you mean 'k_proj'?"),
            ({"modules_to_save": ["lmhead"]}, "Did you mean 'lm_head'?"),
            ({"target_parameters": ["experts.gate"]}, "peft.target_parameters: 'experts.gate' is not in the model"),
            ({"layers_to_transform": [0, 2]}, "peft.layers_to_transform=2: the model's layers are 0 to 1"),
            ({"rank_pattern": {"qproj": 4}}, "peft.rank_pattern: 'qproj' matches nothing"),
            ({"lora_kwargs": {"rr": 4}}, "unexpected keyword argument 'rr'"),
        ],
    )
    def test_names_that_match_nothing(self, options, said):
        assert said in message(base(), **options)

    def test_values_are_checked(self):
        with pytest.raises(UserError, match="Did you mean 'gaussian'"):
            PeftSpec(init_lora_weights="gausian")
        with pytest.raises(UserError, match=r"peft\.r=0"):
            PeftSpec(r=0)
        PeftSpec(init_lora_weights="pissa_niter_16")


class TestNewTokens:
    @pytest.mark.parametrize("tied", [False, True])
    def test_only_their_rows_are_trained(self, tied):
        model = base(tie_word_embeddings=tied)
        grow_embeddings(model, 111)
        old = model.get_input_embeddings().weight.clone()
        adapted = apply_peft(model, PeftSpec(r=2))
        disturb(adapted)
        new = adapted.get_base_model().get_input_embeddings().weight
        assert torch.equal(new[:109], old[:109])
        assert (new[109:] != old[109:]).any(1).all()
        head = adapted.get_base_model().get_output_embeddings().weight
        assert (head[109:] != old[109:]).any(1).all()

    def test_can_be_left_frozen(self):
        model = base()
        grow_embeddings(model, 111)
        assert all("lora_" in name for name in trained(apply_peft(model, PeftSpec(train_new_tokens=False))))

    def test_chosen_rows(self):
        model = apply_peft(base(), PeftSpec(r=2, trainable_token_indices=[5, 9]))
        before = model.get_base_model().get_input_embeddings().weight.clone()
        disturb(model)
        changed = (model.get_base_model().get_input_embeddings().weight != before).any(1).nonzero().flatten()
        assert changed.tolist() == [5, 9]


class TestNothingToTrain:
    def test_adapter_loaded_frozen(self, tmp_path):
        apply_peft(base(), PeftSpec()).save_pretrained(tmp_path, save_embedding_layers=False)
        frozen = peft.PeftModel.from_pretrained(base(), str(tmp_path))
        with pytest.raises(UserError, match=r"0 trainable parameters; .*is_trainable=True"):
            apply_peft(frozen, None)
        assert apply_peft(peft.PeftModel.from_pretrained(base(), str(tmp_path), is_trainable=True), None)

    def test_frozen_model(self):
        with pytest.raises(UserError, match="0 trainable parameters"):
            check_trainable(base().requires_grad_(False))

    def test_counts_are_told(self, caplog):
        with caplog.at_level(logging.INFO):
            model = apply_peft(base(), PeftSpec(r=2))
        assert f"{trainable_parameters(model)[0]:,} of " in caplog.text


class TestContinue:
    @pytest.fixture
    def saved(self, tmp_path):
        model = disturb(apply_peft(base(), PeftSpec(r=4, use_dora=True, modules_to_save=["lm_head"])))
        model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        return str(tmp_path / "adapter"), model

    def test_goes_on_where_it_was_and_trains(self, saved):
        path, model = saved
        for spec in (path, PeftSpec(adapter=path), {"adapter": path}):
            again = apply_peft(base(), spec)
            assert torch.equal(logits(again), logits(model))
            assert {n: p.shape for n, p in trained(again).items()} == {n: p.shape for n, p in trained(model).items()}

    def test_structure_comes_from_the_files(self, saved):
        assert "peft.r=8 has no effect" in message_of(lambda: PeftSpec(adapter=saved[0], r=8))

    def test_missing_weights_are_an_error(self, saved):
        file = f"{saved[0]}/adapter_model.safetensors"
        weights = load_file(file)
        weights.pop(next(name for name in weights if "lora_B" in name))
        save_file(weights, file)
        assert "missing adapter keys" in message(base(), adapter=saved[0])

    def test_another_base(self, saved):
        assert "belongs to another base model (size mismatch" in message(base(hidden_size=128), adapter=saved[0])
        assert "cannot be loaded" in message(base("gpt2"), adapter=saved[0])

    def test_paths(self, saved, tmp_path):
        assert "Did you mean 'adapter'?" in message(base(), adapter=str(tmp_path / "adaptr"))
        assert "holds no adapter_config.json" in message(base(), adapter=str(tmp_path))

    def test_name_of_another_base_is_told(self, saved, caplog):
        model = base()
        model.config._name_or_path = "owner/other"
        apply_peft(model, saved[0])
        assert "was trained on 'tiny:llama', and goes on 'owner/other'" in caplog.text


def message_of(call):
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


class TestSeveral:
    def test_second_adapter_by_name(self):
        model = disturb(apply_peft(base(), PeftSpec(r=2)))
        first = logits(model)
        apply_peft(model, PeftSpec(r=4, adapter_name="second", seed=3))
        assert model.active_adapters == ["second"]
        assert all(".second." in name for name in trained(model))
        assert torch.equal(logits(model), logits(base()))
        with use_adapter(model, "default"):
            assert torch.equal(logits(model), first)

    def test_same_name_twice(self):
        assert "carries an adapter 'default' already" in message(apply_peft(base(), PeftSpec()))

    def test_switching_leaves_requires_grad_alone(self):
        model = disturb(apply_peft(base(), PeftSpec(r=2, modules_to_save=["lm_head"])))
        before, out = set(trained(model)), logits(model)
        with use_adapter(model, None):
            assert set(trained(model)) == before
            assert torch.equal(logits(model), logits(base()))
        assert torch.equal(logits(model), out)
        with pytest.raises(UserError, match="Did you mean 'default'"), use_adapter(model, "defalt"):
            pass

    def test_switching_between_forward_and_backward(self):
        def gradients(switch):
            model = disturb(apply_peft(base(), PeftSpec(r=2))).train()
            checkpoint_activations(model)
            loss = model(IDS, labels=IDS, use_cache=False).loss
            if switch:
                with use_adapter(model, None), torch.no_grad():
                    model(IDS, use_cache=False)
            loss.backward()
            return {name: p.grad for name, p in trained(model).items()}

        plain, switched = gradients(False), gradients(True)
        assert all(torch.equal(plain[name], switched[name]) for name in plain)

    def test_frozen_copy(self):
        model = disturb(apply_peft(base(), PeftSpec(r=2, use_dora=True, modules_to_save=["lm_head"])))
        at_start, names = logits(model), set(trained(model))
        state = torch.get_rng_state()
        copy_adapter(model, "default", "reference")
        assert torch.equal(state, torch.get_rng_state())
        assert set(trained(model)) == names and model.active_adapters == ["default"]
        disturb(model, seed=1)
        assert not torch.equal(logits(model), at_start)
        with use_adapter(model, "reference"):
            assert torch.equal(logits(model), at_start)


class TestGradientCheckpointing:
    @pytest.mark.parametrize("kind", [{}, {"use_dora": True}])
    def test_gradients_are_equal_and_nothing_is_warned_of(self, kind):
        def gradients(checkpointing):
            model = disturb(apply_peft(base(), PeftSpec(r=2, **kind))).train()
            if checkpointing:
                checkpoint_activations(model)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                model(IDS, labels=IDS, use_cache=False).loss.backward()
            return {name: p.grad for name, p in trained(model).items()}

        plain, recomputed = gradients(False), gradients(True)
        assert all(plain[name].abs().max() > 0 for name in plain)
        assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


class TestOtherKinds:
    def test_any_peft_config(self):
        model = base()
        before = logits(model)
        adapted = apply_peft(model, peft.IA3Config())
        assert torch.equal(logits(adapted), before)
        assert adapted.peft_config["default"].task_type == "CAUSAL_LM"
        assert trained(adapted) and all("ia3" in name for name in trained(adapted))

    def test_prompt_tuning(self):
        adapted = apply_peft(base(), peft.PromptTuningConfig(num_virtual_tokens=4))
        assert logits(adapted).shape[1] == IDS.shape[1] + 4

    def test_config_containers_become_plain(self, tmp_path):
        config = peft.LoraConfig(target_modules=OmegaConf.create(["q_proj"]), rank_pattern=OmegaConf.create({"q_proj": 2}))
        apply_peft(base(), config).save_pretrained(tmp_path, save_embedding_layers=False)
        assert json.loads((tmp_path / "adapter_config.json").read_text())["rank_pattern"] == {"q_proj": 2}


def test_lists_of_a_config_file_can_be_saved(tmp_path):
    node = OmegaConf.create(
        {"r": 2, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"], "layers_to_transform": [1]}
    )
    for number, spec in enumerate((node, PeftSpec(**node))):
        model = apply_peft(base(), spec)
        model(IDS, labels=IDS).loss.backward()
        model.save_pretrained(tmp_path / str(number), save_embedding_layers=False)
        read = json.loads((tmp_path / str(number) / "adapter_config.json").read_text())
        assert sorted(read["target_modules"]) == ["q_proj", "v_proj"] and read["layers_to_transform"] == [1]
        assert peft.PeftConfig.from_pretrained(str(tmp_path / str(number))).modules_to_save == ["lm_head"]


class TestQuantized:
    """`is_quantized` alone is what tells such a base; its layers are stood in for by plain ones."""

    def test_adapter_already_there_stays_trained(self):
        model = apply_peft(base(), PeftSpec(r=2, modules_to_save=["lm_head"]))
        names = set(trained(model))
        model.get_base_model().is_quantized = True
        model.get_base_model().model.norm.weight.requires_grad_(True)
        prepare_quantized(model)
        assert set(trained(model)) == names

    def test_other_models_are_untouched(self):
        model = base()
        prepare_quantized(model)
        assert all(p.requires_grad for p in model.parameters())

    def test_needs_an_adapter(self):
        model = base()
        model.is_quantized = True
        with pytest.raises(UserError, match="without an adapter"):
            apply_peft(model, None)
