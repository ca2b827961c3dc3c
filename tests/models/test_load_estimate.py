"""Counts equal the built model's; the memory estimate is near what a forward pass keeps."""

import pytest
import torch

from workbench.models.estimate import count_parameters, estimate_memory
from workbench.models.load import ModelSpec, load_model
from workbench.models.peft import PeftSpec, apply_peft
from workbench.models.save import save_pretrained


def spec(architecture="llama", dtype="float32", **config):
    return ModelSpec(f"tiny:{architecture}", dtype=dtype, init_kwargs=config)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("peft", [None, PeftSpec(r=4), PeftSpec(use_dora=True, modules_to_save=["lm_head"])])
def test_counts_are_those_of_the_built_model(peft, tied):
    model = apply_peft(load_model(spec(tie_word_embeddings=tied)), peft)
    count = count_parameters(spec(tie_word_embeddings=tied), peft)
    assert count.total == sum(p.numel() for p in model.parameters())
    assert count.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count_parameters(model).total == count.total


def test_no_weight_is_read(tmp_path):
    model = load_model(spec())
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert count_parameters(str(tmp_path), PeftSpec(init_lora_weights="pissa")).trainable > 0
    assert count_parameters(str(tmp_path)).total == count_parameters(model).total


def test_saved_adapter_counts_as_it_was_saved(tmp_path):
    model = apply_peft(load_model(spec()), PeftSpec(r=3))
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    assert count_parameters(spec(), PeftSpec(adapter=str(tmp_path))) == count_parameters(model)
    save_pretrained(model, None, tmp_path)
    assert count_parameters(str(tmp_path)) == count_parameters(model)


def kept_bytes(model, ids):
    """Bytes that autograd holds after the backbone's forward pass, parameters apart."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = getattr(model, "get_base_model", lambda: model)().base_model(ids)
    return sum(size for size, _ in seen.values()) if out is not None else 0


@pytest.mark.parametrize("peft", [None, PeftSpec()])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral"])
def test_activations_are_near_what_is_kept(architecture, dtype, peft):
    model = apply_peft(load_model(spec(architecture, dtype)).train(), peft)
    estimate = estimate_memory(spec(architecture, dtype), peft, micro_batch_tokens=256)
    # 0.85 to 1.20 on the machine where the formula was made.
    assert 0.7 < estimate.activations / kept_bytes(model, torch.full((2, 128), 5)) < 1.4


class TestSum:
    TOKENS = 100

    def estimate(self, peft=None, dtype="float32", **options):
        return estimate_memory(spec(dtype=dtype), peft, micro_batch_tokens=self.TOKENS, **options)

    def test_full_training_in_float32(self):
        n = count_parameters(spec()).total
        estimate = self.estimate()
        assert (estimate.weights, estimate.gradients, estimate.optimizer) == (4 * n, 4 * n, 8 * n)
        assert estimate.logits == 3 * 4 * 100 * 109
        assert estimate.total == 16 * n + estimate.activations + estimate.logits

    def test_options(self):
        n, plain = count_parameters(spec()).total, self.estimate()
        assert self.estimate(optimizer_states=0).optimizer == 0
        assert self.estimate(frozen_copies=1).weights == 8 * n
        assert self.estimate(shards=2).gradients == 2 * n
        assert self.estimate(logit_tokens=10).logits == plain.logits // 10
        recomputed, selective = (self.estimate(gradient_checkpointing=v).activations for v in (True, "selective"))
        assert self.estimate(activation_offloading=True).activations < recomputed < selective < plain.activations

    def test_adapter_on_bfloat16(self):
        base, with_adapter = count_parameters(spec()), count_parameters(spec(), PeftSpec())
        estimate = self.estimate(PeftSpec(), dtype="bfloat16")
        assert estimate.weights == 2 * base.total + 4 * with_adapter.trainable
        assert estimate.gradients == 4 * with_adapter.trainable
        assert self.estimate(PeftSpec(adapter_dtype="base"), dtype="bfloat16").gradients == 2 * with_adapter.trainable

    def test_quantised_layers(self, tmp_path):
        model = load_model(spec())
        model.save_pretrained(tmp_path)
        count = count_parameters(str(tmp_path))
        four = ModelSpec(str(tmp_path), dtype="bfloat16", quantization="4bit")
        estimate = estimate_memory(four, micro_batch_tokens=self.TOKENS)
        assert estimate.weights == round(0.5625 * count.linear + 2 * (count.total - count.linear))
