"""Verifiable tasks of the embedded world: rows of every data type, made on the fly from (task, type, seed, split).

Train and test never share a problem, nor one that is trivially the same: ``sums`` and ``compare`` hold out 256 unordered
pairs in both orders (512 problems), ``sort`` holds out multisets of symbols, the other tasks whole questions.
"""

import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from itertools import islice, permutations, product
from random import Random
from typing import Any, Literal

from datasets import Dataset

from workbench.errors import UserError, check_choice

DataType = Literal[
    "language_modeling",
    "prompt_only",
    "prompt_completion",
    "preference",
    "triple_preference",
    "unpaired_preference",
    "stepwise_supervision",
]
Split = Literal["train", "test"]
Row = dict[str, Any]
Words = tuple[str, ...]
Pair = tuple[int, int]

HELD_OUT_PAIRS = 256
DRAWN_ROWS = {"train": 8192, "test": 512}
ADD_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@dataclass(frozen=True)
class Task:
    """How to ask and how to solve; a problem is a tuple of numbers or words.

    Attributes:
        question: text of a problem; the answer follows it directly.
        solve: the solution's steps, of which the last one ends in the answer; given a random generator, one step is wrong
            and so is the answer.
        held_out: whether a problem belongs to the test split.
        draw: one random problem, for tasks too large to list.
        space: all problems, for tasks small enough to list.
    """

    question: Callable[[tuple], str]
    solve: Callable[[tuple, Random | None], list[str]]
    held_out: Callable[[tuple], bool]
    draw: Callable[[Random], tuple] | None = None
    space: list[tuple] = field(default_factory=list)

    def problems(self, split: Split, rng: Random) -> Iterator[tuple]:
        """Endless problems of a split: listed ones in shuffled passes over all of them, others drawn with repetition."""
        wanted = split == "test"
        listed = [problem for problem in self.space if self.held_out(problem) == wanted]
        while True:
            if self.draw is not None:
                yield from filter(lambda problem: self.held_out(problem) == wanted, [self.draw(rng)])
            else:
                yield from rng.sample(listed, len(listed))

    def default_size(self, split: Split) -> int:
        if self.draw is not None:
            return DRAWN_ROWS[split]
        return sum(self.held_out(problem) == (split == "test") for problem in self.space)


def make_rows(
    task: str,
    type: DataType = "prompt_completion",
    size: int | None = None,
    seed: int = 0,
    split: Split = "train",
    conversational: bool | None = None,
    *,
    turns: int = 1,
    margin: bool = False,
) -> list[Row]:
    """Rows of one data type, the same for the same arguments; a smaller size gives the first rows of a larger one.

    The problems depend on (task, seed, split) alone, so that data sets of several types are about the same problems.

    Args:
        task: a name of `TASKS`.
        type: the data type; prompt-only rows carry the right ``answer``.
        size: number of rows, beyond the number of problems with repetition; None for each problem once, or 8192 train
            and 512 test rows where the problems cannot be listed.
        seed: of the order of the problems and of the errors in wrong answers.
        split: ``train`` or ``test``.
        conversational: message lists or plain text; None for message lists where the type has them.
        turns: problems in one conversation, for conversational language modelling.
        margin: adds to preference rows the number of wrong steps in the rejected answer.

    Raises:
        UserError: an unknown name, a size below one, or an option without effect on the type.
    """
    _check(task, type, size, split, conversational, turns, margin)
    if conversational is None:
        conversational = type != "stepwise_supervision"
    size = TASKS[task].default_size(split) if size is None else size
    problems = TASKS[task].problems(split, Random(f"{task} {split} {seed}"))
    errors = Random(f"{task} {split} {seed} {type}")
    if turns > 1:
        return [_conversation(TASKS[task], islice(problems, turns)) for _ in range(size)]
    rows = [ROWS[type](TASKS[task], problem, errors) for problem in islice(problems, size)]
    if type == "preference" and not margin:
        rows = [{key: value for key, value in row.items() if key != "margin"} for row in rows]
    return [_as_messages(row) for row in rows] if conversational else [_as_text(row) for row in rows]


def make_tool_rows(size: int, seed: int = 0, split: Split = "train") -> list[Row]:
    """Conversations about ``sums`` in which the assistant calls an ``add`` tool: columns ``messages`` and ``tools``."""
    _check("sums", "language_modeling", size, split, None, 1, False)
    problems = TASKS["sums"].problems(split, Random(f"sums {split} {seed}"))
    return [{"messages": _tool_messages(*pair), "tools": [ADD_TOOL]} for pair in islice(problems, size)]


def tiny_dataset(
    task: str,
    type: DataType = "prompt_completion",
    size: int | None = None,
    seed: int = 0,
    split: Split = "train",
    conversational: bool | None = None,
    *,
    turns: int = 1,
    margin: bool = False,
) -> Dataset:
    """`make_rows` as a data set, with the same arguments."""
    rows = make_rows(task, type, size, seed, split, conversational, turns=turns, margin=margin)
    return Dataset.from_list(rows)


def load_tiny(
    name: str,
    *,
    split: Split = "train",
    size: int | None = None,
    seed: int = 0,
    type: DataType = "prompt_completion",
    conversational: bool | None = None,
    turns: int = 1,
    margin: bool = False,
) -> Dataset:
    """The data set of a source name, ``tiny:<task>`` or ``<task>``; the other arguments are `make_rows`'s."""
    task = name.removeprefix("tiny:")
    return tiny_dataset(task, type, size, seed, split, conversational, turns=turns, margin=margin)


def verifier(task: str) -> Callable[..., list[float]]:
    """The reward function of a task: `exact_match` on the ``answer`` column, for every task of `TASKS`."""
    check_choice("task", task, TASKS)
    return exact_match


def exact_match(prompts: list, completions: list, answer: list[Any], **columns: Any) -> list[float | None]:
    """1.0 where a completion, surrounding white space apart, is the answer and nothing else; otherwise 0.0, and None without one.

    A completion is a text or a list of messages, whose last one counts. An answer may be a number.
    """
    pairs = zip(map(_text, completions), answer, strict=True)
    return [None if right is None else float(text.strip() == str(right).strip()) for text, right in pairs]


def _text(completion: str | list[Row]) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"] or ""


def _check(task: str, type: str, size: int | None, split: str, conversational: bool | None, turns: int, margin: bool) -> None:
    check_choice("task", task, TASKS)
    check_choice("type", type, ROWS)
    check_choice("split", split, DRAWN_ROWS)
    if size is not None and size < 1:
        raise UserError(f"size={size} gives no rows. Use 1 or more, or null for all.")
    if conversational and type == "stepwise_supervision":
        raise UserError("conversational=true: stepwise supervision has no conversational form. Use false or null.")
    if turns < 1 or (turns > 1 and (type != "language_modeling" or conversational is False)):
        raise UserError(f"turns={turns} needs type=language_modeling, conversational, and at least 1 turn.")
    if margin and type != "preference":
        raise UserError(f"margin=true needs type=preference, not {type}.")


# One plain row per data type: texts under the names that the conversational form shares.


def _language_modeling(task: Task, problem: tuple, errors: Random) -> Row:
    return {"prompt": task.question(problem), "text": _answer(task.solve(problem, None))}


def _prompt_only(task: Task, problem: tuple, errors: Random) -> Row:
    return {"prompt": task.question(problem), "answer": _answer(task.solve(problem, None))}


def _prompt_completion(task: Task, problem: tuple, errors: Random) -> Row:
    return {"prompt": task.question(problem), "completion": _answer(task.solve(problem, None))}


def _preference(task: Task, problem: tuple, errors: Random) -> Row:
    right, wrong = task.solve(problem, None), task.solve(problem, errors)
    return {
        "prompt": task.question(problem),
        "chosen": _answer(right),
        "rejected": _answer(wrong),
        "margin": float(_labels(wrong, right).count(False)),
    }


def _triple_preference(task: Task, problem: tuple, errors: Random) -> Row:
    row = _preference(task, problem, errors)
    return {"prompt": row["prompt"], "chosen": row["chosen"], "rejected": row["rejected"], "reference": row["chosen"]}


def _unpaired_preference(task: Task, problem: tuple, errors: Random) -> Row:
    label = errors.random() < 0.5
    steps = task.solve(problem, None if label else errors)
    return {"prompt": task.question(problem), "completion": _answer(steps), "label": label}


def _stepwise_supervision(task: Task, problem: tuple, errors: Random) -> Row:
    right = task.solve(problem, None)
    steps = right if errors.random() < 0.5 else task.solve(problem, errors)
    return {"prompt": task.question(problem), "completions": steps, "labels": _labels(steps, right)}


ROWS: dict[str, Callable[[Task, tuple, Random], Row]] = {
    "language_modeling": _language_modeling,
    "prompt_only": _prompt_only,
    "prompt_completion": _prompt_completion,
    "preference": _preference,
    "triple_preference": _triple_preference,
    "unpaired_preference": _unpaired_preference,
    "stepwise_supervision": _stepwise_supervision,
}


def _answer(steps: list[str]) -> str:
    return steps[-1].rpartition("=")[2]


def _labels(steps: list[str], right: list[str]) -> list[bool]:
    """A step is right while it and all the steps before it are."""
    return [steps[: end + 1] == right[: end + 1] for end in range(len(steps))]


def _as_text(row: Row) -> Row:
    return {"text": row["prompt"] + row["text"]} if "text" in row else row


def _as_messages(row: Row) -> Row:
    if "text" in row:
        return {"messages": [_message("user", row["prompt"]), _message("assistant", row["text"])]}
    roles = {"prompt": "user", **dict.fromkeys(("completion", "chosen", "rejected", "reference"), "assistant")}
    return {key: [_message(roles[key], value)] if key in roles else value for key, value in row.items()}


def _message(role: str, content: str) -> Row:
    return {"role": role, "content": content}


def _conversation(task: Task, problems: Iterable[tuple]) -> Row:
    messages = []
    for problem in problems:
        answer = _answer(task.solve(problem, None))
        messages += [_message("user", task.question(problem)), _message("assistant", answer)]
    return {"messages": messages}


def _tool_messages(a: int, b: int) -> list[Row]:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    return [
        _message("user", f"{a}+{b}="),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": str(a + b)},
        _message("assistant", str(a + b)),
    ]


# The tasks.


def _hash(problem: object) -> int:
    return int.from_bytes(sha256(repr(problem).encode()).digest()[:8])


@cache
def _held_out_pairs() -> frozenset[Pair]:
    pairs = [(a, b) for a, b in product(range(100), repeat=2) if a < b]
    return frozenset(sorted(pairs, key=_hash)[:HELD_OUT_PAIRS])


def _pair_held_out(pair: Pair) -> bool:
    return (min(pair), max(pair)) in _held_out_pairs()


def _words_held_out(words: Words) -> bool:
    return _hash(words) % 16 == 0


def _slip(value: int, unit: int, error: Random | None) -> int:
    """``value``, or with a generator one ``unit`` off it and not below zero."""
    if error is None:
        return value
    return value + unit * (error.choice((-1, 1)) if value >= unit else 1)


def _add(pair: Pair, error: Random | None) -> list[str]:
    a, b = pair
    wrong = [None] * 3
    if error is not None:
        wrong[error.randrange(3)] = error
    ones = _slip(a % 10 + b % 10, 1, wrong[0])
    tens = _slip(a - a % 10 + b - b % 10, 10, wrong[1])
    total = _slip(tens + ones, 10, wrong[2])
    return [f"{a % 10}+{b % 10}={ones}", f"{a - a % 10}+{b - b % 10}={tens}", f"{tens}+{ones}={total}"]


def _larger(pair: Pair, error: Random | None) -> list[str]:
    a, b = pair
    sign, other = ("<", ">") if a < b else (">", "<")
    if error is None:
        return [f"{a}{sign}{b}", str(max(pair))]
    return [f"{a}{error.choice((sign, other))}{b}", str(min(pair))]


def _spell(answer: str, error: Random | None) -> list[str]:
    """The answer growing by a symbol a step; an error puts another of its symbols in one place."""
    if error is not None:
        at = error.randrange(len(answer))
        alphabet = string.digits if answer.isdigit() else string.ascii_lowercase
        others = sorted(set(answer) - {answer[at]}) or sorted(set(alphabet) - {answer[at]})
        answer = answer[:at] + error.choice(others) + answer[at + 1 :]
    return [answer[:end] for end in range(1, len(answer) + 1)]


def _draw_word(rng: Random, alphabet: str) -> str:
    return "".join(rng.choices(alphabet, k=rng.randint(3, 6)))


def _draw_symbols(rng: Random) -> Words:
    return (_draw_word(rng, rng.choice((string.digits, string.ascii_lowercase))),)


def _draw_letters(rng: Random) -> Words:
    return (_draw_word(rng, string.ascii_lowercase),)


def _draw_edit(rng: Random) -> Words:
    """(edit, its letters, word); few letters, so that the edit often hits more than one place, and never all of them."""
    while True:
        word, edit = _draw_word(rng, "abcdef"), rng.choice(("delete", "double", "replace"))
        old, new = rng.choice(word), rng.choice("abcdef")
        if len(set(word)) > 1 and (edit != "replace" or new != old):
            return edit, old + new if edit == "replace" else old, word


def _edited(problem: Words) -> str:
    edit, letters, word = problem
    return word.replace(letters[0], {"delete": "", "double": letters * 2, "replace": letters[-1]}[edit])


TASKS: dict[str, Task] = {
    "sums": Task(
        question=lambda pair: f"{pair[0]}+{pair[1]}=",
        solve=_add,
        held_out=_pair_held_out,
        space=list(product(range(100), repeat=2)),
    ),
    "compare": Task(
        question=lambda pair: f"max {pair[0]} {pair[1]}=",
        solve=_larger,
        held_out=_pair_held_out,
        space=list(permutations(range(100), 2)),
    ),
    "sort": Task(
        question=lambda words: f"sort {words[0]}=",
        solve=lambda words, error: _spell("".join(sorted(words[0])), error),
        held_out=lambda words: _words_held_out(tuple(sorted(words[0]))),
        draw=_draw_symbols,
    ),
    "reverse": Task(
        question=lambda words: f"reverse {words[0]}=",
        solve=lambda words, error: _spell(words[0][::-1], error),
        held_out=_words_held_out,
        draw=_draw_letters,
    ),
    "copy": Task(
        question=lambda words: f"copy {words[0]}=",
        solve=lambda words, error: _spell(words[0], error),
        held_out=_words_held_out,
        draw=_draw_letters,
    ),
    "edit": Task(
        question=lambda words: f"{words[0]} {words[1]} {words[2]}=",
        solve=lambda words, error: _spell(_edited(words), error),
        held_out=_words_held_out,
        draw=_draw_edit,
    ),
}
