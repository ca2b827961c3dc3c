"""The policy as its own engine: the trainer's log-probabilities, the same completions in any company, and how they end."""

import numpy as np
import pytest
import torch

from workbench.data.batch import MicroBatch, Role
from workbench.errors import UserError
from workbench.losses.reduce import Normalisers
from workbench.models.logps import LogitsProcessing
from workbench.models.policy import Policy, set_gradient_checkpointing
from workbench.rollouts import room
from workbench.rollouts.torch_engine import TorchEngine
from workbench.rollouts.types import Request, Sampling
from workbench.tiny.model import ARCHITECTURES, tiny_model
from workbench.tiny.tokenizer import tiny_tokenizer

NORM = Normalisers(1.0, 1.0, 1.0, 1.0)
RECURRENT = ("mamba", "qwen3_next")
ALL = {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3}


def engine(policy, **options):
    made = TorchEngine(**options)
    made.start(policy, tiny_tokenizer())
    return made


def prompts(*lengths):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, 90, (n,), generator=generator).tolist() for n in lengths]


def requests(found, samples=3, seed=0):
    return [Request(ids, (seed, 0, row, 0, s)) for row, ids in enumerate(found) for s in range(samples)]


def batch_of(asked, rollouts):
    rows = []
    for request, rollout in zip(asked, rollouts, strict=True):
        prompt, tokens = list(request.prompt_ids), rollout.token_ids
        rows.append(
            {
                "input_ids": prompt + tokens,
                "weights": [0.0] * len(prompt) + [1.0] * len(tokens),
                "lengths": [len(prompt), len(tokens)],
                "parents": [-1, 0],
                "roles": [Role.PROMPT, Role.COMPLETION],
            }
        )
    return MicroBatch.from_rows(rows, list(range(len(rows))), NORM)


def trainer_logps(policy, asked, rollouts, sampling):
    """What the trainer makes of the same tokens."""
    support = None
    if sampling.truncates:
        sets = [ids for r in rollouts for ids in r.support]
        support = (torch.from_numpy(np.concatenate(sets)), torch.tensor([len(s) for s in sets]))
    processing = LogitsProcessing(sampling.temperature, sampling.repetition_penalty, support)
    return policy(batch_of(asked, rollouts), processing=processing).logps.detach().double().numpy()


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 0.6},
        {"top_p": 0.8},
        {"top_k": 5},
        {"min_p": 0.1},
        {"repetition_penalty": 1.4},
        ALL,
    ],
    ids=str,
)
def test_log_probabilities_are_the_trainers(options, layout):
    policy = Policy(tiny_model("llama", size="pico"), layout=layout)
    asked, sampling = requests(prompts(1, 9, 30, 50)), Sampling(max_new_tokens=15, end_ids=(7, 9), **options)
    rollouts = engine(policy).generate(asked, sampling)
    mine = np.concatenate([r.logps for r in rollouts])
    assert np.abs(mine - trainer_logps(policy.eval(), asked, rollouts, sampling)).max() < 1e-5
    assert (rollouts[0].support is not None) == sampling.truncates


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a not in RECURRENT])
def test_every_family(architecture):
    policy = Policy(tiny_model(architecture, size="pico"))
    asked, sampling = requests(prompts(1, 23, 40), samples=2), Sampling(max_new_tokens=12, end_ids=(7,))
    rollouts = engine(policy).generate(asked, sampling)
    mine = np.concatenate([r.logps for r in rollouts])
    assert np.abs(mine - trainer_logps(policy.eval(), asked, rollouts, sampling)).max() < 1e-5


@pytest.mark.parametrize("architecture", RECURRENT)
def test_a_recurrent_state_is_refused(architecture):
    with pytest.raises(UserError, match=r"engine=torch does not go with .*recurrent state.*engine=vllm"):
        engine(Policy(tiny_model(architecture, size="pico")))


@pytest.mark.parametrize("options", [{}, ALL], ids=str)
def test_company_and_order_change_nothing(options):
    policy = Policy(tiny_model("llama", size="pico"))
    asked, sampling = requests(prompts(*range(1, 50, 7))), Sampling(max_new_tokens=16, end_ids=(7, 9, 30), **options)
    expected = engine(policy).generate(asked, sampling)
    for size in (1, 4):
        order = np.random.default_rng(size).permutation(len(asked))
        found = engine(policy, batch_size=size).generate([asked[i] for i in order], sampling)
        for i, rollout in zip(order, found, strict=True):
            assert (rollout.token_ids, rollout.finish) == (expected[i].token_ids, expected[i].finish)
            assert np.allclose(rollout.logps, expected[i].logps, atol=1e-5)


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a not in RECURRENT])
def test_a_static_cache_changes_nothing(architecture):
    policy = Policy(tiny_model(architecture, size="pico"))
    asked, sampling = requests(prompts(3, 23, 40)), Sampling(max_new_tokens=24, end_ids=(7, 9, 30))
    dynamic, static = (engine(policy, cache=kind).generate(asked, sampling) for kind in ("dynamic", "static"))
    assert len({len(r.token_ids) for r in static}) > 1
    for a, b in zip(dynamic, static, strict=True):
        assert (a.token_ids, a.finish) == (b.token_ids, b.finish)
        assert np.allclose(a.logps, b.logps, rtol=0, atol=3e-6)  # masked columns change the order of a sum


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("lengths", [(30,), (9, 30)], ids=str)  # without padding and with it
def test_the_cache_has_room_for_prompt_and_completion_and_no_more(kind, lengths, monkeypatch):
    made, name = [], "room" if kind == "dynamic" else "static_room"
    original = getattr(room, name)
    monkeypatch.setattr(room, name, lambda *args: made.append(original(*args)) or made[-1])
    policy = Policy(tiny_model("llama", size="pico"))
    engine(policy, cache=kind).generate(requests(prompts(*lengths)), Sampling(max_new_tokens=70))
    (cache,) = made
    widths = {(layer.keys if kind == "static" else layer.buffers[0]).shape[2] for layer in cache.layers}
    assert widths == {100}


def test_an_unknown_cache_is_refused():
    with pytest.raises(UserError, match=r"method.engine.cache='statik' is not known. Did you mean 'static'\?"):
        TorchEngine(cache="statik")


def test_samples_and_seeds_differ_and_repeat():
    policy = Policy(tiny_model("llama", size="pico"))
    sampling, mine = Sampling(max_new_tokens=12), engine(policy)
    first, again, other = (
        [tuple(r.token_ids) for r in mine.generate(requests(prompts(6), 8, seed), sampling)] for seed in (0, 0, 1)
    )
    assert first == again
    assert len(set(first)) == 8
    assert not set(first) & set(other)


def test_changed_weights_change_the_log_probabilities_and_the_version():
    policy = Policy(tiny_model("llama", size="pico"))
    mine, asked, sampling = engine(policy), requests(prompts(8)), Sampling(max_new_tokens=10)
    before = mine.generate(asked, sampling)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    mine.sync_weights(policy, 3)
    after = mine.generate(asked, sampling)
    assert (before[0].version, after[0].version) == (0, 3)
    old = trainer_logps(policy.eval(), asked, before, sampling)
    assert np.abs(old - np.concatenate([r.logps for r in before])).max() > 0.01
    new = trainer_logps(policy, asked, after, sampling)
    assert np.abs(new - np.concatenate([r.logps for r in after])).max() < 1e-5


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_greedy_is_what_transformers_generates(penalty):
    policy = Policy(tiny_model("llama", size="pico"))
    sampling = Sampling(max_new_tokens=20, temperature=0.0, repetition_penalty=penalty)
    for ids in prompts(1, 12, 33):
        options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "repetition_penalty": penalty}
        expected = policy.generate(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.int64), **options)[0].tolist()
        (rollout,) = engine(policy).generate([Request(ids, (0,))], sampling)
        assert rollout.token_ids == expected
        assert rollout.logps.tolist() == [0.0] * 20  # nothing else could have been drawn


def test_each_end_token_ends_and_is_kept():
    policy = Policy(tiny_model("llama", size="pico"))
    asked = requests(prompts(4, 11), samples=20)
    ends = tuple(range(10, 40))
    rollouts = engine(policy).generate(asked, Sampling(max_new_tokens=8, end_ids=ends))
    assert {r.finish for r in rollouts} == {"stop", "length"}
    for r in rollouts:
        assert not set(r.token_ids[:-1]) & set(ends)
        assert (r.token_ids[-1] in ends) == (r.finish == "stop")
        assert r.finish == "stop" or len(r.token_ids) == 8
    assert any(len(r.token_ids) == 1 for r in rollouts)  # only an end token


def test_a_stop_text_may_lie_across_tokens():
    policy, tokenizer = Policy(tiny_model("llama", size="pico")), tiny_tokenizer()
    asked = requests(prompts(9), samples=1)
    (free,) = engine(policy).generate(asked, Sampling(max_new_tokens=24))
    pieces = [tokenizer.decode([t]) for t in free.token_ids]
    at = next(
        i for i in range(6, 23) if len(pieces[i]) == len(pieces[i + 1]) == 1 and pieces[i].isascii() and pieces[i + 1].isascii()
    )
    stop = pieces[at] + pieces[at + 1]
    (stopped,) = engine(policy).generate(asked, Sampling(max_new_tokens=24, stop=("never there", stop)))
    text = tokenizer.decode(stopped.token_ids)
    assert stopped.finish == "stop"
    assert text.endswith(stop)
    assert text.count(stop) == 1
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]


def test_prompts_must_fit():
    policy = Policy(tiny_model("llama", size="pico", max_position_embeddings=32))
    mine, (short, long) = engine(policy), prompts(30, 32)
    assert mine.context == 32
    (rollout,) = mine.generate([Request(short, (0,))], Sampling(max_new_tokens=20))
    assert (len(rollout.token_ids), rollout.finish) == (2, "length")
    with pytest.raises(UserError, match="a prompt of 32 tokens leaves no room in the model's context of 32"):
        mine.generate([Request(long, (0,))], Sampling())
    with pytest.raises(UserError, match="no tokens"):
        mine.generate([Request([], (0,))], Sampling())
    assert mine.generate([], Sampling()) == []


def test_training_state_is_neither_disturbed_nor_disturbing():
    plain, trained = (Policy(tiny_model("llama", size="pico", attention_dropout=p)) for p in (0.0, 0.5))
    set_gradient_checkpointing(trained.causal_lm, True)
    trained.train()
    trained.hf.model.norm.eval()
    asked, sampling = requests(prompts(5, 17)), Sampling(max_new_tokens=10)
    modes = [m.training for m in trained.modules()]
    found = engine(trained).generate(asked, sampling)
    assert [m.training for m in trained.modules()] == modes
    assert [r.token_ids for r in found] == [r.token_ids for r in engine(plain).generate(asked, sampling)]
    assert trained(batch_of(asked, found)).logps.requires_grad


def test_companies_move_logits_by_rounding_alone():
    """What the docstring says of equality: one row beside 63 others."""
    policy = Policy(tiny_model("llama", size="nano")).eval()
    ids = torch.tensor(prompts(*[40] * 64))
    together = policy.decode(ids, room.room())
    alone = torch.cat([policy.decode(row[None], room.room()) for row in ids])
    assert (together - alone).abs().max() < 1e-5 * together.abs().max()
