"""The cells of the table of classes and members, as parameters of tests."""

import pytest

from workbench.invariants.classes import class_names, load_class
from workbench.invariants.mutants import CANONICAL
from workbench.invariants.planted_bugs import MUTANTS
from workbench.invariants.session import TWO_PROCESSES

# Beside every class's own run: what a change is most likely to break, in under a minute.
QUICK_MEMBERS = ("micro_batch_2",)
QUICK_MUTANTS = (
    "accumulation_counted_twice",
    "beta2_changed",
    "chosen_and_rejected_swapped",
    "clip_off",
    "kl_sign",
    "label_shift_by_one",
    "mean_of_means",
    "pad_attended",
    "rate_1_percent_up",
    "reference_is_the_policy",
    "same_order_every_epoch",
    "stale_rollouts",
    "weight_decay_lost",
)


def members(*, two_processes):
    """``(class, member)`` for every cell that is run."""
    return [
        pytest.param(cls, name, marks=[pytest.mark.quick] if name in QUICK_MEMBERS else [], id=f"{cls.name}-{name}")
        for cls in map(load_class, class_names())
        for name, member in cls.members.items()
        if (member.way in TWO_PROCESSES) == two_processes
    ]


def mutants(*, two_processes):
    """Every planted bug whose killer runs in this process, or in two others."""
    return [
        pytest.param(bug, marks=[pytest.mark.quick] if bug.name in QUICK_MUTANTS else [], id=bug.name)
        for bug in MUTANTS.values()
        if needs_two_processes(bug) == two_processes
    ]


def needs_two_processes(bug):
    return bug.member != CANONICAL and load_class(bug.killer).members[bug.member].way in TWO_PROCESSES
