"""Draws: keyed numbers, what is done to the logits, and the distribution that comes out."""

import numpy as np
import pytest
import torch

from workbench.rollouts.sampling import draw, process, uniforms
from workbench.rollouts.types import Sampling

PROBS = torch.tensor([[0.5, 0.3, 0.1, 0.1]])


def kept(sampling, probs=PROBS, seen=None):
    return (process(probs.log(), sampling, seen) > float("-inf")).nonzero()[:, 1].tolist()


def test_a_number_depends_on_key_and_position_alone():
    whole = uniforms((3, 1, 4, 1, 5), 40)
    for start in range(12):
        assert np.array_equal(uniforms((3, 1, 4, 1, 5), 7, start), whole[start : start + 7])
    assert not np.isin(uniforms((3, 1, 4, 1, 6), 40), whole).any()
    assert not np.isin(uniforms((31, 4, 1, 5), 40), whole).any()  # keys are no string of digits
    assert ((whole >= 0) & (whole < 1)).all()


def test_numbers_are_uniform_and_uncorrelated_over_keys():
    table = np.stack([uniforms((0, 0, 0, 0, sample), 50) for sample in range(400)])
    counts = np.histogram(table, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 3.3 / np.sqrt(399 * 50)


def test_numbers_stay_what_they_are():
    assert uniforms((1, 2, 3, 0, 1), 3).tolist() == pytest.approx([0.64349814, 0.13660582, 0.75772092], abs=1e-8)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_p": 0.8}, [0, 1]),
        ({"top_p": 0.81}, [0, 1, 2]),
        ({"top_p": 0.01}, [0]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"min_p": 0.2}, [0, 1, 2, 3]),
        ({"min_p": 0.21}, [0, 1]),
        ({"top_k": 2, "top_p": 0.6}, [0]),  # .5 / .8 > .6: top-p is a share of what top-k left
        ({"temperature": 0.5, "top_p": 0.69}, [0]),  # .25 / .36 = .694
        ({"temperature": 0.0}, [0]),
    ],
    ids=str,
)
def test_what_is_kept(options, expected):
    assert kept(Sampling(**options)) == expected


def test_a_penalty_comes_before_the_temperature():
    logits, seen = torch.tensor([[2.0, -2.0, 1.0]]), torch.tensor([[True, True, False]])
    got = process(logits, Sampling(repetition_penalty=2.0, temperature=0.5), seen)
    assert got.tolist() == [[2.0, -8.0, 2.0]]


def test_a_truncated_draw_has_the_log_probability_over_its_support():
    drawn = draw(PROBS.log(), torch.tensor([0.7], dtype=torch.float64), Sampling(top_p=0.8))
    assert drawn.tokens.tolist() == [1]
    assert drawn.logps.exp().tolist() == pytest.approx([0.375], abs=1e-7)
    assert (drawn.support.tolist(), drawn.counts.tolist()) == ([0, 1], [2])


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.75}, {"min_p": 0.3}, {"temperature": 1.5, "top_k": 4, "top_p": 0.9}],
    ids=str,
)
def test_draws_follow_the_probabilities(options):
    sampling, count = Sampling(**options), 20_000
    logits = torch.tensor([[0.3, -1.0, 1.2, 0.0, 0.7]])
    numbers = torch.from_numpy(np.concatenate([uniforms((7, 0, 0, 0, s), 100) for s in range(count // 100)]))
    drawn = draw(logits.expand(count, -1), numbers, sampling)
    probs = process(logits, sampling).double().softmax(-1)[0]
    found, expected = torch.bincount(drawn.tokens, minlength=5).double(), probs * count
    assert (found[probs == 0] == 0).all()
    assert ((found - expected)[probs > 0] ** 2 / expected[probs > 0]).sum() < 18.5  # 4 degrees of freedom, p = 0.001
    assert torch.allclose(drawn.logps, probs.log()[drawn.tokens], atol=1e-6)


def test_the_borders_of_the_unit_interval():
    logits = torch.tensor([[float("-inf"), 0.0, -80.0, float("-inf")]])
    numbers = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    drawn = draw(logits.expand(2, -1), numbers, Sampling())
    assert set(drawn.tokens.tolist()) <= {1, 2}
    assert torch.isfinite(drawn.logps).all()
