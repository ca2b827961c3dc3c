"""Packed and shared layouts give the numbers and gradients of padded rows, and compute each token once."""

import copy

import pytest
import torch

from workbench.data.batch import MicroBatch, Role
from workbench.errors import UserError
from workbench.losses.reduce import Normalisers
from workbench.models import attention
from workbench.models.attention import Forest
from workbench.models.layouts import to_inputs
from workbench.models.peft import PeftSpec, apply_peft
from workbench.models.policy import Policy, set_gradient_checkpointing
from workbench.models.save import save_pretrained
from workbench.tiny.model import tiny_model

NORM = Normalisers(1.0, 1.0, 1.0, 1.0)
SHARING = ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "phi3", "cohere", "smollm3", "mixtral", "opt", "granite"]


def ids(n, seed):
    return torch.randint(5, 90, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def group(prompt, *completions, seed=0):
    """A row of one prompt and several completions."""
    lengths = [prompt, *completions]
    return {
        "input_ids": [t for i, n in enumerate(lengths) for t in ids(n, seed + i)],
        "weights": [0.0] * prompt + [1.0] * sum(completions),
        "lengths": lengths,
        "parents": [-1] + [0] * len(completions),
        "roles": [int(Role.PROMPT)] + [int(Role.COMPLETION)] * len(completions),
    }


def chain(*lengths, seed=50):
    """A row whose segments continue each other (the steps of a solution)."""
    return {
        "input_ids": [t for i, n in enumerate(lengths) for t in ids(n, seed + i)],
        "weights": [0.0] * lengths[0] + [1.0] * sum(lengths[1:]),
        "lengths": list(lengths),
        "parents": list(range(-1, len(lengths) - 1)),
        "roles": [int(Role.STEP)] * len(lengths),
    }


def batch_of(*rows):
    return MicroBatch.from_rows(list(rows), range(len(rows)), NORM)


FOREST = batch_of(group(21, 9, 30, 1, seed=1), chain(7, 4, 18), group(3, 12, seed=9))


def outcome(model, layout, batch=FOREST, **options):
    """Log-probabilities and the gradient of a sum of them under unequal weights."""
    policy = Policy(model, layout=layout, **options).train()
    policy.zero_grad()
    logps = policy(batch).logps
    (logps * torch.linspace(0.5, 1.5, len(logps))).sum().backward()
    grads = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    return logps.detach(), grads


def assert_equal(model, layout, batch=FOREST, tolerance=2e-5, **options):
    theirs, ours = outcome(copy.deepcopy(model), "padded", batch), outcome(copy.deepcopy(model), layout, batch, **options)
    assert (ours[0] - theirs[0]).abs().max() < tolerance
    assert ours[1].keys() == theirs[1].keys()
    scale = max(g.norm() for g in theirs[1].values())
    for name, gradient in theirs[1].items():
        assert (ours[1][name] - gradient).norm() <= 2e-5 * scale, name


@pytest.mark.parametrize("layout", ["packed", "shared"])
@pytest.mark.parametrize("architecture", SHARING)
def test_every_family_computes_what_it_does_in_padded_rows(architecture, layout):
    assert_equal(tiny_model(architecture, size="pico"), layout)


@pytest.mark.parametrize("layout", ["packed", "shared"])
@pytest.mark.parametrize("mode", [True, "selective"])
def test_recomputation_sees_the_forest_of_its_own_forward(layout, mode):
    """Another batch goes through the model between a forward and its backward, as a reference's does."""
    model = tiny_model("llama", size="pico").train()
    plain = outcome(copy.deepcopy(model), "padded")
    set_gradient_checkpointing(model, mode)
    policy = Policy(model, layout=layout).train()
    logps = policy(FOREST).logps
    with torch.no_grad():
        policy(batch_of(group(4, 3)))
    (logps * torch.linspace(0.5, 1.5, len(logps))).sum().backward()
    for name, p in policy.named_parameters():
        assert torch.allclose(p.grad, plain[1][name], atol=1e-4, rtol=1e-4), name


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_both_implementations_take_a_forest(implementation):
    model = tiny_model("qwen2", size="pico")
    model.set_attn_implementation(implementation)
    assert_equal(model, "shared")


def test_adapters_and_filler():
    model = apply_peft(tiny_model("llama", size="pico"), PeftSpec(r=4, alpha=8, init_lora_weights=False))
    assert_equal(model, "shared")
    assert_equal(tiny_model("llama", size="pico"), "shared", pad_to_multiple_of=32)
    assert to_inputs(FOREST, "shared", 32).input_ids.shape[1] % 32 == 0


def test_every_token_is_computed_once():
    """3 prompts and 5 completions: the padded rows hold 6 times their longest, the shared row each token once."""
    sizes = {layout: to_inputs(FOREST, layout).input_ids.numel() for layout in ("padded", "packed", "shared")}
    assert sizes["shared"] == len(FOREST.tokens) == 105
    assert sizes["packed"] == 30 + 51 + 22 + 29 + 15
    assert sizes["padded"] == 5 * 51


def test_order_and_positions_of_a_forest():
    inputs = to_inputs(batch_of(group(3, 2, 4)), "shared")
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5, 6]]
    assert inputs.forest == Forest([3, 2, 4], [-1, 0, 0])
    assert inputs.forest.context(2) == [0]
    assert Forest([1, 1, 1], [-1, 0, 1]).context(2) == [0, 1]


def test_buckets_hold_every_token_once_and_what_it_may_see():
    """By hand: a prompt of 3 with completions of 2 and 4, and a window of 3."""
    forest = Forest([3, 2, 4], [-1, 0, 0])
    seen = {}
    for bucket in forest.buckets:
        mask = bucket.mask(3)
        for g, length in enumerate(bucket.lengths):
            for i in range(length):
                row = mask[g if len(mask) > 1 else 0, 0, i] if mask is not None else torch.arange(bucket.keys.shape[1]) <= i
                seen[bucket.queries[g, i].item()] = bucket.keys[g][row].tolist()
    assert seen == {
        **{0: [0], 1: [0, 1], 2: [0, 1, 2]},
        **{3: [1, 2, 3], 4: [2, 3, 4]},
        **{5: [1, 2, 5], 6: [2, 5, 6], 7: [5, 6, 7], 8: [6, 7, 8]},
    }


@pytest.mark.parametrize("call", [0, 100, 10**9])
def test_buckets_change_no_number(monkeypatch, call):
    """One segment a call, some together, all together."""
    monkeypatch.setattr(attention, "_CALL", call)
    for architecture in ("llama", "mistral", "gemma2"):
        assert_equal(tiny_model(architecture, size="pico"), "shared")
    buckets = to_inputs(FOREST, "shared").forest.buckets
    assert sum(len(b.lengths) for b in buckets) == len(FOREST.row)
    assert (len(buckets) == 1) == (call == 10**9)


def test_other_implementations_are_refused_for_shared():
    model = tiny_model("llama", size="pico")
    model.config._attn_implementation = "flash_attention_2"
    assert not attention.install(model)
    with pytest.raises(UserError, match=r"layout=shared does not go with model.attn_implementation=flash_attention_2"):
        Policy(model, layout="shared")


def test_generation_and_plain_forwards_do_not_notice():
    model = tiny_model("llama", size="pico").eval()
    prompt = torch.tensor([ids(6, 1)])
    mask = torch.ones_like(prompt)
    before = model(input_ids=prompt).logits, model.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False)
    policy = Policy(model, layout="shared")
    assert torch.equal(model(input_ids=prompt).logits, before[0])
    assert torch.equal(policy.generate(prompt, mask, max_new_tokens=8, do_sample=False), before[1][:, 6:])


def test_nothing_of_it_is_saved(tmp_path):
    policy = Policy(tiny_model("llama", size="pico"), layout="shared")
    save_pretrained(policy.hf, None, tmp_path)
    assert attention.PREFIX not in (tmp_path / "config.json").read_text()


def test_an_empty_micro_batch_runs():
    policy = Policy(tiny_model("llama", size="pico"), layout="shared")
    out = policy(MicroBatch.empty(NORM))
    assert out.logps.shape == (1,)
    (out.logps * policy.weights_of(MicroBatch.empty(NORM))).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3_text", "mistral"])
def test_padding_further_than_a_window_behind_the_last_key_has_a_gradient(architecture):
    """Prompt and completions share a bucket, and the shorter ones' padding sees nothing."""
    assert_equal(tiny_model(architecture, size="pico"), "shared", batch_of(group(24, 4, 6, seed=3)))


def test_capped_scores_are_not_left_to_sdpa():
    """Transformers before 5.24 load Gemma 2 with SDPA, which ignores the cap."""
    model, expected = (tiny_model("gemma2", size="pico") for _ in range(2))
    model.config._attn_implementation = "sdpa"
    assert torch.equal(outcome(model, "padded")[0], outcome(expected, "padded")[0])
    assert model.config._attn_implementation == "eager"
