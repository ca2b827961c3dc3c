"""GGUF: a file written here comes back as the model it was written from, once, whatever happens to its name."""

import importlib.util

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from workbench.errors import UserError
from workbench.models import gguf as conversion
from workbench.models.load import ModelSpec, load_config, load_model
from workbench.models.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")

IDS = torch.tensor([[3, 4, 5, 6, 7, 8, 1]])
TOKENS = ["<unk>", "<|start|>", "<|end|>", *"abcdefg", "ab", "cd"]
TEMPLATE = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def make_model(seed=0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).eval()


def rotary_order(weight, heads):
    """Rows of queries and keys as GGUF stores them: pairs that rotate together lie side by side."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, model):
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([2, 3, 3] + [1] * (len(TOKENS) - 3))  # unknown, control, normal
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tensors_of(model):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_of(model):
    weights = {name: value.numpy().astype(np.float32) for name, value in model.state_dict().items()}
    yield "token_embd.weight", weights["model.embed_tokens.weight"]
    yield "output_norm.weight", weights["model.norm.weight"]
    yield "output.weight", weights["lm_head.weight"]
    for layer in range(model.config.num_hidden_layers):
        for theirs, ours in NAMES.items():
            value = weights[f"model.layers.{layer}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):
                value = rotary_order(value, model.config.num_attention_heads if ours == "attn_q" else 1)
            yield f"blk.{layer}.{ours}.weight", np.ascontiguousarray(value)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    model = make_model()
    write_gguf(tmp_path / "nano.gguf", model)
    return tmp_path / "nano.gguf", model


def message(*args, **kwargs):
    with pytest.raises(UserError) as caught:
        load_model(ModelSpec(*args, **kwargs))
    return str(caught.value)


def test_the_model_is_the_one_written(written):
    path, model = written
    loaded = load_model(str(path))
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)
    assert loaded.dtype == torch.float32 and not loaded.training
    assert loaded.config.name_or_path == str(path)


def test_by_folder_and_by_package(written, tmp_path, monkeypatch):
    path, model = written
    (tmp_path / "gguf_shipping_package").mkdir()
    (tmp_path / "gguf_shipping_package" / "__init__.py").touch()
    path = path.rename(tmp_path / "gguf_shipping_package" / path.name)
    monkeypatch.syspath_prepend(str(tmp_path))
    for spec in (
        ModelSpec(str(path.parent)),
        ModelSpec(str(path.parent), gguf_file="nano.gguf"),
        ModelSpec("package:gguf_shipping_package/nano.gguf"),
    ):
        torch.testing.assert_close(logits(load_model(spec)), logits(model), rtol=1e-5, atol=1e-5)
    write_gguf(path.with_name("other.gguf"), model)
    assert "nano.gguf, other.gguf" in message(str(path.parent))


def test_conversion_happens_once(written, monkeypatch):
    path, _ = written
    load_model(str(path))
    monkeypatch.setattr(conversion, "_write", lambda *args: pytest.fail("converted again"))
    assert load_model(ModelSpec(str(path), dtype="bfloat16")).dtype == torch.bfloat16


def test_new_content_under_the_old_name_is_converted_anew(written):
    path, _ = written
    load_model(str(path))
    stat = path.stat()
    other = make_model(seed=1)
    write_gguf(path, other)
    assert path.stat().st_size == stat.st_size
    torch.testing.assert_close(logits(load_model(str(path))), logits(other), rtol=1e-5, atol=1e-5)


def test_a_copy_elsewhere_uses_the_same_conversion(written, tmp_path, monkeypatch):
    path, model = written
    load_model(str(path))
    monkeypatch.setattr(conversion, "_write", lambda *args: pytest.fail("converted again"))
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / path.name
    copy.write_bytes(path.read_bytes())
    torch.testing.assert_close(logits(load_model(str(copy))), logits(model), rtol=1e-5, atol=1e-5)


def test_other_versions_convert_anew(written, monkeypatch):
    path, _ = written
    first = conversion.convert(path)
    monkeypatch.setattr(conversion.transformers, "__version__", "99.0")
    assert conversion.converted(path) is None
    assert conversion.convert(path) != first


def test_config_and_tokenizer_need_no_conversion(written, monkeypatch):
    path, _ = written
    monkeypatch.setattr(conversion, "_write", lambda *args: pytest.fail("weights were read"))
    assert load_config(str(path)).hidden_size == 32
    direct = load_tokenizer(str(path))
    monkeypatch.undo()
    monkeypatch.setenv("WORKBENCH_CACHE", str(path.parent / "cache"))
    load_model(str(path))
    cached = load_tokenizer(str(path))
    for tokenizer in (direct, cached):
        assert tokenizer.chat_template == TEMPLATE
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
        assert tokenizer("abc<|end|>", add_special_tokens=False).input_ids == [10, 5, 2]


def test_a_failed_conversion_leaves_nothing(written, monkeypatch):
    path, _ = written

    def fail(file, directory):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion, "_write", fail)
    assert "No space left on device; set WORKBENCH_CACHE" in message(str(path))
    assert [entry.name for entry in (path.parent / "cache" / "gguf").iterdir() if entry.suffix != ".lock"] == []


def test_not_gguf(written, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"<html>")
    assert "is not a GGUF file" in message(str(tmp_path / "bad.gguf"))


def test_cut_file(written):
    path, _ = written
    path.write_bytes(path.read_bytes()[:2000])
    assert f"{path} is damaged" in message(str(path))


def test_missing_file_names_the_nearest(written):
    path, _ = written
    assert "Did you mean 'nano.gguf'?" in message(str(path.with_name("nao.gguf")))
    assert "Did you mean 'nano.gguf'?" in message(str(path.parent), gguf_file="nao.gguf")


def test_without_the_package(written, monkeypatch):
    path, _ = written
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    assert message(str(path)).endswith("pip install gguf")


def test_the_cache_holds_a_plain_model(written):
    path, model = written
    directory = conversion.convert(path)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(directory)), logits(model), rtol=1e-5, atol=1e-5)
