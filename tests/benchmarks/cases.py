"""What the benchmark against TRL measures: models, rows and the options of both sides.

Words are tokens: a vocabulary of ``w0 w1 ...``, split at blanks, so that a row's length in tokens is what is written here.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARM_UP = 1  # steps of each side before those that count
END, PAD, UNKNOWN = "<end>", "<pad>", "<unk>"
Row = dict[str, Any]


@dataclass
class Case:
    """One line of the table.

    Args:
        title: as the table has it.
        method: of workbench: ``method=<method>``.
        rows: makes the rows of so many optimizer steps.
        batch: rows of an optimizer step.
        goals: least ratio to TRL's time, to that of padded PyTorch, and to TRL's peak memory; None: none.
        ours: further overrides.
        theirs: further fields of TRL's config.
        steps: optimizer steps that are timed together (a window of an online method).
        model: what differs from the model of the other cases.
        script: completions of an online case, by a prompt's first token, instead of sampling.
        group: completions of each prompt of an online case.
        same_loss: whether the losses of both sides are comparable.
        prepares: rows are made ready for training, and nothing is trained; the number of tokens takes the place of a loss.
    """

    title: str
    method: str
    rows: Callable[[int], list[Row]]
    batch: int
    goals: tuple[float | None, float | None, float | None]
    ours: list[str] = field(default_factory=list)
    theirs: dict[str, Any] = field(default_factory=dict)
    steps: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    script: Callable[[Sequence[int], int], list[int]] | None = None
    group: int = 8
    same_loss: bool = True
    prepares: bool = False


MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32_000,
    "max_position_embeddings": 16_384,
    "tie_word_embeddings": True,
}

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def words(rng: random.Random, count: int) -> str:
    """``count`` words."""
    return " ".join(f"w{rng.randrange(31_000)}" for _ in range(count))


def _pairs(prompt: int, completion: int, batch: int) -> Callable[[int], list[Row]]:
    """Preference pairs; the end token is one of the completion's."""

    def rows(steps: int) -> list[Row]:
        rng = random.Random(0)
        made = []
        for _ in range(steps * batch):
            start = words(rng, prompt)
            made.append({"prompt": start} | {k: " " + words(rng, completion - 1) for k in ("chosen", "rejected")})
        return made

    return rows


def _completions(lengths: Sequence[tuple[int, int]], labels: bool = False) -> Callable[[int], list[Row]]:
    """Prompts and completions of ``lengths`` in every step."""

    def rows(steps: int) -> list[Row]:
        rng = random.Random(0)
        made = []
        for _ in range(steps):
            for i, (prompt, completion) in enumerate(lengths):
                row: Row = {"prompt": words(rng, prompt), "completion": " " + words(rng, completion - 1)}
                made.append(row | ({"label": i % 2 == 0} if labels else {}))
        return made

    return rows


def _texts(lengths: Sequence[int]) -> Callable[[int], list[Row]]:
    def rows(steps: int) -> list[Row]:
        rng = random.Random(0)
        return [{"text": words(rng, length - 1)} for _ in range(steps) for length in lengths]

    return rows


def _prompts(length: int, groups: int, steps: int = 1) -> Callable[[int], list[Row]]:
    """Prompts of windows of ``steps`` optimizer steps, one window after the other."""

    def rows(count: int) -> list[Row]:
        rng = random.Random(0)
        return [{"prompt": words(rng, length)} for _ in range(groups * -(-count // steps))]

    return rows


def scripted(prompt_ids: Sequence[int], sample: int, length: int = 64) -> list[int]:
    """Completion number ``sample`` of a prompt, the same wherever it is asked for."""
    rng = random.Random(f"{prompt_ids[0]} {sample}")
    return [rng.randrange(31_000) for _ in range(length)]


def reward(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """Share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def _chats(count: int) -> Callable[[int], list[Row]]:
    """Conversations of two to six messages, of made-up words."""

    def rows(steps: int) -> list[Row]:
        rng = random.Random(0)
        syllables = ["ba", "co", "di", "fu", "ge", "la", "mi", "no", "pe", "ra", "si", "tu", "ve", "zo"]
        known = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(3000)]
        made = []
        for _ in range(count):
            roles = ["user", "assistant"] * rng.randint(1, 3)
            texts = [" ".join(rng.choices(known, k=rng.randint(4, 24))) for _ in roles]
            made.append({"messages": [{"role": r, "content": text} for r, text in zip(roles, texts, strict=True)]})
        return made

    return rows


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>"
    "{% endgeneration %}{% else %}{{ m.content }}<end>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def _online(script: bool, iterations: int, group: int = 8) -> dict[str, Any]:
    ours = [
        "method.rewards=[tests.benchmarks.cases:reward]",
        f"method.num_generations={group}",
        f"method.num_iterations={iterations}",
        "method.max_completion_length=64",
        "method.importance_sampling_mode=null",
        "method.log_completions_every_n_steps=0",
    ]
    theirs = {
        "num_generations": group,
        "num_iterations": iterations,
        "max_completion_length": 64,
        "steps_per_generation": 1,
        "beta": 0.0,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
    }
    return {"ours": ours, "theirs": theirs, "script": scripted if script else None, "steps": iterations, "group": group}


MIXED = (32, 96, 160, 224, 288, 352, 448, 512)
CASES = {
    "sft_mixed": Case("SFT, mixed lengths 32-512, 8 rows, no packing", "sft", _texts(MIXED), 8, (3, 1.5, 2)),
    "sft_completion": Case(
        "SFT, completion-only, prompt 512, completion 64, 8 rows", "sft", _completions([(512, 64)] * 8), 8, (3, 1.2, 2)
    ),
    "dpo_long_prompt": Case("DPO, prompt 512, completions 128, 4 pairs", "dpo", _pairs(512, 128, 4), 4, (3.5, 1.5, 2)),
    "dpo_short_prompt": Case("DPO, prompt 128, completions 256, 4 pairs", "dpo", _pairs(128, 256, 4), 4, (2.5, 1.1, 2)),
    "kto": Case("KTO, prompt 256, completion 128, 8 rows", "kto", _completions([(256, 128)] * 8, labels=True), 8, (2, 1.3, 1.5)),
    "reward": Case("reward, prompt 512, completions 64, 4 pairs", "reward", _pairs(512, 64, 4), 4, (1.7, 1.6, 1.5)),
    "grpo": Case(
        "GRPO training part, prompt 256, 2 groups of 8 x 64, two iterations",
        "grpo",
        _prompts(256, 2, 2),
        16,
        (6, 2.6, 3),
        **_online(True, 2),
    ),
    "grpo_generation": Case(
        "GRPO with generation, torch engine against TRL's default",
        "grpo",
        _prompts(256, 2),
        16,
        (3, None, 2),
        same_loss=False,
        **_online(False, 1),
    ),
    "prepare": Case(
        "tokenise and pack 50k chat rows, two processes",
        "sft",
        _chats(50_000),
        8,
        (2, None, None),
        ours=["data.packing=bfd", "data.max_length=1024", "data.num_proc=2"],
        theirs={"packing": True, "max_length": 1024, "dataset_num_proc": 2},
        model=SMALL,
        prepares=True,
    ),
    "vocabulary": Case(
        "one forward+backward at 8,192 tokens, 128k vocabulary (small width)",
        "sft",
        _texts([8192]),
        1,
        (1, 1, 2),
        model=SMALL | {"vocab_size": 131_072},
    ),
}


# A small model, whose steps grow along one axis: what it is, and its sizes.
GROWTH_MODEL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
GROWTH = {
    "length": ("SFT, tokens of one row", (256, 512, 1024, 2048, 4096, 8192)),
    "group": ("GRPO, completions of 64 tokens of one prompt of 256", (2, 4, 8, 16, 32)),
    "vocabulary": ("SFT, tokens in the vocabulary, a row of 1,024", (8192, 32_768, 65_536, 131_072, 262_144)),
}


def growth_case(axis: str, size: int) -> Case:
    """A point of an axis of `GROWTH`."""
    title, model, none = f"{GROWTH[axis][0]}: {size}", dict(GROWTH_MODEL), (None, None, None)
    if axis == "group":
        return Case(title, "grpo", _prompts(256, 1), size, none, model=model, **_online(True, 1, size))
    if axis == "vocabulary":
        model["vocab_size"] = size
    return Case(title, "sft", _texts([size if axis == "length" else 1024]), 1, none, model=model)


def find(name: str) -> Case:
    """A case of `CASES`, or ``growth-<axis>-<size>``."""
    if not name.startswith("growth-"):
        return CASES[name]
    _, axis, size = name.split("-")
    return growth_case(axis, int(size))


def write(case: Case, folder: Path, steps: int) -> None:
    """Writes the model, its tokenizer and the rows of ``steps`` timed units into ``folder``."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

    options = MODEL | case.model
    top = min(options["vocab_size"], 32_000)
    known = {END: top - 2, PAD: top - 1, UNKNOWN: top - 3} | {f"w{i}": i for i in range(top - 1000)}
    backend = Tokenizer(WordLevel(known, unk_token=UNKNOWN))
    backend.pre_tokenizer = WhitespaceSplit()
    rows = case.rows((steps + WARM_UP) * case.steps)
    if case.prepares:
        backend = _byte_pairs(rows[:2000])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=PAD, unk_token=UNKNOWN)
    tokenizer.chat_template = TEMPLATE if case.prepares else None
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = LlamaConfig(**options, **special, num_labels=1)
    kind = LlamaForSequenceClassification if case.method == "reward" else LlamaForCausalLM
    kind(config).save_pretrained(folder / "model")
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _byte_pairs(rows: list[Row]) -> Any:
    """A tokenizer learnt from conversations."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = [END, PAD, UNKNOWN, "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=4000, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator((m["content"] for row in rows for m in row["messages"]), trainer)
    return backend


def read_rows(folder: Path) -> list[Row]:
    """The rows that `write` wrote."""
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def batches(rows: list[Row], size: int) -> Iterator[list[Row]]:
    """Rows of one optimizer step after the other."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
