"""Local files: formats, splits, and errors with file and line."""

import gzip
import json

import pytest
from datasets import Dataset, IterableDataset

from workbench.data.formats import normalise_row
from workbench.data.jsontext import decode_row
from workbench.data.sources import load_source
from workbench.errors import UserError

ROWS = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "2+2=", "completion": "4"}, {"prompt": "", "completion": "NA"}]


@pytest.fixture
def write(tmp_path):
    def put(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, list):
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in text)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return str(path)

    return put


def read(spec, **kwargs):
    """Rows as map-style data set and as stream, which must agree."""
    rows = load_source(spec, **kwargs)
    stream = load_source(spec, streaming=True, **kwargs)
    assert isinstance(rows, Dataset) and isinstance(stream, IterableDataset)
    assert stream.column_names == rows.column_names
    decoded = [decode_row(row) for row in rows]
    assert [decode_row(row) for row in stream] == decoded == [decode_row(row) for row in stream]
    return decoded


def failure(spec, streaming=False, **kwargs):
    with pytest.raises(UserError) as error:
        list(load_source(spec, streaming=streaming, **kwargs))
    assert "\n" not in str(error.value)
    return str(error.value)


CSV = 'prompt,completion\n1+1=,2\n2+2=,4\n"",NA\n'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", ROWS),
        ("a.ndjson", ROWS),
        ("a.jsonl.gz", ROWS),
        ("a.json", json.dumps(ROWS, indent=1)),
        ("lines.json", ROWS),
        ("a.csv", CSV),
        ("a.csv.gz", CSV),
        ("bom.csv", "\ufeff" + CSV),
        ("crlf.csv", CSV.replace("\n", "\r\n")),
        ("a.tsv", CSV.replace(",", "\t")),
    ],
)
def test_files(write, name, text):
    assert read(write(name, text)) == ROWS


def test_parquet_and_arrow(tmp_path):
    Dataset.from_list(ROWS).to_parquet(tmp_path / "a.parquet")
    assert read(str(tmp_path / "a.parquet")) == ROWS
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    arrow_file = next((tmp_path / "saved").glob("*.arrow"))
    assert read(str(arrow_file)) == ROWS


def test_text_files(write):
    path = write("a.txt", "one\ntwo\r\n\n  \nthree \n")
    assert read(path) == [{"text": "one"}, {"text": "two"}, {"text": "three "}]
    assert read({"path": path, "sample_by": "paragraph"}) == [{"text": "one\ntwo"}, {"text": "three "}]
    assert read({"path": path, "sample_by": "document"}) == [{"text": "one\ntwo\n\n  \nthree \n"}]


def test_values_are_those_of_the_file(write):
    rows = [{"text": "2024-01-01", "meta": {"price": 10.681}}, {"text": "2024-01-02 10:00:00", "meta": {"n": 3}}]
    assert read(write("dates.jsonl", rows)) == rows
    table = 'prompt,completion,label\n2024-01-01,12,true\nnull,"a\nb",0\n'
    loaded = read(write("table.csv", table))
    assert loaded[0] == {"prompt": "2024-01-01", "completion": "12", "label": "true"}
    assert [normalise_row(row)["label"] for row in loaded] == [True, False]
    assert loaded[1]["completion"] == "a\nb" and loaded[1]["prompt"] == "null"


def test_tools_of_different_shapes_load_and_keep_them(write):
    """Argument types that Arrow cannot unify: a string, a number, a list; tools as objects, text, None and absent."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": "a"}}}]}
    other = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "g", "arguments": {"x": [1, {"y": 2.5}]}}}],
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": 1}}}
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}, call], "tools": [tool]},
        {"messages": [{"role": "user", "content": "Hi"}, other], "tools": json.dumps([tool])},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}], "tools": None},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}]},
    ]
    loaded = read(write("tools.jsonl", rows))
    assert loaded[:3] == rows[:3] and loaded[3] == {**rows[3], "tools": None}
    normal = [normalise_row(row) for row in loaded]
    assert normal == [normalise_row(row) for row in rows]
    assert normal[0]["tools"] == normal[1]["tools"] == [tool] and "tools" not in normal[2] and "tools" not in normal[3]


def test_rows_with_columns_of_their_own_load(write):
    rows = [{"text": "a"}] * 1500 + [{"text": "b", "extra": {"k": 1}}]
    path = write("late.jsonl", rows)
    assert load_source(path)[1500] == {"text": "b", "extra": {"k": 1}}
    assert "Column 'extra' is new in row 1500 of" in failure(path, streaming=True)


# -- folders, patterns, splits ------------------------------------------------------------------------------------------


@pytest.fixture
def folder(write, tmp_path):
    write("d/train-00.jsonl", ROWS[:1])
    write("d/train-01.jsonl", ROWS[1:2])
    write("d/my_test.jsonl", ROWS[2:])
    write("d/README.md", "# rows")
    write("d/.hidden/x.jsonl", ROWS)
    return str(tmp_path / "d")


def test_folders_and_patterns(folder):
    assert read(folder) == ROWS[:2]
    assert read(folder, split="test") == ROWS[2:]
    assert read({"path": folder, "split": "test"}) == ROWS[2:]
    assert read(folder + "/train-*.jsonl") == ROWS[:2]
    assert read(folder + "/**/*0[01].jsonl", split="train") == ROWS[:2]
    assert read({"path": folder, "data_files": {"train": "my_test.jsonl", "dev": ["train-*.jsonl"]}, "split": "dev"}) == ROWS[:2]
    assert read({"path": folder, "data_files": "my_test.jsonl"}) == ROWS[2:]


def test_missing_split_lists_those_present(folder):
    assert failure(folder, split="validation").startswith(f"Source {folder} has no split 'validation'. Splits: test, train.")
    assert "no split 'tset'. Did you mean 'test'?" in failure({"path": folder, "split": "tset"})


def test_a_file_named_by_the_user_is_the_split_asked_for(write):
    path = write("test.jsonl", ROWS)
    assert read(path) == read(path, split="test") == read({"path": path, "split": "train"}) == ROWS
    assert "has no split 'test'. Splits: train" in failure({"path": path, "split": "test"})


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train[:2]", [0, 1]),
        ("train[1:2]", [1]),
        ("train[2:]", [2]),
        ("train[5:]", []),
        ("train[:-1]", [0, 1]),
        ("train[-1:]", [2]),
        ("train[:67%]", [0, 1]),
        ("train[50%:]", [2]),
    ],
)
def test_slices(write, split, expected):
    spec = {"path": write("a.jsonl", ROWS), "split": split}
    if not expected:
        assert failure(spec).endswith("holds no row.")
    elif "%" in split or "-" in split:
        assert list(load_source(spec)) == [ROWS[i] for i in expected]
        assert "a stream has no known length" in failure(spec, streaming=True)
    else:
        assert read(spec) == [ROWS[i] for i in expected]


def test_malformed_splits(write):
    assert "split='train[' is not a split" in failure({"path": write("a.jsonl", ROWS), "split": "train["})


# -- errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"text": b}\n', "a.jsonl:3: not valid JSON (Expecting value at column 10)."),
        ("a.jsonl", '{"text": "a"}\n["b"]\n', "a.jsonl:2: a row must be an object"),
        ("a.json", '[{"text": "a"},\n {"text": }]', "a.json:2: not valid JSON"),
        ("a.json", '[{"text": "a"}, 3]', "a.json, element 1: a row must be an object"),
        (
            "a.json",
            '{"data": [{"text": "a"}], "version": 1}',
            "keys data, version, not a list of rows. Name the list of rows with field: data.",
        ),
        ("a.csv", "prompt,completion\na,b\na,b,c\n", "a.csv:3: 3 cells, the header has 2."),
        ("a.csv", "prompt,completion\na\n", "a.csv:2: 1 cells, the header has 2."),
        ("a.csv", "prompt,prompt\na,b\n", "a.csv:1: the header repeats 'prompt'."),
        ("a.csv", 'prompt\n"a\n', "a.csv:2: not valid CSV"),
        ("a.txt", "\n \n", "holds no row."),
        ("a.jsonl", "", "holds no row."),
        ("a.csv", "prompt,completion\n", "holds no row."),
    ],
)
def test_bad_files(write, name, text, message, streaming):
    assert message in failure(write(name, text), streaming=streaming)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff"}\n')
    assert "a.jsonl: not UTF-8 text" in failure(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    assert "the parquet files cannot be read" in failure(str(tmp_path / "a.parquet"))


def test_field_of_a_json_file(write):
    path = write("a.json", json.dumps({"data": ROWS, "version": 1}))
    assert read({"path": path, "field": "data"}) == ROWS
    assert "no field 'rows'. Its keys: data, version." in failure({"path": path, "field": "rows"})


def test_missing_files_name_the_nearest(write, tmp_path):
    write("d/train.jsonl", ROWS)
    message = failure(str(tmp_path / "d" / "trian.jsonl"))
    assert message.startswith(f"There is no file '{tmp_path}/d/trian.jsonl'. Did you mean 'train.jsonl'?")
    assert "train.jsonl" in failure(str(tmp_path / "d" / "*.csv"))
    assert "Did you mean 'd'" not in failure(str(tmp_path / "nowhere" / "x.jsonl"))


def test_wrong_extensions(write, tmp_path):
    path = write("d/a.xlsx", "x")
    assert "Cannot tell the format of" in failure(path) and ".jsonl" in failure(path)
    assert "holds no data file" in failure(str(tmp_path / "d"))
    write("d/a.jsonl", ROWS), write("d/b.csv", CSV)
    assert "several formats (csv, jsonl); choose some with a pattern" in failure(str(tmp_path / "d"))
    assert read({"path": write("rows.data", ROWS), "format": "jsonl"}) == ROWS


def test_options_without_effect(write):
    path = write("a.jsonl", ROWS)
    assert "revision has no effect on a source of the kind 'files'" in failure({"path": path, "revision": "main"})
    assert "sample_by has no effect on jsonl files" in failure({"path": path, "sample_by": "line"})
    assert "field has no effect on jsonl files" in failure({"path": path, "field": "data"})


def test_a_changed_file_is_read_again(write):
    path = write("a.jsonl", ROWS[:1])
    first = load_source(path)
    assert load_source(path)._fingerprint == first._fingerprint
    write("a.jsonl", ROWS[1:])
    assert list(load_source(path)) == ROWS[1:]
    assert load_source(path)._fingerprint != first._fingerprint
