"""Mixtures: order, weights, columns and types."""

import json
import pickle
from types import SimpleNamespace

import pytest
from datasets import Dataset
from torch.utils.data import DataLoader

from workbench.data.formats import normalise_row
from workbench.data.jsontext import decode_row
from workbench.data.sources import load_source
from workbench.data.streams import refuse_workers
from workbench.errors import UserError

A = [{"text": f"a{i}"} for i in range(40)]
B = [{"text": f"b{i}"} for i in range(10)]


def texts(spec, **kwargs):
    """Texts of a mixture, the same map-style and streaming."""
    rows = load_source(spec, **kwargs)["text"][:]
    assert [row["text"] for row in load_source(spec, streaming=True, **kwargs)] == rows
    return rows


def sources(**options):
    return [
        {"path": Dataset.from_list(A), **{k: v[0] for k, v in options.items()}},
        {"path": Dataset.from_list(B), **{k: v[1] for k, v in options.items()}},
    ]


def test_without_weights_one_follows_the_other():
    assert texts(sources()) == [r["text"] for r in A + B]
    assert texts(sources(), interleave="concatenate") == [r["text"] for r in A + B]
    assert texts({"sources": sources(limit=(2, 1))}) == ["a0", "a1", "b0"]


@pytest.mark.parametrize("interleave", [None, "first_exhausted"])
def test_weighted_draw_stops_when_a_source_has_given_its_last(interleave):
    rows = texts(sources(weight=(3, 1)), seed=5, interleave=interleave)
    ours, theirs = ([t for t in rows if t[0] == name] for name in "ab")
    assert ours == [f"a{i}" for i in range(len(ours))] and theirs == [f"b{i}" for i in range(len(theirs))]
    assert (len(ours) == 40) != (len(theirs) == 10), "exactly one is exhausted"
    assert rows[-1] in ("a39", "b9")


def test_all_exhausted_starts_the_shorter_over():
    rows = texts(sources(weight=(1, 1)), seed=5, interleave="all_exhausted")
    assert {r["text"] for r in A + B} <= set(rows) and rows[-1] == "a39"
    shorter = [t for t in rows if t[0] == "b"]
    assert shorter == [f"b{i % 10}" for i in range(len(shorter))] and len(shorter) > 10


def test_order_depends_on_the_seed_alone():
    first = texts(sources(weight=(0.5, 0.5)), seed=1)
    assert first == texts(sources(weight=(20, 20)), seed=1) != texts(sources(weight=(1, 1)), seed=2)
    assert first == texts(sources(), seed=1, interleave="first_exhausted"), "without weights all count the same"


def test_shares_follow_the_weights():
    many = [{"path": Dataset.from_list(A * 100), "weight": 3.0}, {"path": Dataset.from_list(B * 400), "weight": 1.0}]
    rows = texts(many, seed=0)[:2000]
    assert sum(t[0] == "a" for t in rows) / 2000 == pytest.approx(0.75, abs=0.03)  # three standard deviations


def test_source_column(tmp_path):
    for name, rows in (("a", A), ("b", B)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {"sources": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], "source_column": "source"}
    rows = load_source(spec)
    assert rows["source"][:] == [str(tmp_path / "a.jsonl")] * 40 + [str(tmp_path / "b.jsonl")] * 10
    assert list(load_source(spec, streaming=True)) == list(rows)


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def test_shapes_of_all_sources_are_unified():
    """Text, messages, ShareGPT with tool calls and further columns: each row means what it meant alone."""
    call = '{"name": "f", "arguments": {"x": 10.681}}'
    shapes = [
        [{"text": "plain", "id": 1}],
        [{"messages": CHAT, "id": 2.5, "note": "x"}],
        [
            {
                "conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": call}],
                "tools": '[{"name": "f"}]',
            }
        ],
        [{"messages": CHAT, "tools": [{"name": "g", "parameters": {"a": 1}}]}],
    ]
    mixed = load_source([Dataset.from_list(rows) for rows in shapes])
    assert mixed.column_names == ["text", "id", "messages", "note", "tools"]
    stream = load_source([Dataset.from_list(rows) for rows in shapes], streaming=True)
    assert [decode_row(row) for row in stream] == [decode_row(row) for row in mixed]
    for row, alone in zip(mixed, shapes, strict=True):
        got = {k: v for k, v in normalise_row(row).items() if v is not None}
        assert got == normalise_row(alone[0])


def test_types_must_agree():
    message = r"must have one data type; set convert on some of them\. .*language_modeling, .*prompt_completion"
    alpaca = [{"instruction": "Say hi.", "output": "hi"}]
    with pytest.raises(UserError, match=message):
        load_source([Dataset.from_list(A), Dataset.from_list(alpaca)])
    rows = load_source([Dataset.from_list(A[:1]), {"path": Dataset.from_list(alpaca), "convert": "language_modeling"}])
    assert [normalise_row(row) for row in rows] == [
        {"text": "a0"},
        {"messages": [{"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "hi"}]},
    ]


@pytest.mark.parametrize(
    ("spec", "kwargs", "message"),
    [
        (sources(weight=(1, 2)), {"interleave": "concatenate"}, "weight has no effect with interleave=concatenate"),
        (sources(weight=(1, 0)), {}, "weight=0 of <Dataset> must be a number above 0"),
        (sources(weight=(1, "2")), {}, "weight='2' of <Dataset> must be a number above 0"),
        (sources(), {"interleave": "first"}, "interleave='first' is not known"),
        (Dataset.from_list(A), {"interleave": "concatenate"}, "have no effect on a single source"),
        ([], {}, "The list of sources is empty."),
        ({"sources": sources(), "weights": [1, 2]}, {}, "Mixture option 'weights' is not known."),
        ([{"path": A, "wieght": 1}], {}, "Source option 'wieght' is not known. Did you mean 'weight'?"),
    ],
)
def test_mistakes(spec, kwargs, message):
    with pytest.raises(UserError) as error:
        load_source(spec, **kwargs)
    assert message in str(error.value)


def test_rows_that_have_a_path_column_are_rows():
    rows = [{"path": "a.png", "text": "x"}]
    assert list(load_source(rows)) == rows


def test_streams_resume_at_the_row_and_travel_to_other_processes():
    other = [{"text": r["text"], "x": 1.5} for r in B]

    def make():
        shapes = [Dataset.from_list([{**r, "x": {"k": 1}} for r in A]), Dataset.from_list(other)]
        return load_source(shapes, streaming=True, seed=3, interleave="first_exhausted")

    rows = list(make())
    assert list(pickle.loads(pickle.dumps(make()))) == rows
    assert {row["x"] for row in rows} == {'\x1e{"k": 1}', "\x1e1.5"}
    for position in (1, 9):
        stream = make()
        iterator = iter(stream)
        for _ in range(position):
            next(iterator)
        stream.load_state_dict(stream.state_dict())
        assert list(stream) == rows[position:]


@pytest.mark.parametrize("spec", [{"sources": sources(weight=(1, 1))}, sources(shuffle=(1, 2))[0]], ids=["mixed", "shuffled"])
def test_order_of_a_stream_does_not_depend_on_the_loader_worker(spec):
    stream = load_source(spec, streaming=True)
    rows = list(stream)
    assert rows == list(stream) == list(DataLoader(stream, batch_size=None, num_workers=1))


def test_several_loader_workers_are_refused(monkeypatch):
    refuse_workers()
    for count in (1, 2):
        monkeypatch.setattr("torch.utils.data.get_worker_info", lambda count=count: SimpleNamespace(num_workers=count))
        if count == 2:
            with pytest.raises(UserError, match="is read by one worker, not 2: set"):
                refuse_workers()
        else:
            refuse_workers()


def test_shuffled_streams_give_each_row_once_and_resume_at_the_row(monkeypatch):
    monkeypatch.setattr("workbench.data.sources._SHUFFLE_BUFFER", 7)

    def make():
        return load_source({"path": Dataset.from_list(A), "shuffle": 3}, streaming=True)

    rows = [row["text"] for row in make()]
    assert sorted(rows) == sorted(r["text"] for r in A) and rows != [r["text"] for r in A]
    stream = make()
    iterator = iter(stream)
    for _ in range(11):
        next(iterator)
    stream.load_state_dict(stream.state_dict())
    assert [row["text"] for row in stream] == rows[11:]
