"""The engines' protocol without vLLM: seeds, arguments, answers, a server that dies and comes back, errors."""

import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_server import LORA, POSTS, FakeServer

from workbench.errors import UserError
from workbench.models.peft import PeftSpec, apply_peft
from workbench.models.policy import Policy
from workbench.rollouts import vllm_engine
from workbench.rollouts.nccl import NCCLTransfer
from workbench.rollouts.types import Request, Sampling
from workbench.rollouts.vllm_common import as_array, asked_logprobs, cut_at_stop, sampling_arguments, seed_of, support_of
from workbench.rollouts.vllm_engine import VLLMEngine
from workbench.rollouts.vllm_server import VLLMServerEngine
from workbench.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def policy():
    return Policy(tiny_model(size="pico"))


@pytest.fixture
def server():
    found = FakeServer()
    yield found
    found.close()


def requests(n, prompt=(1, 2, 3)):
    return [Request([*prompt, 4 + i], (0, 1, i, 0, 0)) for i in range(n)]


def engine_of(server, policy, tokenizer, **options):
    options = {"backoff": 0.01, "timeout": 5.0, "check_sync": None, **options}
    engine = VLLMServerEngine(base_url=server.url, **options)
    engine.start(policy, tokenizer)
    return engine


# -- seeds and arguments


def test_seeds_are_those_of_keys_and_of_nothing_else():
    keys = [(seed, window, row, attempt, sample) for seed in (0, 1) for window in (0, 1) for row in (0, 11) for attempt in (0, 1)
            for sample in (0, 1)]  # fmt: skip
    seeds = {seed_of(key) for key in keys}
    assert len(seeds) == len(keys) and all(0 <= s < 2**63 for s in seeds)
    assert seed_of((0, 1, 11, 0, 1)) != seed_of((0, 11, 1, 0, 1)) != seed_of((0, 1, 1, 10, 1))
    assert seed_of((1, 2, 3)) == 8149998584550362645  # on every machine, in every run


def test_every_field_of_the_sampling_reaches_the_engine():
    request = Request([1, 2], (3,))
    plain = sampling_arguments(request, Sampling(8), 64, 100)
    changes = {
        "max_new_tokens": ("max_tokens", 5),
        "temperature": ("temperature", 0.5),
        "top_k": ("top_k", 7),
        "top_p": ("top_p", 0.9),
        "min_p": ("min_p", 0.1),
        "repetition_penalty": ("repetition_penalty", 1.2),
        "stop": ("stop", ("a",)),
        "end_ids": ("stop_token_ids", (9,)),
    }
    for field, (argument, value) in changes.items():
        changed = sampling_arguments(request, Sampling(**{"max_new_tokens": 8, field: value}), 64, 100)
        assert changed[argument] == (list(value) if isinstance(value, tuple) else value) != plain[argument], field


def test_as_many_log_probabilities_are_asked_as_the_support_needs():
    asked = [asked_logprobs(s, 100) for s in (Sampling(), Sampling(top_k=5), Sampling(top_p=0.9), Sampling(top_k=500))]
    assert asked == [0, 5, 100, 100] and asked_logprobs(Sampling(min_p=0.1), 100) == 100


def test_absent_log_probabilities_are_nan_and_never_zero():
    np.testing.assert_array_equal(as_array([None, float("nan"), -0.5]), [np.nan, np.nan, -0.5])


def test_the_support_leaves_out_what_could_not_be_drawn():
    assert support_of({4: -0.1, 9: float("-inf"), 2: -3.0}, 4).tolist() == [2, 4]
    assert support_of({4: None}, 4).tolist() == [4]


def test_a_completion_keeps_the_token_that_completes_a_stop_text(tokenizer):
    ids = tokenizer("abc def ghi", add_special_tokens=False)["input_ids"]
    size = cut_at_stop(ids, Sampling(stop=("d",)), tokenizer)
    assert "d" in tokenizer.decode(ids[:size]) and "d" not in tokenizer.decode(ids[: size - 1])


# -- the server


def test_answers_are_those_of_their_requests_whatever_order_they_come_in(server, policy, tokenizer):
    engine = engine_of(server, policy, tokenizer)
    engine.sync_weights(policy, 3)
    asked = requests(23)
    rollouts = engine.generate(asked, Sampling(8))
    for request, rollout in zip(asked, rollouts, strict=True):
        assert rollout.token_ids == [seed_of(request.key) >> shift & 63 for shift in (0, 6, 12)]
        assert rollout.version == 3 and rollout.finish == "length" and rollout.support is None
    assert engine.context == 64


def test_weights_go_before_the_first_answer_and_the_prefix_cache_after_them(server, policy, tokenizer):
    engine = engine_of(server, policy, tokenizer)
    with pytest.raises(UserError, match="sync_weights"):
        engine.generate(requests(1), Sampling(8))
    engine.sync_weights(policy, 0)
    assert [path for path, _ in server.calls] == ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
    first = server.weights
    with torch.no_grad():
        next(iter(policy.parameters())).add_(1.0)
    engine.sync_weights(policy, 1)
    assert server.weights != first
    folders = [Path(body["kwargs"]["weights_path"]) for path, body in server.calls if path == "/collective_rpc"]
    assert [folder.exists() for folder in folders] == [False, True]
    engine.close()
    assert not folders[1].exists()


@pytest.mark.parametrize("deaths", [[1], [7], [20], [3, 15]])
def test_a_server_that_dies_and_comes_back_loses_and_duplicates_nothing(server, policy, tokenizer, deaths):
    engine = engine_of(server, policy, tokenizer, max_concurrency=4)
    engine.sync_weights(policy, 2)
    trained = server.weights
    server.deaths = list(deaths)
    asked = requests(20)
    rollouts = engine.generate(asked, Sampling(8))
    assert server.lives == 1 + len(deaths) and server.weights == trained
    for request, rollout in zip(asked, rollouts, strict=True):
        assert rollout.token_ids == [seed_of(request.key) >> shift & 63 for shift in (0, 6, 12)] and rollout.version == 2
        assert rollout.logps[0] == -1.0, "written with the run's weights, never with those the server was started with"
    engine.close()


def test_a_server_restarted_between_generations_gets_its_weights_again(server, policy, tokenizer):
    engine = engine_of(server, policy, tokenizer)
    engine.sync_weights(policy, 2)
    trained = server.weights
    server._born()
    engine.generate(requests(3), Sampling(8))
    assert server.seen[0]["weights"] == trained


def test_a_server_that_stays_away_is_one_line(server, policy, tokenizer):
    engine = engine_of(server, policy, tokenizer, timeout=0.2)
    engine.sync_weights(policy, 0)
    server.away = 10**6
    with pytest.raises(UserError, match=r"did not .* within 0.2 s .*; start it"):
        engine.generate(requests(2), Sampling(8))
    with pytest.raises(UserError, match="list its models"):
        engine_of(server, policy, tokenizer, timeout=0.2)


def test_a_plain_endpoint_is_refused_unless_no_weights_are_asked_for(policy, tokenizer):
    plain = FakeServer(posts={"/v1/completions"})
    with pytest.raises(UserError, match=r"takes no weights.*VLLM_SERVER_DEV_MODE=1; method.engine.sync=none"):
        engine_of(plain, policy, tokenizer)
    with pytest.raises(UserError, match=r"needs an adapter|takes no weights"):
        engine_of(plain, policy, tokenizer, sync="adapter")
    engine = engine_of(plain, policy, tokenizer, sync="none")
    engine.sync_weights(policy, 4)
    assert len(engine.generate(requests(2), Sampling(8))) == 2 and plain.calls == []
    plain.close()


def test_refusals_of_the_server_are_told_with_the_way_out(server, policy, tokenizer):
    engine = engine_of(server, policy, tokenizer)
    engine.sync_weights(policy, 0)
    server.refusal = (400, "Requested sample logprobs of 100, which is greater than max allowed: 20")
    with pytest.raises(UserError, match=r"max allowed: 20\); start it with --max-logprobs -1"):
        engine.generate(requests(1), Sampling(8, top_p=0.9))
    with pytest.raises(UserError, match="serves no 'other'; it has: base"):
        engine_of(server, policy, tokenizer, model_name="other")


def test_a_prompt_beyond_the_context_is_one_line_before_anything_is_asked(server, policy, tokenizer):
    engine = engine_of(server, policy, tokenizer)
    engine.sync_weights(policy, 0)
    with pytest.raises(UserError, match=r"a prompt of 61 tokens and a completion of up to 8 are more than the 64"):
        engine.generate([*requests(4), Request([1] * 61, (5,))], Sampling(8))
    assert server.seen == []


def test_absent_log_probabilities_of_the_server_are_nan(server, policy, tokenizer):
    engine = engine_of(server, policy, tokenizer)
    engine.sync_weights(policy, 0)
    server.answer = {"logprobs": {"token_logprobs": [None, float("nan"), -0.5]}}
    np.testing.assert_array_equal(engine.generate(requests(1), Sampling(8))[0].logps, [np.nan, np.nan, -0.5])


def test_the_support_of_the_server_is_what_it_gives_a_probability(server, policy, tokenizer):
    engine = engine_of(server, policy, tokenizer)
    engine.sync_weights(policy, 0)
    rollout = engine.generate(requests(1), Sampling(8, top_k=3))[0]
    for token, support in zip(rollout.token_ids, rollout.support, strict=True):
        assert set(support) == {token, 9}, "7 has minus infinity"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"token_ids": None}, "gives no token ids"),
        ({"prompt_token_ids": [1]}, "answered another prompt"),
        ({"finish_reason": "abort"}, "ended a completion with 'abort'"),
    ],
)
def test_answers_that_are_not_whole_are_refused(server, policy, tokenizer, answer, message):
    engine = engine_of(server, policy, tokenizer)
    engine.sync_weights(policy, 0)
    server.answer = answer
    with pytest.raises(UserError, match=message):
        engine.generate(requests(1), Sampling(8))


def test_adapters_are_served_by_version(tokenizer):
    server = FakeServer(posts=POSTS | LORA)
    policy = Policy(apply_peft(tiny_model(size="pico"), PeftSpec(r=4)))
    engine = engine_of(server, policy, tokenizer, sync="adapter")
    engine.sync_weights(policy, 0)
    engine.generate(requests(2), Sampling(8))
    engine.sync_weights(policy, 1)
    assert len(server.adapters) == 1 and server.adapters[0].endswith("-1")
    server._born()
    rollouts = engine.generate(requests(2), Sampling(8))
    assert [body["model"].rpartition("-")[2] for body in server.seen] == ["0", "0", "1", "1"]
    assert [rollout.version for rollout in rollouts] == [1, 1]
    assert not any(path == "/collective_rpc" for path, _ in server.calls)
    server.close()


def test_another_model_on_the_server_is_refused_by_names_and_shapes(policy, tokenizer, tmp_path):
    tiny_model(size="pico", num_hidden_layers=1).save_pretrained(tmp_path)
    server = FakeServer(root=str(tmp_path))
    with pytest.raises(UserError, match=r"unexpected: model.layers.1\..* and \d+ more.*start it with the same model"):
        engine_of(server, policy, tokenizer)
    server.close()


def test_weights_that_did_not_arrive_are_found(server, policy, tokenizer):
    with pytest.raises(UserError, match=r"weights of step 0 were sent, .* nats per token off"):
        engine_of(server, policy, tokenizer, check_sync=0.1).sync_weights(policy, 0)


# -- weights from GPU to GPU, with a stand-in for vLLM's trainer engine


def test_the_nccl_path_drives_vllms_own_transfer(monkeypatch, policy):
    routes = {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"}
    server = FakeServer(posts=routes | {"/shutdown_weight_transfer_engine"})
    got = {}

    class Factory:
        @staticmethod
        def trainer_init(info, *, client, source):
            client.init_weight_transfer_engine({"master_port": info["master_port"]})

            def send_weights():
                client.start_weight_update()
                meta = source.metadata()
                client.update_weights({"names": [m[0] for m in meta]})
                got.update(source)
                assert [(m[0], m[2]) for m in meta] == [(name, tuple(value.shape)) for name, value in got.items()]
                client.finish_weight_update()

            got["info"] = info
            return types.SimpleNamespace(send_weights=lambda: (got.clear(), send_weights()))

    base = "vllm.distributed.weight_transfer"
    stubs = {
        "vllm": {},
        "vllm.distributed": {},
        base: {},
        f"{base}.base": {"ParamMeta": lambda *parts: parts, "WeightSource": object},
        f"{base}.factory": {"WeightTransferTrainerFactory": Factory},
        f"{base}.nccl_engine": {"NCCLTrainerInitInfo": dict},
    }
    for name, content in stubs.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    from workbench.rollouts.http import Client

    transfer = NCCLTransfer(Client(server.url, 5.0), 5555, 0)
    transfer.send(policy, "run-1")
    transfer.send(policy, "run-2")
    transfer.close()
    paths = [path for path, _ in server.calls]
    assert paths.count("/init_weight_transfer_engine") == 1 and paths.count("/update_weights") == 2
    assert [body["weight_version"] for path, body in server.calls if path == "/finish_weight_update"] == ["run-1", "run-2"]
    state = policy.causal_lm.state_dict()
    assert got.keys() == state.keys() and all(torch.equal(got[name], state[name]) for name in state)
    server.close()


# -- refusals at the start


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size=2.*only 1 is allowed.*engine=vllm_server"),
        ({"sync": "none"}, "method.engine.sync='none' is not known"),
        ({"gpu_memory_utilization": 0.0}, "above 0"),
        ({"model": "x"}, "has no effect with method.engine.sync=merged"),
        ({"quantization": "awq"}, "needs method.engine.model"),
        ({"max_model_len": 0}, "at least 1"),
    ],
)
def test_options_of_the_engine_that_do_nothing_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        VLLMEngine(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_what_needs_cuda_says_so():
    with pytest.raises(UserError, match="enable_sleep_mode=true needs CUDA"):
        VLLMEngine(enable_sleep_mode=True)
    with pytest.raises(UserError, match="transport=nccl needs CUDA"):
        VLLMServerEngine(transport="nccl")


def test_a_missing_package_is_one_line_with_the_command(policy, tokenizer, monkeypatch):
    monkeypatch.setattr(vllm_engine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'workbench\[vllm\]'"):
        VLLMEngine().start(policy, tokenizer)


def test_importing_the_engine_does_not_import_vllm():
    import subprocess

    code = "import sys, workbench.rollouts.vllm_engine, workbench.rollouts.vllm_server; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert importlib.util.find_spec("workbench.rollouts.vllm_engine")
