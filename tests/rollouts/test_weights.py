"""What is sent to an engine: names, values, adapters, and what is refused."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from workbench.errors import UserError
from workbench.models.peft import PeftSpec, apply_peft
from workbench.models.policy import Policy
from workbench.rollouts import weights
from workbench.rollouts.weights import check_names, fingerprint, named_weights, weight_shapes
from workbench.tiny import tiny_model, tiny_tokenizer


def lora_policy(**options):
    model = apply_peft(tiny_model(size="pico"), PeftSpec(r=4, **options))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return Policy(model)


def loaded(policy, named):
    model = tiny_model(size="pico", seed=9)
    model.load_state_dict(dict(named), strict=True)
    return model.eval()


def test_full_weights_go_by_the_names_of_the_checkpoint():
    policy = Policy(tiny_model(size="pico"))
    assert dict(named_weights(policy)).keys() == policy.causal_lm.state_dict().keys()
    assert fingerprint(named_weights(policy)) == fingerprint(iter(policy.causal_lm.state_dict().items()))


def test_a_tied_head_is_always_sent():
    policy = Policy(tiny_model(size="pico", tie_word_embeddings=True))
    sent = dict(named_weights(policy))
    assert torch.equal(sent["lm_head.weight"], sent["model.embed_tokens.weight"])


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"use_rslora": True}])
def test_a_merged_adapter_computes_what_the_policy_does_and_leaves_it_alone(options):
    policy = lora_policy(**options)
    before = fingerprint(iter(policy.state_dict().items()))
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        want = policy.hf.eval()(input_ids=ids).logits
        got = loaded(policy, named_weights(policy))(input_ids=ids).logits
        base = loaded(policy, named_weights(policy, merge=False))(input_ids=ids).logits
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert (base - want).abs().max() > 0.01
    assert fingerprint(iter(policy.state_dict().items())) == before


def test_the_base_alone_is_the_model_without_its_adapter():
    policy = lora_policy()
    assert fingerprint(named_weights(policy, merge=False)) == fingerprint(iter(tiny_model(size="pico").state_dict().items()))


@pytest.mark.parametrize("options", [None, {}, {"modules_to_save": ["lm_head"]}])
def test_names_and_shapes_are_known_in_order_before_anything_is_read(options):
    policy = Policy(tiny_model(size="pico")) if options is None else lora_policy(**options)
    assert list(weight_shapes(policy).items()) == [(name, tuple(value.shape)) for name, value in named_weights(policy)]


def test_experts_go_as_a_checkpoint_holds_them(tmp_path):
    policy = Policy(tiny_model("qwen3_moe"))
    policy.causal_lm.save_pretrained(tmp_path)
    assert weight_shapes(policy) == weights.checkpoint_shapes(tmp_path)
    assert {name: tuple(value.shape) for name, value in named_weights(policy)} == weights.checkpoint_shapes(tmp_path)


def test_other_names_and_shapes_are_one_error_that_lists_them():
    held = {"a": (1,), "b": (2,), "c": (3,)}
    check_names(held | {"lm_head.weight": (4,)}, held, "it")
    with pytest.raises(UserError, match=r"missing: b; unexpected: d; of another shape: a \[5\] \(there \[1\]\)\); start it"):
        check_names({"a": (5,), "c": (3,), "d": (1,)}, held, "the server")
    with pytest.raises(UserError, match="and 6 more"):
        check_names({}, {f"w{i}": (1,) for i in range(10)}, "it")


def test_one_changed_value_is_another_fingerprint():
    policy = Policy(tiny_model(size="pico"))
    before = fingerprint(named_weights(policy))
    with torch.no_grad():
        policy.causal_lm.model.norm.weight[3] += 1e-6
    assert fingerprint(named_weights(policy)) != before


def test_a_written_checkpoint_and_adapter_load(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = lora_policy()
    weights.write_checkpoint(policy, tiny_tokenizer(), tmp_path / "model", named_weights(policy, merge=False))
    weights.write_adapter(policy, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, policy.hf.eval()(input_ids=ids).logits)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == len(tiny_tokenizer())
    weights.write_adapter(policy, tmp_path / "other", first=False)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora=true; set method.engine.sync=merged"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias=all"),
    ],
)
def test_adapters_that_vllm_does_not_serve_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        weights.check_adapter(lora_policy(**options))


def test_no_adapter_and_a_base_of_few_bits_are_refused():
    policy = Policy(tiny_model(size="pico"))
    with pytest.raises(UserError, match=r"needs an adapter \(peft=lora\)"):
        weights.check_adapter(policy)
    policy.causal_lm.is_quantized = True
    with pytest.raises(UserError, match=r"set method.engine.sync=adapter"):
        named_weights(policy)


def test_the_rank_of_an_adapter_is_its_largest():
    assert weights.adapter_rank(lora_policy(rank_pattern={"q_proj": 8})) == 8


@pytest.mark.distributed
def test_sharded_weights_are_sent_whole(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("sharded_weights.py")
    command = [sys.executable, str(script)]
    ranks = [subprocess.Popen([*command, str(rank), str(port), str(tmp_path)], cwd=script.parent) for rank in (0, 1)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    policy = lora_policy()
    weights.write_adapter(policy, tmp_path / "whole")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "adapter"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
