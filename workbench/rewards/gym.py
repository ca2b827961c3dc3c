"""Tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym; optional): rows, and the reward of an answer.

A row carries what makes its problem anew, and the verifier makes it: a problem's metadata (tuples, integers as keys) does not
survive a data set's columns.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any, Literal

from datasets import Dataset

from workbench.errors import UserError, check_at_least, check_choice, nearest
from workbench.rewards.texts import Completion, after_thinking, final_answer, text_of

COLUMN = "reasoning_gym"
MOST = 10**8  # problems of a split; item i is drawn with its data set's seed + i
_OFFSETS = {"train": 0, "test": MOST}


def load_reasoning_gym(
    name: str,
    *,
    split: Literal["train", "test"] = "train",
    size: int = 1024,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    system: str | None = None,
    conversational: bool = True,
) -> Dataset:
    """Prompt-only rows of a task: ``prompt``, ``answer`` (one right answer; empty where the task has none to show) and
    ``reasoning_gym``, what the reward `reasoning_gym` needs, as JSON.

    The test split is drawn from other seeds; a task with few problems may draw the same one again.

    Args:
        name: a task, or ``reasoning_gym:<task>``.
        split: ``train`` or ``test``.
        size: number of rows.
        seed: of the problems.
        config: the task's own options.
        system: a system message before each question.
        conversational: messages rather than text.

    Raises:
        UserError: reasoning-gym is missing, or has no such task or option.
    """
    check_choice("split", split, _OFFSETS)
    check_at_least(1, size=size)
    if not 0 <= seed < MOST or size > MOST:
        raise UserError(f"seed={seed}, size={size}: a seed must lie in [0, {MOST}), a size be at most that.")
    if system is not None and not conversational:
        raise UserError("system needs conversational=true: a text has no system message.")
    problem = {"task": name.removeprefix("reasoning_gym:"), "size": size, "seed": seed + _OFFSETS[split]}
    problem["config"] = dict(config or {})
    problems = _problems(json.dumps(problem, sort_keys=True))
    before = [{"role": "system", "content": system}] if system is not None else []
    rows = []
    for index in range(size):
        entry = problems[index]
        ask = [*before, {"role": "user", "content": entry["question"]}] if conversational else entry["question"]
        needed = json.dumps({**problem, "index": index}, sort_keys=True)
        rows.append({"prompt": ask, "answer": _shown(entry), COLUMN: needed})
    return Dataset.from_list(rows)


def reasoning_gym(
    completions: list[Completion], reasoning_gym: list[str | None], answer: list[str] | None = None, **columns: Any
) -> list[float | None]:
    r"""The task's own score of the final answer, mostly 0 to 1.

    The final answer is the last ``\boxed{...}``, else the last ``<answer>...</answer>``, else the whole text, after any thinking
    block. Rows of other sources have no reward.

    Raises:
        UserError: reasoning-gym is missing, or another version of it made the rows.
    """
    answers = answer or [None] * len(completions)
    return [
        None if needed is None else _score(text_of(c), needed, right)
        for c, needed, right in zip(completions, reasoning_gym, answers, strict=True)
    ]


def _score(text: str, needed: str, right: str | None) -> float:
    problem = json.loads(needed)
    index = problem.pop("index")
    key = json.dumps(problem, sort_keys=True)
    entry = _entry(key, index)
    if right is not None and right != _shown(entry):
        raise UserError(
            f"reasoning_gym: problem {index} of {problem['task']} has another answer now ({_shown(entry)!r}, not {right!r}): the "
            "rows are from another version of reasoning-gym; make them again."
        )
    thought = after_thinking(text)
    return float(_problems(key).score_answer(answer=final_answer(text if thought is None else thought), entry=entry))


def _shown(entry: Mapping[str, Any]) -> str:
    return "" if entry["answer"] is None else str(entry["answer"])


@functools.lru_cache(maxsize=4096)
def _entry(key: str, index: int) -> dict[str, Any]:
    return _problems(key)[index]


@functools.lru_cache(maxsize=64)
def _problems(key: str) -> Any:
    """The data set of a task, its size, its seed and its options, given as JSON."""
    problem = json.loads(key)
    try:
        import reasoning_gym as gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(
            f"reasoning_gym:{problem['task']} needs reasoning-gym ({error}): pip install 'workbench[reasoning-gym]'."
        ) from error
    task, size, seed, config = problem["task"], problem["size"], problem["seed"], problem["config"]
    if task not in DATASETS:
        listed = ", ".join(sorted(DATASETS)[:8])
        raise UserError(f"reasoning_gym has no task {task!r}.{nearest(task, DATASETS)} It has {len(DATASETS)}: {listed}, ...")
    try:
        return gym.create_dataset(task, size=size, seed=seed, **config)
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"reasoning_gym:{task} does not take the options {config}: {str(error).splitlines()[0]}.") from error
