"""Rows into Arrow with nothing lost or changed."""

import numpy as np
import pytest
from datasets import List, Value

from workbench.data import rows as arrow
from workbench.data.jsontext import MARK, decode_row, decode_value, encode_value
from workbench.errors import UserError


def through_arrow(*rows):
    dataset = arrow.build(lambda: rows)
    return dataset, [decode_row(row) for row in dataset]


@pytest.mark.parametrize(
    "value",
    [
        "plain",
        "",
        "12",
        "true",
        '["a"]',
        MARK + "odd",
        3,
        3.0,
        10.681,
        0.1234567890123456,
        1e-300,
        True,
        [],
        {},
        [None, "x"],
        {"a": None},
    ],
)
def test_encoded_values_come_back_exactly(value):
    back = decode_value(encode_value(value))
    assert back == value and type(back) is type(value)
    assert isinstance(encode_value(value), str)


def test_only_values_that_arrow_would_change_are_encoded():
    assert encode_value("plain") == "plain" and encode_value(None) is None
    dataset, _ = through_arrow({"messages": [{"role": "user", "content": "a"}], "ids": [1, 2], "n": 1, "x": None})
    assert dataset.features == {
        "messages": List({"role": Value("string"), "content": Value("string")}),
        "ids": List(Value("int64")),
        "n": Value("int64"),
        "x": Value("string"),
    }


@pytest.mark.parametrize(
    "values",
    [
        [{"a": 1}, {"b": 2}],  # other keys
        [{"a": 1, "b": 2}, {"b": 2, "a": 1}],  # another order is another text in a template
        [[{"x": 1}], [{"x": 1.5}]],  # 1 must not become 1.0
        [[1], ["1"]],
        ["12", 12, ["12"], None],
        [{"deep": [{"city": "Oslo"}]}, {"deep": [{"n": 10.681}]}],
        [{}, {"a": 1}],
        [2**70, 1],
        [True, 1],
        [True, "false"],
        [[], [1], None],
        [{"a": None}, {"a": "x"}],
        [MARK + "x", "y"],
    ],
)
def test_values_of_a_column_come_back_exactly(values):
    for order in (values, values[::-1]):
        _, back = through_arrow(*({"x": value} for value in order))
        assert repr([row["x"] for row in back]) == repr(order)


def test_whole_and_broken_numbers_make_a_column_of_numbers():
    dataset, back = through_arrow({"score": 8}, {"score": 8.5})
    assert dataset.features["score"] == Value("float64") and [r["score"] for r in back] == [8.0, 8.5]


def test_columns_of_all_rows_in_order_of_appearance():
    dataset, back = through_arrow({"a": "x"}, {"b": 2, "a": "y"})
    assert dataset.column_names == ["a", "b"] and back == [{"a": "x", "b": None}, {"a": "y", "b": 2}]


def test_numpy_values():
    _, back = through_arrow(
        {"x": np.float64(0.5), "y": np.array([1, 2]), "z": {"k": [np.int64(3)]}}, {"z": {"l": np.bool_(True)}}
    )
    assert back == [{"x": 0.5, "y": [1, 2], "z": {"k": [3]}}, {"x": None, "y": None, "z": {"l": True}}]


def test_objects_that_no_data_set_holds():
    with pytest.raises(UserError, match="Column 'x' holds a object"):
        through_arrow({"x": object()})
    with pytest.raises(UserError, match="Row 1001, column 'text': the text is not valid Unicode"):
        arrow.build(lambda: ({"text": "\ud83d" if i == 1001 else "a"} for i in range(1200)))


def test_a_failed_write_leaves_nothing_behind():
    def rows():
        yield {"text": "a"}
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left on device"):
        arrow.build(rows, kinds={"text": "string"}, key="failing")
    assert not [f for f in arrow.cache_dir().iterdir() if f.name.startswith("failing")]


def test_cached_rows_are_read_once_and_keep_their_fingerprint():
    first = arrow.build(lambda: [{"text": "a"}], key="once")
    again = arrow.build(lambda: pytest.fail("read again"), key="once")
    assert list(first) == list(again) == [{"text": "a"}] and first._fingerprint == again._fingerprint == "once"


def test_streams_refuse_what_their_first_rows_did_not_show():
    kinds = arrow.scan([{"text": "a", "n": 1, "x": {"k": 1}}])
    row = {"text": 5, "n": None, "x": ["anything", 1.5]}
    assert decode_row(arrow.encode_row(row, kinds, "encode")) == row, "text and nested columns take any value"
    with pytest.raises(UserError, match="Column 'late' is new in row 7: a stream takes its columns from its first 1000 rows"):
        arrow.encode_row({"text": "b", "late": 1}, kinds, "encode", 7)
    with pytest.raises(UserError, match="Column 'n' holds 'many', where the rows before hold int64"):
        arrow.encode_row({"n": "many"}, kinds, "encode")


VALUES = (
    None,
    True,
    3,
    2**70,
    0.5,
    "a",
    b"a",
    [],
    [1],
    ["a"],
    [None, "b"],
    [[1]],
    {},
    {"a": 1},
    {"a": None},
    {"b": 1},
    {"a": "x"},
)
NESTED = (*VALUES, [{"a": 1}], [{"a": 1}, {"a": None}], [{"a": 1, "b": "x"}], {"a": {"b": 1}}, {"a": [1]}, (1,), {1: 2})


@pytest.mark.parametrize("first", NESTED, ids=repr)
def test_a_value_that_fits_leaves_the_kind_as_it_is(first):
    kind = arrow.kind_of(first)
    fitting = [value for value in NESTED if arrow.fits(value, kind)]
    assert None in fitting
    assert all(arrow.merge(kind, arrow.kind_of(value)) == kind for value in fitting)
    assert first in fitting or kind == "json" or isinstance(first, tuple)  # those are looked at more closely
