"""Recipes of papers for their rows."""

import math

import pytest

from workbench.data.recipes import llama2_margin, pairs_by_correctness, rso_keep
from workbench.data.sources import load_source
from workbench.errors import UserError

PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}


@pytest.mark.parametrize(
    ("rating", "margin"),
    [
        ("Significantly better", 1.0),
        ("better", 2 / 3),
        ("slightly better", 1 / 3),
        ("negligibly better / unsure", 0.0),
        ("unsure", 0.0),
    ],
)
def test_margins_of_ratings(rating, margin):
    assert llama2_margin({"preference_label": rating}) == {"margin": margin}
    assert llama2_margin({"rating": rating}, "rating", scale=3) == {"margin": 3 * margin}


def test_ratings_that_are_none():
    with pytest.raises(UserError, match=r"'slighly better' is not a rating\. Did you mean 'slightly better'"):
        llama2_margin({"preference_label": "slighly better"})
    with pytest.raises(UserError, match="no column 'preference_label'"):
        llama2_margin(PAIR)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_source_maps_its_rows(streaming):
    rows = [{**PAIR, "rated": rating} for rating in ("better", "unsure")]
    spec = {"path": rows, "columns": {"rated": "preference_label"}, "map": "workbench.data.recipes:llama2_margin"}
    found = list(load_source(spec, streaming=streaming))
    assert [row["margin"] for row in found] == [pytest.approx(2 / 3), 0.0]
    assert [row["preference_label"] for row in found] == ["better", "unsure"] and found[0]["chosen"] == "2"


def test_rejection_sampling_keeps_the_best_at_a_low_temperature_and_any_at_a_high_one():
    rewards = [0.0, 3.0, 1.0, 2.0]
    assert rso_keep(rewards, 2, 1e-3) == [False, True, False, True]
    hot = [rso_keep(rewards, 1, 1e6, seed=seed) for seed in range(50)]
    assert all(keep == [True, False, False, False] for keep in hot), "the first is as good as any"
    assert rso_keep(rewards, 9, 0.1) == [True] * 4
    assert rso_keep([], 2, 0.1) == []


def test_the_acceptance_is_that_of_the_paper():
    """The first pass accepts a sample with probability exp((r - max) / beta)."""
    accepted = sum(rso_keep([-1.0, 0.0], 1, 2.0, seed=seed)[0] for seed in range(4000)) / 4000
    assert accepted == pytest.approx(math.exp(-1 / 2), abs=0.03)


def test_rejection_sampling_is_seeded_and_checked():
    rewards = [0.1 * i for i in range(20)]
    assert rso_keep(rewards, 5, 1.0, seed=3) == rso_keep(rewards, 5, 1.0, seed=3)
    assert len({tuple(rso_keep(rewards, 5, 1.0, seed=seed)) for seed in range(5)}) > 1
    for bad in ({"count": 0, "beta": 1.0}, {"count": 1, "beta": 0.0}):
        with pytest.raises(UserError):
            rso_keep(rewards, **bad)
    with pytest.raises(UserError, match="finite"):
        rso_keep([float("nan")], 1, 1.0)


def test_pairs_of_a_right_and_a_wrong_sample():
    pairs = pairs_by_correctness("1+1=", ["2", "3", "2", "4"], [True, False, True, 0.0], count=5)
    assert sorted((p["chosen"], p["rejected"]) for p in pairs) == [("2", "3"), ("2", "4")]
    assert len(pairs_by_correctness("1+1=", ["2", "3", "4"], [1, 0, 0])) == 1
    assert pairs_by_correctness("1+1=", ["2", "2"], [True, True]) == []
    with pytest.raises(UserError, match="1 verdicts for 2 completions"):
        pairs_by_correctness("1+1=", ["2", "3"], [True])
