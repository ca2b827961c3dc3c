"""The plan: the same rows whatever the execution, every row once, balance, K, and the errors."""

import numpy as np
import pytest

from workbench.data.plan import Planner, RowSizes, check_batch_sizes, deal, deal_in_order, epoch_order, to_ranks
from workbench.errors import UserError


def sizes(n=50, seed=0):
    tokens = np.random.default_rng(seed).integers(3, 60, n)
    return RowSizes(tokens, tokens - 1.0)


def flat(plan):
    return sorted(r for rank in plan.micro for micro in rank for r in micro)


def test_rows_of_a_step_do_not_depend_on_the_execution():
    reference = Planner(sizes(), batch_size=8, seed=3)
    for world_size, micro in ((1, 1), (1, 4), (2, 2), (3, 2), (5, 1), (8, 8)):
        planner = Planner(sizes(), batch_size=8, micro_batch_size=micro, world_size=world_size, seed=3)
        for epoch, step in ((0, 0), (0, 6), (1, 2)):
            ours, theirs = planner.step(epoch, step), reference.step(epoch, step)
            assert ours.rows == theirs.rows
            assert flat(ours) == sorted(theirs.rows)
            assert (ours.norm.tokens, ours.norm.sequences) == (theirs.norm.tokens, theirs.norm.sequences)


def test_an_epoch_visits_every_row_once_and_its_last_step_is_shorter():
    planner = Planner(sizes(), batch_size=8, micro_batch_size=2)
    steps = [planner.step(0, s) for s in range(planner.steps_per_epoch)]
    assert planner.steps_per_epoch == 7
    assert sorted(r for s in steps for r in s.rows) == list(range(50))
    assert steps[-1].norm.sequences == 2.0
    assert [len(s.micro[0]) for s in steps] == [4] * 7  # K is constant; the short step has empty micro-batches
    assert steps[-1].norm.micro_batches == 2.0


def test_epochs_differ_and_seeds_differ():
    orders = [epoch_order(50, seed=s, epoch=e, shuffle=True).tolist() for s, e in ((0, 0), (0, 1), (1, 0))]
    assert len({tuple(o) for o in orders}) == 3
    assert epoch_order(4, seed=0, epoch=9, shuffle=False).tolist() == [0, 1, 2, 3]


def test_drop_last():
    assert Planner(sizes(), batch_size=8, drop_last=True).steps_per_epoch == 6
    with pytest.raises(UserError, match=r"batch_size=64 is larger than the data set \(50 rows\)"):
        Planner(sizes(), batch_size=64, drop_last=True)


def test_deal_balances_by_tokens():
    bins = deal([100, 1, 1, 1, 50, 49], 2, max_rows=4)
    assert sorted(map(sorted, bins)) == [[0, 2], [1, 3, 4, 5]]


def test_deal_respects_both_bounds():
    lengths = [9, 9, 9, 2, 2, 30]
    bins = deal(lengths, 1, max_tokens=20)
    assert sorted(i for b in bins for i in b) == list(range(6))
    assert all(sum(lengths[i] for i in b) <= 20 or b == [5] for b in bins)  # an overlong row is alone
    assert all(len(b) <= 2 for b in deal(lengths, 3, max_rows=2))


def test_token_bound_holds_in_every_planned_step():
    s = sizes(200)
    for total_steps in (None, 50):
        planner = Planner(s, batch_size=16, micro_batch_tokens=128, total_steps=total_steps)
        for epoch, step in ((0, 0), (1, 5), (3, 10)):
            plan = planner.step(epoch, step)
            assert len(plan.micro[0]) == planner.num_micro
            assert all(s.tokens[m].sum() <= 128 for m in plan.micro[0] if m)


def test_num_micro_for_known_steps_is_no_more_than_for_unknown():
    known = Planner(sizes(200), batch_size=16, micro_batch_tokens=128, total_steps=20).num_micro
    assert known <= Planner(sizes(200), batch_size=16, micro_batch_tokens=128).num_micro


def test_in_order_dealing_is_by_position():
    planner = Planner(sizes(16), batch_size=8, micro_batch_size=2, world_size=2, shuffle=False, balance="none")
    assert planner.step(0, 0).micro == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert deal_in_order(5, 3, 2) == [[0, 1], [2, 3], [4]]


def test_ranks_get_similar_loads():
    s = sizes(400)
    plan = Planner(s, batch_size=64, micro_batch_size=4, world_size=4).step(0, 0)
    loads = [sum(s.tokens[m].sum() for m in rank) for rank in plan.micro]
    assert max(loads) <= 1.05 * min(loads)


def test_to_ranks_fills_up_with_empty_ones():
    assert to_ranks([[1], [2], [3]], 2) == [[[1], []], [[2], [3]]]


def test_scale_undoes_every_division():
    planner = Planner(sizes(), batch_size=8, micro_batch_size=2, world_size=2, extra_scale=lambda k: float(k))
    assert (planner.num_micro, planner.scale) == (2, 8.0)  # K * ranks * K under DeepSpeed


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((0, None, None), "batch_size=0 must be at least 1"),
        ((8, 3, None), r"batch_size=8 is not divisible by data.micro_batch_size=3. Allowed micro-batch sizes: 1, 2, 4, 8"),
        ((8, 16, None), "not divisible by data.micro_batch_size=16"),
        ((8, 4, 100), "exclude each other"),
        ((8, None, 100, "none"), "needs data.balance=tokens"),
    ],
)
def test_impossible_sizes(args, message):
    with pytest.raises(UserError, match=message):
        check_batch_sizes(*args)
