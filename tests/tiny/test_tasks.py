import json
import re
from pathlib import Path

import pytest

from workbench.errors import UserError
from workbench.tiny.tasks import ROWS, TASKS, exact_match, load_tiny, make_rows, make_tool_rows, tiny_dataset, verifier
from workbench.tiny.tokenizer import tiny_tokenizer

# "<task> <type> <chat|plain>" -> rows of make_rows(task, type, 2, 3, "test", chat).
EXPECTED = json.loads(Path(__file__).with_name("expected_rows.json").read_text())
COMBINATIONS = [
    f"{task} {type} {form}"
    for task in TASKS
    for type in ROWS
    for form in ("chat", "plain")
    if (type, form) != ("stepwise_supervision", "chat")
]


def solve(question):
    """A second solver, which reads the question alone."""
    words = question.removesuffix("=").split(" ")
    if "+" in words[0]:
        return str(sum(map(int, words[0].split("+"))))
    return {
        "max": lambda: str(max(map(int, words[1:]))),
        "sort": lambda: "".join(sorted(words[1])),
        "reverse": lambda: words[1][::-1],
        "copy": lambda: words[1],
        "delete": lambda: words[2].replace(words[1], ""),
        "double": lambda: words[2].replace(words[1], 2 * words[1]),
        "replace": lambda: words[2].replace(words[1][0], words[1][1]),
    }[words[0]]()


def same_problem(task, question):
    """What must not be in both splits."""
    if task in ("sums", "compare"):
        return tuple(sorted(re.findall(r"\d+", question)))
    return "".join(sorted(question)) if task == "sort" else question


@pytest.mark.parametrize("name", COMBINATIONS)
def test_rows_are_the_expected_ones(name):
    task, type, form = name.split()
    assert make_rows(task, type, 2, 3, "test", form == "chat") == EXPECTED[name]


def test_every_combination_is_expected():
    assert sorted(EXPECTED) == sorted(COMBINATIONS)


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_right_and_wrong_answers_wrong(task):
    for row in make_rows(task, "prompt_only", 300, conversational=False):
        assert row["answer"] == solve(row["prompt"]) and row["answer"] == row["answer"].strip() != ""
    for row in make_rows(task, "preference", 300, conversational=False):
        assert row["chosen"] == solve(row["prompt"]) != row["rejected"] != ""
    for row in make_rows(task, "triple_preference", 300, conversational=False):
        assert row["reference"] == row["chosen"] == solve(row["prompt"]) != row["rejected"] != ""
    rows = make_rows(task, "unpaired_preference", 300, conversational=False)
    assert all((row["completion"] == solve(row["prompt"])) == row["label"] for row in rows)
    assert 100 < sum(row["label"] for row in rows) < 200
    for row in make_rows(task, "language_modeling", 20, conversational=False):
        question, _, answer = row["text"].rpartition("=")
        assert answer == solve(question)


@pytest.mark.parametrize("task", TASKS)
def test_steps_are_right_until_the_first_wrong_one(task):
    rows = make_rows(task, "stepwise_supervision", 400)
    first_wrong = set()
    for row in rows:
        labels, answer = row["labels"], row["completions"][-1].rpartition("=")[2]
        assert labels == sorted(labels, reverse=True) and len(labels) == len(row["completions"])
        assert (answer == solve(row["prompt"])) == all(labels)
        first_wrong.add(labels.index(False) if False in labels else None)
    assert {None, 0, 1} <= first_wrong, "errors in several places, and rows without any"
    assert 120 < sum(all(row["labels"]) for row in rows) < 280


def test_steps_of_a_sum_follow_from_each_other():
    for row in make_rows("sums", "stepwise_supervision", 300):
        ones, tens, total = (step.split("=") for step in row["completions"])
        assert total[0] == f"{tens[1]}+{ones[1]}"
        if row["labels"][-2:] == [True, False]:
            assert sum(map(int, total[0].split("+"))) != int(total[1])


@pytest.mark.parametrize("task", TASKS)
def test_splits_share_no_problem(task):
    train, test = (
        {same_problem(task, row["prompt"]) for row in make_rows(task, "prompt_only", None, seed, split, False)}
        for split, seed in (("train", 0), ("test", 1))
    )
    assert len(test) > 200 and not train & test


@pytest.mark.parametrize("type", ROWS)
def test_splits_are_the_same_for_every_type(type):
    def questions(type, split):
        rows = make_rows("sums", type, 2000, 0, split, conversational=False)
        return {(row.get("prompt") or row["text"].partition("=")[0] + "=") for row in rows}

    assert questions(type, "train") == questions("prompt_only", "train")
    assert questions(type, "test") == questions("prompt_only", "test")


def test_sums_hold_out_512_pairs_in_both_orders():
    train = [row["prompt"] for row in make_rows("sums", "prompt_only", None, 0, "train", False)]
    test = [row["prompt"] for row in make_rows("sums", "prompt_only", None, 0, "test", False)]
    assert (len(train), len(test)) == (9488, 512)
    assert sorted(train + test) == sorted(f"{a}+{b}=" for a in range(100) for b in range(100))
    assert {"=".join(reversed(q[:-1].split("+"))).replace("=", "+") + "=" for q in test} == set(test)


@pytest.mark.parametrize("task", TASKS)
def test_rows_depend_on_their_arguments_alone(task):
    rows = make_rows(task, "preference", 50, seed=4)
    assert make_rows(task, "preference", 50, seed=4) == rows
    assert make_rows(task, "preference", 20, seed=4) == rows[:20]
    assert make_rows(task, "preference", 50, seed=5) != rows


def test_more_rows_than_problems_repeat_them_evenly_in_a_new_order():
    prompts = [row["prompt"] for row in make_rows("sums", "prompt_only", 1024 + 100, 0, "test", False)]
    first, second = prompts[:512], prompts[512:1024]
    assert sorted(first) == sorted(second) and first != second
    assert set(prompts[1024:]) < set(first)


def test_margin_counts_wrong_steps():
    plain = make_rows("copy", "preference", 100, conversational=False)
    rows = make_rows("copy", "preference", 100, conversational=False, margin=True)
    assert [{k: v for k, v in row.items() if k != "margin"} for row in rows] == plain
    for row in rows:
        wrong = next(i for i, (a, b) in enumerate(zip(row["chosen"], row["rejected"], strict=True)) if a != b)
        assert row["margin"] == float(len(row["chosen"]) - wrong)
    assert len({row["margin"] for row in rows}) > 3


def test_turns_make_one_conversation_of_several_problems():
    rows = make_rows("sums", "language_modeling", 5, seed=2, turns=3)
    single = make_rows("sums", "language_modeling", 15, seed=2)
    assert [len(row["messages"]) for row in rows] == [6] * 5
    assert [m for row in rows for m in row["messages"]] == [m for row in single for m in row["messages"]]


def test_tool_rows():
    (row,) = make_tool_rows(1, seed=7)
    question = make_rows("sums", "prompt_only", 1, seed=7)[0]
    a, b = (int(number) for number in re.findall(r"\d+", question["prompt"][0]["content"]))
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    assert row["messages"] == [
        *question["prompt"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": question["answer"]},
        {"role": "assistant", "content": question["answer"]},
    ]
    assert set(row["tools"][0]["function"]["parameters"]["properties"]) == {"a", "b"}
    text = tiny_tokenizer().apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
    assert f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call><|im_end|>' in text


@pytest.mark.parametrize("task", TASKS)
def test_rows_use_known_characters_only(task):
    tokenizer = tiny_tokenizer()
    texts = [row["text"] for row in make_rows(task, "language_modeling", 50, conversational=False)]
    assert tokenizer.unk_token_id not in {token for ids in tokenizer(texts).input_ids for token in ids}


def test_verifier_wants_the_whole_answer_and_nothing_else():
    completions = ["132", " 132\n", "132 or 133", "132\n132", "0132", "", "The answer: 132"]
    answers = ["132"] * len(completions)
    expected = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert verifier("sums")(prompts=[""] * 7, completions=completions, answer=answers, label=[1] * 7) == expected
    chats = [[{"role": "assistant", "content": text}] for text in completions]
    assert exact_match([""] * 7, chats, answer=answers) == expected
    called = [{"role": "assistant", "content": None}, {"role": "tool", "content": "1"}, *chats[0]]
    assert exact_match(["", ""], [called, called[:1]], answer=answers[:2]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="shorter"):
        exact_match(["", ""], ["132", "132"], answer=["132"])


def test_dataset_holds_the_rows():
    rows = make_rows("edit", "preference", 30, 1, "test", margin=True)
    loaded = load_tiny("tiny:edit", split="test", size=30, seed=1, type="preference", margin=True)
    assert loaded.to_list() == rows == tiny_dataset("edit", "preference", 30, 1, "test", margin=True).to_list()
    assert loaded._fingerprint == tiny_dataset("edit", "preference", 30, 1, "test", margin=True)._fingerprint
    assert load_tiny("sums", conversational=False)[0] == make_rows("sums", conversational=False)[0]
    assert len(load_tiny("tiny:compare")) == 9388 and len(load_tiny("tiny:sort", split="test")) == 512


def test_problems_do_not_depend_on_the_form():
    chat = make_rows("sums", "prompt_only", 5, split="test")
    plain = make_rows("sums", "prompt_only", 5, split="test", conversational=False)
    assert [row["prompt"][0]["content"] for row in chat] == [row["prompt"] for row in plain]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "sum"}, "Did you mean 'sums'?"),
        ({"type": "preferences"}, "Did you mean 'preference'?"),
        ({"split": "val"}, "Allowed: train, test."),
        ({"size": 0}, "size=0 gives no rows"),
        ({"type": "stepwise_supervision", "conversational": True}, "no conversational form"),
        ({"turns": 2}, "needs type=language_modeling"),
        ({"turns": 0, "type": "language_modeling"}, "at least 1 turn"),
        ({"turns": 2, "type": "language_modeling", "conversational": False}, "conversational"),
        ({"margin": True}, "needs type=preference"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make_rows(**{"task": "sums", "size": 1} | arguments)
    with pytest.raises(UserError, match="task='none'"):
        verifier("none")
