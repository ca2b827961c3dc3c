"""What online methods hand an engine: weights that are right at each moment, and the precision that training has."""

import pytest
import torch
from online_rig import PROMPTS, run_online, script, scripted
from support import SaveAt

from workbench.callbacks.averaging import EMA
from workbench.errors import UserError
from workbench.methods.grpo import GRPO
from workbench.rollouts.types import Sampling

ONE_STEP = {"steps_per_generation": 1, "num_iterations": 1}
SETS = {"eval": {"path": "tiny:sums", "kwargs": {"size": 2}}}


def test_averaged_weights_are_sent_for_evaluation_alone():
    """An engine with weights of its own must not go on with those that were evaluated."""
    sent, engine, average = [], scripted(), EMA(decay=0.5, evaluate=True)

    def sync(policy, version):
        weights = torch.cat([p.detach().flatten() for p in policy.parameters()])
        sent.append((version, average.is_applied, float(weights.double().square().sum())))

    engine.sync_weights = sync
    trainer = {"max_steps": 3, "val_check_interval": 1, "num_sanity_val_steps": 0}
    run_online(GRPO, ONE_STEP, SETS, trainer, engine=engine, callbacks=[average], lr=1e-2)
    assert [s[:2] for s in sent] == [(0, False), (-2, True), (1, False), (-3, True), (2, False), (-4, True)]
    assert len({weights for _, _, weights in sent}) == 6


def test_completions_are_drawn_in_the_precision_of_training():
    """In mixed precision a sampler without it would draw from another distribution than the one that is trained."""
    found = []

    def answer(prompt_ids, key):
        found.append(torch.is_autocast_enabled("cpu"))
        return script(prompt_ids, key)

    trainer = {"max_steps": 1, "num_sanity_val_steps": 0, "limit_val_batches": 1, "val_check_interval": 1}
    run_online(GRPO, ONE_STEP, SETS, {**trainer, "precision": "bf16-mixed"}, engine=scripted(answer))
    assert len(found) == PROMPTS["batch_size"] + 2 and all(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": float("inf")}, "method.temperature=inf must be at least 0, and finite"),
        ({"stop": "end"}, "method.stop='end': expects a list of texts."),
        ({"stop": [""]}, "method.stop=[''] has an empty text"),
        ({"eval_sampling": {"temperature": None}}, "method.eval_sampling.temperature=None: expects a number."),
        ({"eval_sampling": {"top_k": "a"}}, "method.eval_sampling.top_k='a': expects an integer or null."),
        ({"eval_sampling": {"num_generations": 2.5}}, "method.eval_sampling.num_generations=2.5: expects an integer."),
        ({"eval_sampling": {"stop": "end"}}, "method.eval_sampling.stop='end': expects a list of texts or null."),
    ],
    ids=str,
)
def test_sampling_that_cannot_be_is_refused_in_one_line(options, message):
    with pytest.raises(UserError) as caught:
        run_online(GRPO, {**ONE_STEP, **options}, trainer={"max_steps": 1})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_texts_to_stop_at_may_be_none_for_evaluation():
    _, module, _ = run_online(GRPO, {**ONE_STEP, "stop": ["x"], "eval_sampling": {"stop": None}}, trainer={"max_steps": 1})
    assert isinstance(module.eval_sampling, Sampling) and module.eval_sampling.stop == ("x",)


def test_a_window_is_not_gone_on_with_under_other_settings(tmp_path):
    """Its log-probabilities would be compared with those of another distribution; from the end of a window all is open."""
    own = {"engine": None}
    run_online(GRPO, own, callbacks=[SaveAt(tmp_path, [2, 4])], trainer={"max_steps": 4})
    cases = {
        "method.temperature=1.0, and this run has 0.5": {"temperature": 0.5},
        "method.top_k=None, and this run has 9": {"top_k": 9},
        "does not hold ref_logps": {"beta": 0.1},
        "does not hold old_entropy": {"top_entropy_quantile": 0.5},
    }
    for message, options in cases.items():
        with pytest.raises(UserError, match=message):
            run_online(GRPO, {**own, **options}, checkpoint=tmp_path / "2.ckpt")
        assert run_online(GRPO, {**own, **options}, checkpoint=tmp_path / "4.ckpt", trainer={"max_steps": 5})[0]
    assert run_online(GRPO, {**own, "max_completion_length": 5}, checkpoint=tmp_path / "2.ckpt", trainer={"max_steps": 4})[0]


def test_a_metric_of_ones_own_is_a_number():
    with pytest.raises(UserError, match="compute_metrics must return a dict of numbers: could not convert"):
        trainer = {"max_steps": 1, "val_check_interval": 1, "num_sanity_val_steps": 0}
        run_online(GRPO, {**ONE_STEP, "compute_metrics": lambda prompts, completions, **c: {"a": "x"}}, SETS, trainer)
