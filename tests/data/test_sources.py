"""Sources other than files, and the options that every source takes."""

import sys
import types

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from workbench.data.jsontext import decode_row
from workbench.data.source_spec import SourceSpec, source_kind
from workbench.data.sources import load_source, split_off
from workbench.errors import UserError

ROWS = [{"prompt": f"{i}+1=", "completion": f"{i + 1}", "n": i} for i in range(8)]


@pytest.fixture
def module(monkeypatch):
    """A module of the user's."""
    made = types.ModuleType("my_rows")
    made.listed = lambda count=3: ROWS[:count]
    made.splits = lambda: DatasetDict(train=Dataset.from_list(ROWS[:6]), test=Dataset.from_list(ROWS[6:]))
    made.stream = lambda: IterableDataset.from_generator(lambda: iter(ROWS))
    made.by_split = lambda split, seed: [{"text": f"{split} {seed} {i}"} for i in range(4)]
    made.even = lambda row: row["n"] % 2 == 0
    made.none = lambda row: False
    made.number = 5
    made.bad_rows = lambda: ["text"]

    def generated(count=2):
        for row in ROWS[:count]:
            yield {**row, "info": {"k": row["n"]} if row["n"] else {"other": 1.5}}

    def failing():
        yield ROWS[0]
        raise KeyError("lost")

    def broken():
        raise RuntimeError("no such\nthing")

    made.generated, made.failing, made.broken = generated, failing, broken
    monkeypatch.setitem(sys.modules, "my_rows", made)
    return made


def failure(spec, **kwargs):
    with pytest.raises(UserError) as error:
        list(load_source(spec, **kwargs))
    assert "\n" not in str(error.value)
    return str(error.value)


def both(spec, **kwargs):
    rows = [decode_row(row) for row in load_source(spec, **kwargs)]
    stream = load_source(spec, streaming=True, **kwargs)
    assert isinstance(stream, IterableDataset) and stream.column_names == list(rows[0])
    assert [decode_row(row) for row in stream] == rows
    return rows


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("tiny:sum", "tiny"),
        ("my_rows:listed", "import"),
        ("pkg.mod:Class.method", "import"),
        ("some-org/rows", "hub"),
        ("imdb", "hub"),
        ("data/rows.jsonl", "files"),
        ("./rows", "files"),
        ("~/rows", "files"),
        ("a/b/c", "files"),
        ("rows-*.json", "files"),
        ("rows.csv.gz", "files"),
        ([1], "memory"),
    ],
)
def test_kinds(path, kind):
    assert source_kind(path) == kind


# -- functions ----------------------------------------------------------------------------------------------------------


def test_functions(module):
    assert both("my_rows:listed") == ROWS[:3]
    assert both({"path": "my_rows:listed", "kwargs": {"count": 5}, "split": "train[1:]"}) == ROWS[1:5]
    assert both("my_rows:generated") == [{**ROWS[0], "info": {"other": 1.5}}, {**ROWS[1], "info": {"k": 1}}]
    assert both("my_rows:splits") == ROWS[:6]
    assert both("my_rows:splits", split="test") == ROWS[6:]
    assert [decode_row(r) for r in load_source("my_rows:stream", streaming=True)] == ROWS
    assert "is a stream; set data.streaming=true" in failure("my_rows:stream")


def test_split_and_seed_reach_functions_that_ask_for_them(module):
    assert both("my_rows:by_split", seed=7)[0] == {"text": "train 7 0"}
    assert both({"path": "my_rows:by_split", "split": "dev[:1]", "kwargs": {"seed": 1}}) == [{"text": "dev 1 0"}]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_rows:lisetd", "my_rows:lisetd: my_rows has no 'lisetd'. Did you mean 'listed'?"),
        ("no_such_module:rows", "cannot import no_such_module: there is no such module"),
        ("my_rows:number", "my_rows:number is a int, not a function."),
        ("my_rows:broken", "my_rows:broken failed: RuntimeError: no such"),
        ("my_rows:failing", "my_rows:failing failed: KeyError: 'lost'"),
        ("my_rows:bad_rows", "row 0: expected a dictionary, got str."),
    ],
)
def test_functions_that_fail(module, path, message):
    assert message in failure(path)


def test_arguments_that_do_not_fit(module):
    spec = {"path": "my_rows:listed", "kwargs": {"cuont": 5}}
    assert "my_rows:listed: got an unexpected keyword argument 'cuont'. Its parameters: count." in failure(spec)


def test_modules_in_the_working_directory_are_found(tmp_path, monkeypatch):
    (tmp_path / "rows_of_mine.py").write_text("def rows():\n    return [{'text': 'a'}]\n")
    (tmp_path / "needs_another.py").write_text("import not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert list(load_source("rows_of_mine:rows")) == [{"text": "a"}]
    assert "it needs the module 'not_installed_anywhere'" in failure("needs_another:rows")


# -- saved data sets, memory, hub, tiny ---------------------------------------------------------------------------------


def test_saved_data_sets(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    DatasetDict(train=Dataset.from_list(ROWS[:2]), dev=Dataset.from_list(ROWS[2:])).save_to_disk(tmp_path / "two")
    assert both(str(tmp_path / "one"), split="test") == ROWS
    assert both({"path": str(tmp_path / "two"), "split": "dev[:1]"}) == ROWS[2:3]
    assert "has no split 'test'. Splits: train, dev. Set split" in failure(str(tmp_path / "two"), split="test")
    (tmp_path / "one" / "state.json").write_text("{}")
    assert "the saved data set cannot be read" in failure(str(tmp_path / "one"))


def test_objects_in_memory():
    assert both(ROWS) == ROWS and both(Dataset.from_list(ROWS)) == ROWS
    assert both({"path": Dataset.from_list(ROWS), "limit": 2}) == ROWS[:2]
    assert both(DatasetDict(train=Dataset.from_list(ROWS))) == ROWS
    assert list(load_source(Dataset.from_list(ROWS).with_format("numpy"))) == ROWS
    assert "has no split 'test'" in failure(DatasetDict(train=Dataset.from_list(ROWS)), split="test")
    assert "a int holds no rows" in failure(5)
    assert "needs a path; got the options text" in failure({"text": "a"})


def test_streams_learn_their_columns():
    stream = IterableDataset.from_generator(lambda: iter([{"text": "a", "x": {"b": 1}}, {"text": "b", "x": {"c": 10.681}}]))
    assert stream.column_names is None
    loaded = load_source(stream, streaming=True)
    assert loaded.column_names == ["text", "x"]
    assert [decode_row(row) for row in loaded] == [{"text": "a", "x": {"b": 1}}, {"text": "b", "x": {"c": 10.681}}]


def test_transformed_data_sets_are_refused():
    dataset = Dataset.from_list(ROWS)
    dataset.set_transform(lambda batch: pytest.fail("the transform ran"))
    assert "a transform that runs at every access" in failure(dataset)


def test_hub_names_that_cannot_be_reached():
    message = failure("no-such-organisation/no-such-rows")
    assert "neither a file or folder here nor a data set that can be reached on the hub" in message
    assert "is a file format, not a data set" in failure("csv")


def test_hub_errors_become_one_line(monkeypatch):
    def load_dataset(path, name, *, split, revision, data_files, streaming):
        calls.append((path, name, split, revision, streaming))
        if split == "test":
            raise ValueError('Unknown split "test". Should be one of\n["train"].')
        return Dataset.from_list(ROWS)

    calls = []
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    spec = {"path": "some/rows", "name": "main", "revision": "abc", "split": "train[2:4]"}
    assert list(load_source(spec)) == ROWS[2:4]
    assert calls == [("some/rows", "main", "train", "abc", False)]
    assert failure({**spec, "split": "test"}).startswith("Source some/rows has no split 'test' (Unknown split")


def test_tiny_tasks(monkeypatch):
    def load_tiny(name, *, split, size=None, seed=0, type="prompt_completion", conversational=True):
        return Dataset.from_list([{"text": f"{name} {split} {seed} {i}"} for i in range(size or 3)])

    tiny = types.ModuleType("workbench.tiny")
    tiny.load_tiny = load_tiny
    monkeypatch.setitem(sys.modules, "workbench.tiny", tiny)
    assert both("tiny:sum", seed=4) == [{"text": f"sum train 4 {i}"} for i in range(3)]
    assert both({"path": "tiny:sum", "kwargs": {"size": 5, "seed": 1}, "split": "test[4:]"}) == [{"text": "sum test 1 4"}]
    assert "Its parameters: name, split, size, seed, type, conversational." in failure(
        {"path": "tiny:sum", "kwargs": {"sise": 5}}
    )


# -- options ------------------------------------------------------------------------------------------------------------


def numbers(spec, **kwargs):
    return [row["n"] for row in both(spec, **kwargs)]


def test_limit():
    assert numbers({"path": ROWS, "limit": 3}) == [0, 1, 2] and numbers({"path": ROWS, "limit": 30}) == list(range(8))
    assert load_source({"path": ROWS, "limit": 0.25})["n"][:] == [0, 1]
    assert load_source({"path": ROWS, "limit": 0.01})["n"][:] == [0]
    assert "limit=0.25 is undefined; use a number of rows" in failure({"path": ROWS, "limit": 0.25}, streaming=True)
    for wrong in (0, -1, 2.5, True, "3"):
        assert f"limit={wrong!r}; use a number of rows" in failure({"path": ROWS, "limit": wrong})


def test_filter_shuffle_limit_convert_in_this_order(module):
    assert numbers({"path": ROWS, "filter": "my_rows:even", "limit": 3}) == [0, 2, 4]
    shuffled = load_source({"path": ROWS, "shuffle": 1})["n"][:]
    assert sorted(shuffled) == list(range(8)) and shuffled != list(range(8))
    assert load_source({"path": ROWS, "shuffle": 1})["n"][:] == shuffled != load_source({"path": ROWS, "shuffle": 2})["n"][:]
    assert load_source({"path": ROWS, "shuffle": 1, "limit": 3})["n"][:] == shuffled[:3]
    stream = load_source({"path": ROWS, "shuffle": 1}, streaming=True)
    assert sorted(row["n"] for row in stream) == list(range(8)) and [r["n"] for r in stream] == [r["n"] for r in stream]
    spec = {"path": ROWS, "filter": "my_rows:even", "limit": 1, "convert": "language_modeling"}
    assert both(spec) == [{"text": "0+1=1", "n": 0}]
    assert "holds no row that the filter my_rows:none keeps" in failure({"path": ROWS, "filter": "my_rows:none"})


def test_columns():
    rows = [{"question": "a", "answer": "b", "text": "c"}]
    renamed = {"path": rows, "columns": {"question": "prompt", "answer": "completion"}}
    assert both(renamed) == [{"prompt": "a", "completion": "b", "text": "c"}]
    swapped = {"path": rows, "columns": {"question": "answer", "answer": "question"}}
    assert both(swapped) == [{"answer": "a", "question": "b", "text": "c"}]
    message = failure({"path": rows, "columns": {"qestion": "prompt"}})
    assert "has no column 'qestion' to rename. Did you mean 'question'? Present: question, answer, text." in message
    assert "already has a column 'text'" in failure({"path": rows, "columns": {"question": "text"}})


def test_unknown_options():
    assert "Source option 'limmit' is not known. Did you mean 'limit'?" in failure({"path": ROWS, "limmit": 3})
    assert "weight have no effect on a single source" in failure({"path": ROWS, "weight": 3.0})
    assert "kwargs has no effect on a source of the kind 'memory'" in failure({"path": ROWS, "kwargs": {"a": 1}})


def test_source_column():
    assert both({"path": ROWS, "limit": 1}, source_column="source") == [{**ROWS[0], "source": "<list>"}]
    assert "source_column='n' is already a column" in failure(ROWS, source_column="n")


def test_specs_are_values():
    assert load_source(SourceSpec(path=ROWS, limit=1))[0] == ROWS[0]


def test_split_off():
    rest, cut = split_off(Dataset.from_list(ROWS), 0.25, seed=3)
    assert sorted(rest["n"][:] + cut["n"][:]) == list(range(8)) and len(cut) == 2
    assert cut["n"][:] == split_off(Dataset.from_list(ROWS), 2, seed=3)[1]["n"][:]
    assert cut["n"][:] != split_off(Dataset.from_list(ROWS), 2, seed=4)[1]["n"][:]
    rest, cut = split_off(Dataset.from_list(ROWS).to_iterable_dataset(), 2)
    assert [r["n"] for r in cut] == [0, 1] and [r["n"] for r in rest] == [2, 3, 4, 5, 6, 7]
    with pytest.raises(UserError, match="leaves no row to train on: the data set has 8"):
        split_off(Dataset.from_list(ROWS), 8)
    for wrong in (0, -0.5, 1.5, True):
        with pytest.raises(UserError, match="test_split_size"):
            split_off(Dataset.from_list(ROWS), wrong)
    with pytest.raises(UserError, match="stream has no known length"):
        split_off(Dataset.from_list(ROWS).to_iterable_dataset(), 0.5)


@pytest.mark.parametrize(
    ("options", "wanted", "column"),
    [
        ({}, ("preference",), "chosen"),
        ({}, ("unpaired_preference",), "label"),
        ({}, ("stepwise_supervision",), "labels"),
        ({}, ("language_modeling", "prompt_completion"), "completion"),  # the task's own choice, where it is wanted too
        ({}, None, "completion"),
        ({"kwargs": {"type": "preference"}}, ("prompt_completion",), "chosen"),  # what is typed stays
        ({"kwargs": {"margin": True}}, ("preference",), "margin"),
        ({"convert": "language_modeling"}, ("preference",), "messages"),
    ],
    ids=str,
)
def test_an_embedded_task_gives_rows_of_a_wanted_type(options, wanted, column):
    spec = {"path": "tiny:sums", "limit": 3, **options}
    assert column in load_source(spec, data_types=wanted).column_names
    assert column in load_source([spec, spec], data_types=wanted).column_names
