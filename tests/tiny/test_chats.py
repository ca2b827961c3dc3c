"""Conversations made by script for the recipe of a real model."""

import pytest

from workbench.errors import UserError
from workbench.tiny.chats import general, identity


def texts(rows, role):
    return {m["content"] for row in rows for m in row["messages"] if m["role"] == role}


def test_every_identity_row_says_name_and_maker():
    answers = texts(identity(name="Ada", maker="Bo", size=400), "assistant")
    assert all("Ada" in a and "Bo" in a for a in answers if "call me" in a or "name is" in a or "I am" in a)
    assert all("Ada" in a for a in answers)
    assert not any("{" in a for a in answers)


@pytest.mark.parametrize("make", [identity, general])
def test_test_questions_are_not_trained_on(make):
    assert not texts(make(size=500), "user") & texts(make(size=500, split="test"), "user")


def test_size_and_seed():
    assert len(identity(size=7)) == 7
    assert identity(size=50) == identity(size=60)[:50]
    assert identity(size=50, seed=1) != identity(size=50)
    assert sorted(map(str, identity(size=63))) == sorted(map(str, identity(size=63, seed=1)))  # each combination once
    with pytest.raises(UserError, match="gives no rows"):
        general(size=0)


def test_sums_are_right():
    for row in general(size=300):
        question, answer = (m["content"] for m in row["messages"])
        if question.startswith("How much"):
            a, b = (int(w) for w in question.rstrip("?").split() if w.isdigit())
            assert answer == f"{a} plus {b} is {a + b}."
