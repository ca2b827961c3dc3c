"""Windows of prompts and the plan of their completions: geometry, coverage, order, sharing, replacements, streams."""

from itertools import islice

import numpy as np
import pytest

from workbench.data.prompts import Geometry, PromptDataset, PromptPlanner, PromptStream
from workbench.errors import UserError


def planner(num_rows: int, batch_size: int, group: int, *, per_window: int = 1, sweeps: int = 1, **options) -> PromptPlanner:
    return PromptPlanner(num_rows, Geometry(batch_size, group, per_window, sweeps), **options)


def windows(plan: PromptPlanner, epoch: int = 0):
    return [plan.window(epoch, step) for step in range(plan.steps_per_epoch)]


@pytest.mark.parametrize("num_rows", [1, 6, 7, 8, 23])
@pytest.mark.parametrize(
    ("batch_size", "group", "per_window", "sweeps"), [(6, 2, 1, 1), (4, 4, 2, 1), (6, 4, 2, 3), (3, 2, 2, 2)]
)
def test_every_prompt_is_answered_once_an_epoch(num_rows, batch_size, group, per_window, sweeps):
    """Report 56: the steps of an epoch follow the published formula, whatever the last window holds."""
    plan = planner(num_rows, batch_size, group, per_window=per_window, sweeps=sweeps)
    assert plan.steps_per_epoch == sweeps * -(-num_rows * group // batch_size) or num_rows * group % batch_size
    found = {w.number: w for w in windows(plan)}
    assert sorted(row for w in found.values() for row in w.prompts) == list(range(num_rows))
    assert plan.steps_per_epoch == sum(sweeps * -(-len(w.prompts) * group // batch_size) for w in found.values())
    assert all(w.first == min(s for s, v in enumerate(windows(plan)) if v.number == w.number) for w in found.values())


def test_the_example_of_seven_prompts():
    """7 prompts, 2 completions each, 6 per step: 3, 3 and 1 prompts in 3 steps."""
    plan = planner(7, 6, 2)
    assert plan.steps_per_epoch == 3 and [len(w.prompts) for w in windows(plan)] == [3, 3, 1]
    assert planner(7, 6, 2, drop_last=True).steps_per_epoch == 2


def test_order_depends_on_seed_and_epoch_alone():
    one, two = planner(20, 8, 2, seed=3), planner(20, 8, 2, seed=3, world_size=4, micro_batch_size=1)
    assert windows(one) == windows(two) and windows(one, 1) == windows(two, 1)
    assert windows(one) != windows(one, 1) and windows(one) != windows(planner(20, 8, 2, seed=4))
    assert [w.prompts[0] for w in windows(planner(20, 8, 2, shuffle=False))] == [0, 4, 8, 12, 16]


GEOMETRIES = [(b, g, s) for b in (1, 2, 6, 8, 10) for g in (1, 2, 3, 4) for s in (1, 2)]


@pytest.mark.parametrize(("batch_size", "group", "per_window"), GEOMETRIES)
def test_a_geometry_works_or_is_refused_with_a_way_out(batch_size, group, per_window):
    """Report 73: one message at construction, which proposes sizes that work."""
    if batch_size * per_window % group == 0:
        assert Geometry(batch_size, group, per_window).prompts * group == batch_size * per_window
        return
    with pytest.raises(UserError, match="holds no whole number of groups") as error:
        Geometry(batch_size, group, per_window)
    proposed = str(error.value).partition("set data.batch_size=")[2].partition(",")[0]
    assert all(Geometry(int(size), group, per_window) for size in proposed.split(" or "))


def test_bad_counts():
    for bad in ({"num_generations": 0}, {"steps_per_generation": 0}, {"num_iterations": -1}):
        with pytest.raises(UserError, match="at least 1"):
            Geometry(**{"batch_size": 4, "num_generations": 2, **bad})


# -- completions ----------------------------------------------------------------------------------------------------


def dealt(plan: PromptPlanner, lengths: list[int], group: list[int], rows=None):
    rows = list(range(len(lengths))) if rows is None else rows
    options = {"tokens": lengths, "weight": lengths, "group": group, "counted": [True] * len(lengths), "longest": 9}
    return plan.plan_step(rows, **options)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("micro", [None, 1, 2, 4])
def test_every_completion_is_trained_once_whatever_the_cut(world_size, micro):
    plan = planner(9, 12, 4, world_size=world_size, micro_batch_size=micro)
    lengths, group = list(range(1, 13)), [i // 4 for i in range(12)]
    step = dealt(plan, lengths, group)
    assert sorted(r for rank in step.micro for k in rank for r in k) == list(range(12))
    assert all(len(rank) == plan.num_micro for rank in step.micro)
    assert all(len(k) <= plan.max_rows for rank in step.micro for k in rank)
    assert (step.norm.tokens, step.norm.sequences, step.norm.constant) == (sum(lengths), 12, 12 * 9)


def test_the_completions_of_a_prompt_stay_together_where_there_is_room():
    plan = planner(9, 12, 4, micro_batch_size=4)
    group = [i // 4 for i in range(12)]
    for k in dealt(plan, [5, 1, 9, 3, 2, 2, 7, 8, 4, 4, 4, 4], group).micro[0]:
        assert len({group[row] for row in k}) == 1


def test_untrained_completions_are_not_in_the_normalisers():
    plan = planner(2, 4, 2)
    options = {"tokens": [5, 6, 7, 8], "weight": [2, 0, 3, 0], "group": [0, 0, 1, 1], "counted": [True, False, True, True]}
    norm = plan.plan_step([0, 1, 2, 3], **options, longest=10).norm
    assert (norm.tokens, norm.sequences, norm.unmasked, norm.constant) == (5, 3, 2, 30)


def test_replacements_are_new_and_keyed():
    plan = planner(10, 4, 2, seed=1)
    taken = {0, 1, 2}
    found = plan.replacements(5, 1, taken, 4)
    assert len(set(found)) == 4 and not taken & set(found)
    assert found == plan.replacements(5, 1, taken, 4) != plan.replacements(5, 2, taken, 4)
    assert len(plan.replacements(5, 1, set(range(8)), 4)) == 2, "no more than there are"
    assert plan.replacements(5, 1, set(range(10)), 4) == []


# -- tickets --------------------------------------------------------------------------------------------------------

ROWS = [{"input_ids": [i]} for i in range(7)]


def test_only_the_first_ticket_of_a_window_holds_prompts():
    plan = planner(7, 4, 2, per_window=2, sweeps=2, micro_batch_size=2, shuffle=False)
    data = PromptDataset(ROWS, plan)
    tickets = [data[0, step, k] for step in range(plan.steps_per_epoch) for k in range(2)]
    opening = [t for t in tickets if t.rows is not None]
    assert [len(t.rows) for t in opening] == [4, 3] and [t.step for t in opening] == [0, 4]
    assert [t.offset for t in tickets[::2]] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [t.closes_step for t in tickets[:2]] == [False, True] and len(data) == len(tickets)
    assert tickets[0].to("cpu") is tickets[0]


def test_a_stream_fills_every_window_and_resumes_in_one():
    stream = PromptStream(ROWS, Geometry(4, 2, 1, 2), 1)
    tickets = list(islice(stream, 12))
    opening = [t for t in tickets if t.rows is not None]
    asked = [row["input_ids"][0] for t in opening for row in t.rows]
    assert asked == [i % 7 for i in range(len(asked))], "pass after pass"
    stream.skip = 3
    later = list(islice(stream, 9))
    assert [(t.step, t.plan.number) for t in later] == [(t.step, t.plan.number) for t in tickets[3:]]
    assert later[0].rows is None, "the window that the run stopped in is in its checkpoint"


def test_a_stream_ends_where_it_is_too_short():
    assert list(PromptStream([], Geometry(4, 2), 1)) == []


def test_epoch_windows_have_numbers_of_their_own():
    plan = planner(7, 4, 2)
    numbers = [w.number for epoch in range(3) for w in windows(plan, epoch)]
    assert numbers == sorted(set(numbers)) and len(numbers) == len(np.unique(numbers))
