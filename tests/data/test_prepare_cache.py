"""The cache of prepared data, streams, processes and speed."""

import json
import threading

import pytest
from datasets import Dataset, IterableDataset
from rig import CHATML, M6, assistant, slow, t1, t2, t3, user, with_template

from workbench.data.align import TextEncoder
from workbench.data.prepare import PrepareSpec, prepare
from workbench.errors import UserError

ROWS = [{"messages": [user(f"question {i}"), assistant("answer " * (i % 5 + 1))]} for i in range(50)]


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """Number of texts of every call of the tokenizer."""
    calls: list[int] = []
    real = TextEncoder.encode

    def encode(self, texts, places=None):
        calls.append(len(texts))
        return real(self, texts, places)

    monkeypatch.setattr(TextEncoder, "encode", encode)
    return calls


def run(rows, tokenizer, tmp_path, num_proc=None, **spec):
    return prepare(Dataset.from_list(rows), tokenizer, PrepareSpec(**spec), cache_dir=tmp_path, num_proc=num_proc)


@pytest.mark.parametrize("make", [t2, slow])
def test_an_unchanged_second_start_tokenises_nothing(make, tmp_path, encoded):
    first, report = run(ROWS, with_template(make(), CHATML), tmp_path)
    count = len(encoded)
    second, again = run(ROWS, with_template(make(), CHATML), tmp_path)
    assert (count, len(encoded)) == (1, 1)
    assert (first.to_dict(), report) == (second.to_dict(), again)
    assert len(list(tmp_path.iterdir())) == 1


def test_every_dependence_is_in_the_key(tmp_path, encoded):
    def run_one(rows=ROWS, template=CHATML, make=t2, eos=None, **spec):
        tokenizer = with_template(make(), template)
        if eos:
            tokenizer.eos_token = eos
        before = len(encoded)
        made, _ = run(rows, tokenizer, tmp_path, **spec)
        assert len(encoded) > before, (template, spec)
        return made[0]

    plain = run_one()
    changed = run_one(template=CHATML.replace("'\n' + m.content", "' \n' + m.content"))
    assert changed["input_ids"] != plain["input_ids"]
    run_one(make=t3)
    run_one(eos="<|im_start|>")
    run_one(rows=[*ROWS[:-1], {"messages": [user("question 49"), assistant("other")]}])
    run_one(rows=ROWS[::-1])
    assert run_one(train_on="assistant")["weights"] != plain["weights"]
    for spec in ({"max_length": 40}, {"truncation": "keep_end"}, {"role_weights": {"user": 1.0}}, {"packing": "bfd"}):
        run_one(**spec)
    for spec in (
        {"fold_system": True},
        {"template": "{{- a }}" + CHATML},
        {"template": "{{- a }}" + CHATML, "chat_template_kwargs": {"a": 1}},
        {"on_bad_row": "skip"},
        {"data_type": "language_modeling"},
    ):
        run_one(**spec)


def test_rows_that_are_selected_or_reloaded_are_known_by_content(tmp_path, encoded):
    tokenizer = with_template(t2(), CHATML)
    whole = Dataset.from_list(ROWS)
    whole.select(range(10)).save_to_disk(tmp_path / "ten")
    prepare(whole.select(range(10)), tokenizer, PrepareSpec(), cache_dir=tmp_path / "cache")
    prepare(Dataset.load_from_disk(tmp_path / "ten"), tokenizer, PrepareSpec(), cache_dir=tmp_path / "cache")
    assert len(encoded) == 1
    prepare(whole.select(range(1, 11)), tokenizer, PrepareSpec(), cache_dir=tmp_path / "cache")
    assert len(encoded) == 2


def test_racing_processes_make_it_once(tmp_path, encoded):
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(run(ROWS, with_template(t2(), CHATML), tmp_path)[0].to_dict()))
        for _ in range(4)
    ]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(encoded) == 1
    assert len(results) == 4 and all(r == results[0] for r in results)


def test_a_failure_leaves_nothing_behind(tmp_path):
    with pytest.raises(UserError):
        run([*ROWS, {"messages": [user("a"), user("b")]}], with_template(t3(), M6), tmp_path)
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")] == []


def test_a_bad_row_in_another_process_is_named(tmp_path):
    rows = [{"messages": [user("q"), assistant("a")]}] * 9 + [{"messages": [user("a"), user("b")]}]
    with pytest.raises(UserError, match="Row 9, column 'messages'"):
        run(rows, with_template(t3(), M6), tmp_path, num_proc=2)


def test_the_report_is_kept_as_json(tmp_path):
    _, report = run(ROWS, with_template(t2(), CHATML), tmp_path, train_on="assistant")
    stored = json.loads(next(tmp_path.glob("*/report.json")).read_text())
    assert (stored["rows_in"], stored["trained_tokens"]) == (50, report.trained_tokens)
    assert report.trained_tokens == sum(len("answer ") * (i % 5 + 1) + 1 for i in range(50))


def test_processes_do_not_change_rows_or_counts(tmp_path):
    rows = [*ROWS, {"messages": [user("untrained")]}, *ROWS]
    one, report = run(rows, with_template(t2(), CHATML), tmp_path / "one", train_on="assistant")
    two, again = run(rows, with_template(t2(), CHATML), tmp_path / "two", num_proc=2, train_on="assistant")
    assert one.to_dict() == two.to_dict()
    assert report == again
    assert (report.rows_in, report.rows_out) == (101, 100)


# -- streams ------------------------------------------------------------------------------------------------------------


def stream(rows) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


@pytest.mark.parametrize(
    ("rows", "spec"),
    [
        (ROWS * 3, {"train_on": "assistant"}),
        ([{"text": "word " * (i + 1)} for i in range(70)], {"max_length": 50}),
        ([{"prompt": "p", "chosen": "c" * (i + 1), "rejected": "c" * 5, "margin": 1.5} for i in range(9)], {}),
        ([{"prompt": "p", "completion": "c", "label": i % 2 == 0} for i in range(9)], {}),
        ([{"prompt": [user("q")], "answer": i} for i in range(9)], {}),
    ],
)
def test_a_stream_gives_the_same_features_and_counts(rows, spec):
    tokenizer = with_template(t2(), CHATML)
    made, report = prepare(Dataset.from_list(rows), tokenizer, PrepareSpec(**spec), cache_dir=False)
    lazy, running = prepare(stream(rows), tokenizer, PrepareSpec(**spec))
    assert running.rows_in == 0
    assert list(lazy) == list(made)
    report.warnings.clear()
    assert running == report


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_a_stream_is_packed_in_windows(strategy):
    rows = [{"text": "x" * (3 * i % 17 + 1)} for i in range(60)]
    spec = PrepareSpec(max_length=12, packing=strategy, packing_buffer=25)
    lazy, report = prepare(stream(rows), t1(), spec)
    packs = list(lazy)
    expected = [
        pack
        for start in (0, 25, 50)
        for pack in prepare(Dataset.from_list(rows[start : start + 25]), t1(), spec, cache_dir=False)[0]
    ]
    assert packs == expected
    assert (report.rows_out, report.packs) == (60, len(packs))
    assert report.tokens == sum(len(pack["input_ids"]) for pack in packs)
    assert report.trained_tokens == sum(1 for pack in packs for weight in pack["weights"] if weight)


def test_a_stream_without_any_usable_row_stops():
    rows = [{"prompt": "x" * 30, "completion": "y"}] * 1100
    lazy, _ = prepare(stream(rows), t2(), PrepareSpec(max_length=10))
    with pytest.raises(UserError, match="No row of 'train' is left of 1"):
        list(lazy)


def test_a_bad_row_of_a_stream_is_named():
    rows = [{"messages": [user("a"), assistant("b")]}] * 70 + [{"messages": [user("a"), user("b")]}]
    lazy, _ = prepare(stream(rows), with_template(t3(), M6), PrepareSpec())
    with pytest.raises(UserError, match="Row 70, column 'messages'"):
        list(lazy)
