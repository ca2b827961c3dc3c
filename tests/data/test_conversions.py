"""The fifteen conversions, for text and for messages, on map-style data, dictionaries of splits, streams and plain rows."""

import pickle

import pytest
from datasets import Dataset, DatasetDict, Image, IterableDataset, IterableDatasetDict, List

from workbench.data.conversions import CONVERSIONS, canonicalise, convert, possible_targets, source_type
from workbench.data.formats import normalise_row
from workbench.data.jsontext import decode_row
from workbench.errors import UserError

ASK = [{"role": "user", "content": "What color is the sky?"}]
ASK2 = [{"role": "user", "content": "Where is the sun?"}]


def say(text):
    return [{"role": "assistant", "content": text}]


TEXT = {
    "prompt_completion": [{"prompt": "The sky is", "completion": " blue."}, {"prompt": "The sun is", "completion": " up."}],
    "implicit_preference": [
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        {"chosen": "The sun is up.", "rejected": "The sun is out."},
    ],
    "preference": [
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
        {"prompt": "The sun is", "chosen": " up.", "rejected": " out."},
    ],
    "unpaired_preference": [
        {"prompt": "The sky is", "completion": " green.", "label": False},
        {"prompt": "The sky is", "completion": " blue.", "label": True},
        {"prompt": "The sun is", "completion": " up.", "label": True},
    ],
}
CHAT = {
    "prompt_completion": [{"prompt": ASK, "completion": say("Blue.")}, {"prompt": ASK2, "completion": say("Up.")}],
    "implicit_preference": [
        {"chosen": ASK + say("Blue."), "rejected": ASK + say("Green.")},
        {"chosen": ASK2 + say("Up."), "rejected": ASK2 + say("Out.")},
    ],
    "preference": [
        {"prompt": ASK, "chosen": say("Blue."), "rejected": say("Green.")},
        {"prompt": ASK2, "chosen": say("Up."), "rejected": say("Out.")},
    ],
    "unpaired_preference": [
        {"prompt": ASK, "completion": say("Green."), "label": False},
        {"prompt": ASK, "completion": say("Blue."), "label": True},
        {"prompt": ASK2, "completion": say("Up."), "label": True},
    ],
}
TEXT_RESULT = {
    "language_modeling": [{"text": "The sky is blue."}, {"text": "The sun is up."}],
    "prompt_only": [{"prompt": "The sky is"}, {"prompt": "The sun is"}],
    "unpaired_preference": [
        {"prompt": "The sky is", "completion": " blue.", "label": True},
        {"prompt": "The sky is", "completion": " green.", "label": False},
        {"prompt": "The sun is", "completion": " up.", "label": True},
        {"prompt": "The sun is", "completion": " out.", "label": False},
    ],
    **{name: TEXT[name] for name in ("prompt_completion", "implicit_preference", "preference")},
}
CHAT_RESULT = {
    "language_modeling": [{"messages": ASK + say("Blue.")}, {"messages": ASK2 + say("Up.")}],
    "prompt_only": [{"prompt": ASK}, {"prompt": ASK2}],
    "unpaired_preference": [
        {"prompt": ASK, "completion": say("Blue."), "label": True},
        {"prompt": ASK, "completion": say("Green."), "label": False},
        {"prompt": ASK2, "completion": say("Up."), "label": True},
        {"prompt": ASK2, "completion": say("Out."), "label": False},
    ],
    **{name: CHAT[name] for name in ("prompt_completion", "implicit_preference", "preference")},
}


def expected(form, start, to):
    rows = list((TEXT_RESULT if form is TEXT else CHAT_RESULT)[to])
    return [rows[0], *rows] if (start, to) == ("unpaired_preference", "prompt_only") else rows  # repeated prompts stay


def test_there_are_fifteen():
    assert len(CONVERSIONS) == 15
    assert possible_targets("prompt_completion") == ["language_modeling", "prompt_only"]
    assert (
        possible_targets("language_modeling") == possible_targets("prompt_only") == possible_targets("stepwise_supervision") == []
    )


@pytest.mark.parametrize("form", [TEXT, CHAT], ids=["text", "chat"])
@pytest.mark.parametrize(("start", "to"), sorted(CONVERSIONS))
def test_conversion(form, start, to):
    rows, right = form[start], expected(form, start, to)
    dataset = Dataset.from_list(rows)
    stream = dataset.to_iterable_dataset()
    assert source_type(dataset.column_names) == start
    converted = convert(dataset, to)
    assert list(converted) == right and isinstance(converted, Dataset)
    assert convert(rows, to) == right
    assert [row for one in rows for row in convert(one, to)] == right
    streamed = convert(stream, to)
    assert isinstance(streamed, IterableDataset) and [decode_row(row) for row in streamed] == right
    assert streamed.column_names == converted.column_names == list(right[0])
    splits = convert(DatasetDict(train=dataset, test=dataset.select([1])), to)
    assert isinstance(splits, DatasetDict) and list(splits["train"]) == right
    streams = convert(IterableDatasetDict(train=stream), to)
    assert [decode_row(row) for row in streams["train"]] == right


def test_from_type_can_be_named():
    rows = [{"prompt": "a", "completion": "b", "label": 0}]
    assert convert(rows, "language_modeling", from_="prompt_completion") == [{"text": "ab"}]
    assert convert(rows, "language_modeling") == []


def test_rows_of_the_type_are_returned_as_they_are():
    dataset = Dataset.from_list(TEXT["preference"])
    assert convert(dataset, "preference") is dataset


def test_other_columns_are_carried_and_repeated():
    rows = [{**row, "id": i, "score": 0.5, "messages": "x"} for i, row in enumerate(TEXT["preference"])]
    converted = convert(Dataset.from_list(rows), "unpaired_preference")
    assert converted["id"][:] == [0, 0, 1, 1] and converted["score"][:] == [0.5] * 4
    assert converted.column_names == ["prompt", "completion", "label", "id", "score"], "messages would make another type"
    assert list(convert(Dataset.from_list(rows).to_iterable_dataset(), "unpaired_preference")) == list(converted)
    splits = convert(DatasetDict(train=Dataset.from_list(rows)), "unpaired_preference")
    assert list(splits["train"]) == list(converted)


def test_columns_of_other_shapes_convert_too():
    rows = [{"instruction": "Add.", "input": "1 2", "output": "3", "source": "a"}]
    turns = [{"role": "user", "content": "Add.\n1 2"}, {"role": "assistant", "content": "3"}]
    assert list(convert(Dataset.from_list(rows), "language_modeling")) == [{"messages": turns, "source": "a"}]
    kto = [{"messages": ASK + say("Blue."), "label": "true"}, {"messages": ASK + say("Green."), "label": "false"}]
    assert list(convert(Dataset.from_list(kto), "prompt_completion")) == [CHAT["prompt_completion"][0]]


def test_tools_and_calls_survive_exactly():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 10.681, "n": 3}}}
    chats = [[*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}], ASK2 + say("Up.")]
    rows = [
        {"chosen": chats[0], "rejected": ASK + say("No."), "tools": '[{"name": "f"}]'},
        {"chosen": chats[1], "rejected": chats[1]},
    ]
    made = convert(rows, "prompt_completion")
    assert made[0]["completion"] == chats[0][1:] and made[0]["tools"] == [{"type": "function", "function": {"name": "f"}}]
    dataset = convert(Dataset.from_list([{"j": str(i), "tools": None, **r} for i, r in enumerate(rows)]), "prompt_completion")
    back = [normalise_row(row) for row in dataset]
    assert back[0] == {**made[0], "j": "0"} and back[1] == {**made[1], "j": "1"}


def test_identical_pairs_give_no_labels():
    rows = [TEXT["preference"][0], {"prompt": "a", "chosen": "b", "rejected": "b"}]
    assert convert(rows, "unpaired_preference") == TEXT_RESULT["unpaired_preference"][:2]
    assert len(convert(rows, "prompt_completion")) == 2
    with pytest.raises(UserError, match=r"No row is left after: convert preference to unpaired_preference \(1 rows before\)"):
        convert(Dataset.from_list(rows[1:]), "unpaired_preference")


def test_impossible_conversions_name_the_possible_ones():
    with pytest.raises(
        UserError, match=r"unpaired_preference cannot be converted to preference. It can become language_modeling,"
    ):
        convert(TEXT["unpaired_preference"], "preference")
    with pytest.raises(
        UserError, match=r"prompt_only cannot be converted to language_modeling. It cannot be converted to any other"
    ):
        convert([{"prompt": "a"}], "language_modeling")
    with pytest.raises(UserError, match=r"convert='prefrence' is not known. Did you mean 'preference'"):
        convert([{"prompt": "a"}], "prefrence")


def test_errors_name_the_row():
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}]
    for dataset in (rows, Dataset.from_list(rows)):
        with pytest.raises(UserError, match="Row 1, column 'completion': missing for prompt_completion"):
            convert(dataset, "language_modeling")
    with pytest.raises(UserError, match="Row 1, column 'completion': missing for prompt_completion"):
        list(convert(Dataset.from_list(rows).to_iterable_dataset(), "language_modeling"))


def test_transformed_data_sets_are_refused():
    count = iter(range(100))
    dataset = Dataset.from_list(TEXT["preference"]).with_transform(lambda batch: {"prompt": [str(next(count))] * 2})
    with pytest.raises(UserError, match=r"runs at every access \(set_transform or with_transform\)"):
        convert(dataset, "prompt_only")
    assert next(count) == 0, "it was not even run"


def test_formatted_data_sets_convert():
    dataset = Dataset.from_list(TEXT["unpaired_preference"]).with_format("numpy")
    assert list(convert(dataset, "prompt_completion")) == TEXT_RESULT["prompt_completion"]


def test_results_on_disk_are_made_once(tmp_path, monkeypatch):
    Dataset.from_list(TEXT["preference"]).save_to_disk(tmp_path)
    dataset = Dataset.load_from_disk(tmp_path)
    first = convert(dataset, "unpaired_preference")
    monkeypatch.setattr("workbench.data.conversions.normalise_row", None)
    again = convert(Dataset.load_from_disk(tmp_path), "unpaired_preference")
    assert list(again) == list(first) and again._fingerprint == first._fingerprint
    with pytest.raises(TypeError):
        convert(dataset.select([0]), "unpaired_preference")


def test_images_are_carried_without_decoding_them(tmp_path):
    from PIL import Image as Picture

    picture = Picture.new("RGB", (2, 3), (255, 0, 0))
    rows = [{"prompt": "Color?", "chosen": "Red.", "rejected": "Blue.", "image": picture}]
    dataset = Dataset.from_list(rows)
    stored = dataset.cast_column("image", Image(decode=False))[0]["image"]["bytes"]
    converted = convert(dataset, "prompt_completion")
    assert converted.features["images"] == List(Image())
    assert converted[0]["images"][0].getpixel((0, 0)) == (255, 0, 0)
    assert converted.cast_column("images", List(Image(decode=False)))[0]["images"][0]["bytes"] == stored


def test_canonical_rows_keep_all_other_columns():
    rows = [{"conversations": [{"from": "human", "value": "Hi"}], "id": 1}]
    right = [{"messages": [{"role": "user", "content": "Hi"}], "id": 1}]
    assert list(canonicalise(Dataset.from_list(rows), "language_modeling")) == right
    assert [decode_row(r) for r in canonicalise(Dataset.from_list(rows).to_iterable_dataset(), "language_modeling")] == right


def test_streams_resume_at_the_row_and_travel_to_other_processes():
    def make():
        return convert(Dataset.from_list(TEXT["preference"] * 4).to_iterable_dataset(), "unpaired_preference")

    rows = list(make())
    assert list(pickle.loads(pickle.dumps(make()))) == rows
    for position in (1, 2, 5, 15):
        stream = make()
        iterator = iter(stream)
        for _ in range(position):
            next(iterator)
        stream.load_state_dict(stream.state_dict())
        assert list(stream) == rows[position:]
