"""The seven data types: detection, and one row of each brought to one form."""

import pytest

from workbench.data.formats import DATA_TYPES, detect_type, drop_reason, is_conversational, normalise_row
from workbench.data.pairs import split_text
from workbench.errors import UserError

USER = {"role": "user", "content": "What color is the sky?"}
BLUE = {"role": "assistant", "content": "It is blue."}
GREEN = {"role": "assistant", "content": "It is green."}
CLEAR = {"role": "assistant", "content": "Clear today."}
SYSTEM = {"role": "system", "content": "Be brief."}

STANDARD = {
    "language_modeling": {"text": "The sky is blue."},
    "prompt_only": {"prompt": "The sky is"},
    "prompt_completion": {"prompt": "The sky is", "completion": " blue."},
    "preference": {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    "triple_preference": {"prompt": "The sky is", "chosen": " blue.", "rejected": " green.", "reference": " clear."},
    "unpaired_preference": {"prompt": "The sky is", "completion": " blue.", "label": True},
    "stepwise_supervision": {"prompt": "2+3*4?", "completions": ["3*4=12", "2+12=15"], "labels": [1.0, 0.0]},
}
CONVERSATIONAL = {
    "language_modeling": {"messages": [USER, BLUE]},
    "prompt_only": {"prompt": [USER]},
    "prompt_completion": {"prompt": [USER], "completion": [BLUE]},
    "preference": {"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN]},
    "triple_preference": {"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN], "reference": [CLEAR]},
    "unpaired_preference": {"prompt": [USER], "completion": [GREEN], "label": False},
    "stepwise_supervision": {"prompt": [USER], "completions": ["Think.", "Blue."], "labels": [1.0, 1.0]},
}


@pytest.mark.parametrize("data_type", DATA_TYPES)
@pytest.mark.parametrize("rows", [STANDARD, CONVERSATIONAL])
def test_a_normal_row_is_detected_and_left_as_it_is(data_type, rows):
    row = rows[data_type]
    assert detect_type(list(row)) == detect_type(row) == data_type
    assert normalise_row(row) == row
    assert is_conversational(row) is (rows is CONVERSATIONAL)
    assert normalise_row({**row, "id": 7, "note": None}) == {**row, "id": 7, "note": None}


@pytest.mark.parametrize(
    ("columns", "data_type"),
    [
        (["conversations"], "language_modeling"),
        (["messages", "label"], "unpaired_preference"),
        (["conversations", "chosen", "rejected"], "preference"),
        (["chosen", "rejected"], "preference"),
        (["chosen_messages", "rejected_messages"], "preference"),
        (["chosen", "rejected", "reference"], "triple_preference"),
        (["prompt", "reference"], "prompt_only"),  # the reference is for the reward
        (["instruction", "input", "output"], "prompt_completion"),
        (["instruction", "context", "response", "category"], "prompt_completion"),
        (["instruction", "output", "label"], "unpaired_preference"),
        (["instruction"], "prompt_only"),
        (["text", "label"], "language_modeling"),  # a classification data set
        (["prompt", "answer"], "prompt_only"),  # the answer is for the reward
        (["prompt", "chosen", "rejected", "messages", "score_chosen"], "preference"),
    ],
)
def test_detected_types(columns, data_type):
    assert detect_type(columns) == data_type


def test_detection_among_the_types_a_method_takes():
    columns = ["prompt", "completion", "messages"]
    assert detect_type(columns) == "prompt_completion"
    assert detect_type(columns, ["language_modeling"]) == "language_modeling"
    assert detect_type(columns, ["prompt_only"]) == "prompt_only"
    with pytest.raises(UserError, match="make language_modeling, but this needs preference"):
        detect_type(["messages"], ["preference"])


def test_columns_that_are_none_do_not_make_a_type():
    assert detect_type({"prompt": None, "completion": None, "messages": [USER, BLUE]}) == "language_modeling"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            ["question", "answer"],
            r"question, answer fit no data type.*Rename with columns=\{answer: completion, question: prompt\}",
        ),
        (["prompt", "chosen_answer", "rejected"], r"missing: chosen\. Rename with columns=\{chosen_answer: chosen\}"),
        (["txt"], r"Nearest: text; missing: text\. Rename with columns=\{txt: text\}"),
        ([], r"\(none\) fit no data type"),
    ],
)
def test_columns_of_no_type(columns, message):
    allowed = ["preference"] if "rejected" in columns else None
    with pytest.raises(UserError, match=message):
        detect_type(columns, allowed)


def test_missing_column_names_row_and_way_out():
    with pytest.raises(UserError) as error:
        normalise_row({"prompt": "a", "response": "b", "id": 1}, "prompt_completion", index=4)
    assert str(error.value) == (
        "Row 4, column 'completion': missing for prompt_completion. Columns with a value: prompt, response, id."
        " Rename with columns={response: completion} in the source."
    )


@pytest.mark.parametrize(
    ("row", "data_type", "message"),
    [
        ({"prompt": 12}, "prompt_only", r"Row 3, column 'prompt': 12 is int; expected text or a list of messages"),
        ({"text": ["a"]}, "language_modeling", r"Row 3, column 'text': \['a'\] is list; expected text"),
        ({"prompt": "a", "completion": None}, "prompt_completion", r"column 'completion': missing"),
        ({"messages": 5}, "language_modeling", r"column 'messages': 5 is int; expected a list of messages"),
        ({"messages": []}, "language_modeling", r"column 'messages': the list of messages is empty"),
        ({"messages": "hello"}, "language_modeling", r"column 'messages': 'hello' is not the JSON of a list of messages"),
        (
            {"prompt": "a", "chosen": "b", "rejected": [GREEN]},
            "preference",
            r"column 'rejected': one of chosen and rejected is text",
        ),
        ({"messages": [USER], "label": True}, "unpaired_preference", r"last message is of role 'user'"),
        (
            {"prompt": "a", "completions": ["x", "y"], "labels": [True]},
            "stepwise_supervision",
            r"column 'labels': 1 labels for 2 steps",
        ),
        (
            {"prompt": "a", "completions": "x", "labels": [True]},
            "stepwise_supervision",
            r"column 'completions': 'x'; expected a list",
        ),
        ({"prompt": "a", "completions": [3], "labels": [True]}, "stepwise_supervision", r"step 3 is int; expected text"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"},
            "preference",
            r"column 'margin': 'big' is not a number",
        ),
        ({"instruction": 1, "output": "x"}, "prompt_completion", r"column 'instruction': 1 is int"),
        ({"instruction": "q", "output": "x", "history": ["a"]}, "prompt_completion", r"column 'history': 'a' is not a pair"),
    ],
)
def test_wrong_values(row, data_type, message):
    with pytest.raises(UserError, match=message):
        normalise_row(row, data_type, index=3)


def test_unknown_data_type():
    with pytest.raises(UserError, match="Did you mean 'preference'"):
        normalise_row({"text": "a"}, "preferences")


def test_share_gpt_and_columns_of_other_names():
    row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "Be brief."}
    assert normalise_row(row) == {
        "messages": [SYSTEM, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    }


def test_messages_as_json_text():
    assert normalise_row({"messages": '[{"role": "user", "content": "12"}]'}) == {"messages": [{"role": "user", "content": "12"}]}


def test_alpaca():
    row = {"instruction": "Add.", "input": "1 2", "output": "3", "history": [["Hi", "Hello"]], "system": "Be brief.", "id": 5}
    assert normalise_row(row) == {
        "prompt": [
            SYSTEM,
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Add.\n1 2"},
        ],
        "completion": [{"role": "assistant", "content": "3"}],
        "id": 5,
    }
    plain = {"instruction": "Add.", "input": "", "output": "3"}
    assert normalise_row(plain)["prompt"] == [{"role": "user", "content": "Add."}]
    preference = {"instruction": "Add.", "input": None, "chosen": "3", "rejected": "4"}
    assert normalise_row(preference) == {
        "prompt": [{"role": "user", "content": "Add."}],
        "chosen": [{"role": "assistant", "content": "3"}],
        "rejected": [{"role": "assistant", "content": "4"}],
    }


def test_a_system_column_makes_text_a_conversation_in_every_row():
    row = {"prompt": "Hi", "completion": "Hello"}
    expected = {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Hello"}]}
    assert normalise_row({**row, "system": ""}) == expected
    assert normalise_row({**row, "system_prompt": None}) == expected
    assert normalise_row({**row, "system": "Be brief."})["prompt"] == [SYSTEM, *expected["prompt"]]
    same = {"messages": [SYSTEM, USER, BLUE], "system": "Be brief."}
    assert normalise_row(same) == {"messages": [SYSTEM, USER, BLUE]}
    with pytest.raises(UserError, match="Row 2, column 'messages': the row has a system column and another system message"):
        normalise_row({"messages": [SYSTEM, USER], "system": "Be long."}, index=2)


def test_text_beside_messages_becomes_a_message():
    assert normalise_row({"prompt": [USER], "completion": "It is blue."}) == CONVERSATIONAL["prompt_completion"]
    row = {"prompt": USER["content"], "chosen": [BLUE], "rejected": [GREEN]}
    assert normalise_row(row) == CONVERSATIONAL["preference"]


def test_labels_of_any_spelling_agree():
    row = {"prompt": "a", "completion": "b"}
    for good, bad in ((True, False), (1, 0), ("true", "false"), ("True", "False"), ("1", "0"), (1.0, 0.0)):
        assert normalise_row({**row, "label": good})["label"] is True
        assert normalise_row({**row, "label": bad})["label"] is False
    for wrong in (2, "yes", -1, [True], "good", 0.5):
        with pytest.raises(UserError, match=r"Row 0, column 'label': .* is not a label"):
            normalise_row({**row, "label": wrong}, index=0)


def test_step_labels_keep_ignored_steps_and_shares():
    row = {"prompt": "a", "completions": ["s"] * 7, "labels": [True, 0, "+", "-", None, -100, 0.25]}
    assert normalise_row(row)["labels"] == [1.0, 0.0, 1.0, 0.0, -100.0, -100.0, 0.25]
    with pytest.raises(UserError, match=r"Column 'labels': 1\.5 is not a label"):
        normalise_row({"prompt": "a", "completions": ["s"], "labels": [1.5]})


def test_margin_is_a_number():
    assert normalise_row({**STANDARD["preference"], "margin": "0.5"})["margin"] == 0.5


def test_label_of_a_conversation_goes_with_its_last_answer():
    row = {"messages": [USER, BLUE, USER, GREEN], "label": "false"}
    assert normalise_row(row) == {"prompt": [USER, BLUE, USER], "completion": [GREEN], "label": False}


# -- the prompt inside chosen and rejected ------------------------------------------------------------------------------


def test_prompt_is_the_longest_common_beginning_of_messages():
    row = {"chosen": [USER, BLUE, USER, BLUE], "rejected": [USER, BLUE, USER, GREEN]}
    assert normalise_row(row) == {"prompt": [USER, BLUE, USER], "chosen": [BLUE], "rejected": [GREEN]}


def test_prompt_never_swallows_an_answer():
    prefix = {"chosen": [USER, BLUE], "rejected": [USER, BLUE, USER, GREEN]}
    assert normalise_row(prefix) == {"prompt": [USER], "chosen": [BLUE], "rejected": [BLUE, USER, GREEN]}
    identical = normalise_row({"chosen": [USER, BLUE], "rejected": [USER, BLUE]})
    assert (identical["prompt"], identical["chosen"], identical["rejected"]) == ([USER], [BLUE], [BLUE])
    assert drop_reason(identical) == "identical_pair"
    assert drop_reason(normalise_row(identical)) == "identical_pair"
    assert drop_reason(normalise_row({"prompt": "a", "chosen": "b", "rejected": "b"})) == "identical_pair"
    assert drop_reason(normalise_row(prefix)) is None


def test_different_system_messages_share_no_prompt():
    other = {"role": "system", "content": "Be long."}
    row = {"chosen": [SYSTEM, USER, BLUE], "rejected": [other, USER, GREEN]}
    assert normalise_row(row) == {"prompt": [], "chosen": [SYSTEM, USER, BLUE], "rejected": [other, USER, GREEN]}
    assert normalise_row(normalise_row(row)) == normalise_row(row)


def test_prompt_that_the_answers_repeat():
    row = {"prompt": USER["content"], "chosen": [USER, BLUE], "rejected": [USER, GREEN], "messages": [USER, BLUE]}
    assert normalise_row(row) == {**CONVERSATIONAL["preference"], "messages": [USER, BLUE]}
    repeated = {"prompt": [USER], "chosen": [USER, BLUE], "rejected": [USER, GREEN]}
    assert normalise_row(repeated) == CONVERSATIONAL["preference"]
    with pytest.raises(UserError, match="Row 1, column 'prompt': the prompt is not among the user's messages"):
        normalise_row({"prompt": "Something else", "chosen": [USER, BLUE], "rejected": [USER, GREEN]}, index=1)


def test_conversation_with_two_last_answers():
    row = {
        "conversations": [{"from": "human", "value": USER["content"]}],
        "chosen": {"from": "gpt", "value": "It is blue."},
        "rejected": {"from": "gpt", "value": "It is green."},
    }
    assert normalise_row(row) == CONVERSATIONAL["preference"]


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ("The sky is blue.", "The sky is green.", ("The sky is", " blue.", " green.")),
        ("The sky is blue.", "The sky is black.", ("The sky is", " blue.", " black.")),  # not inside a word
        ("The sky is", "The sky is blue.", ("The sky", " is", " is blue.")),  # leaves both an answer
        ("Yes", "No", ("", "Yes", "No")),
        ("blue", "black", ("", "blue", "black")),
        ("", "x", ("", "", "x")),
        ("Q: color?\nblue", "Q: color?\nred", ("Q: color?\n", "blue", "red")),
        ("天空是蓝色", "天空是绿色", ("天空是", "蓝色", "绿色")),
        (
            "\n\nHuman: Hi\n\nAssistant: I think so",
            "\n\nHuman: Hi\n\nAssistant: I think not",
            ("\n\nHuman: Hi\n\nAssistant:", " I think so", " I think not"),
        ),
    ],
)
def test_prompt_of_two_texts(chosen, rejected, expected):
    assert split_text(chosen, rejected) == expected
    prompt, first, second = split_text(chosen, rejected)
    assert (prompt + first, prompt + second) == (chosen, rejected)
    swapped = split_text(rejected, chosen)
    assert swapped == (expected[0], expected[2], expected[1])


def test_is_conversational_tells_what_normalising_gives():
    row = {"prompt": "text", "messages": [USER]}
    assert is_conversational(row, "language_modeling") and not is_conversational(row, "prompt_only")
    assert not is_conversational({"text": "a", "tools": [{"name": "f"}]})
    for row in (
        {"instruction": "a", "output": "b"},
        {"instruction": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "completion": "b", "system": None},
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": [BLUE]},
        {"conversations": '[{"from": "human", "value": "x"}]'},
        {"prompt": None, "text": "a", "system": "x"},
    ):
        normal = normalise_row(row)
        assert is_conversational(row) == is_conversational(normal) == any(isinstance(v, list) for v in normal.values()), row


def test_a_label_that_nothing_would_read_is_no_prompt_completion():
    columns = ["prompt", "completion", "label"]
    with pytest.raises(UserError, match="rows with a false label are bad answers") as caught:
        detect_type(columns, ["language_modeling", "prompt_completion"])
    assert "convert: prompt_completion" in str(caught.value)
    assert detect_type(columns) == "unpaired_preference"
    assert detect_type(columns, ["unpaired_preference"]) == "unpaired_preference"
