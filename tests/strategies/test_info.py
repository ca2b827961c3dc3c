"""What ranks tell each other."""

import pytest

from workbench.errors import UserError
from workbench.strategies import info


def test_a_failure_of_one_rank_is_one_of_all(monkeypatch):
    told = []

    def two_ranks(other):
        return lambda value, strategy: told.append(value) or [value, other]

    monkeypatch.setattr(info, "gather", two_ranks("of the other"))
    with pytest.raises(UserError, match="of the other"), info.failing_together(None):
        pass
    with pytest.raises(UserError, match="of this one"), info.failing_together(None):
        raise UserError("of this one")
    with pytest.raises(ZeroDivisionError), info.failing_together(None):
        raise ZeroDivisionError("division by zero")
    assert told == [None, "of this one", "another process failed: ZeroDivisionError('division by zero')"]
    monkeypatch.setattr(info, "gather", two_ranks(None))
    with info.failing_together(None):
        pass
