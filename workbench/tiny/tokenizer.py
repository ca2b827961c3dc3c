"""The tokenizer of the embedded world: one token per character, plus a few whole words of its chat template."""

import re
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, START, END = "<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
# Ordinary text to the tokenizer, one token each: a chat's fixed part would otherwise be longer than a row's content.
WORDS = ("system", "user", "assistant", "tool", "<think>", "</think>", "<tool_call>", "</tool_call>")
CHARACTERS = ("\n", "\t", *map(chr, range(0x20, 0x7F)))
MAX_LENGTH = 1024


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A new tokenizer of 109 tokens: printable ASCII, line break and tab by character, template words and special tokens.

    Encoding adds no token and any text of the known characters decodes to itself; other characters become ``<|unk|>``.
    There is no BOS; the EOS ends an assistant turn; the pad token has an id of its own.
    """
    tokenizer = Tokenizer(models.WordLevel(_vocabulary(), unk_token=UNKNOWN))
    longest_first = sorted(WORDS, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, longest_first), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        extra_special_tokens=[START],
        chat_template=Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8"),
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )


def _vocabulary() -> dict[str, int]:
    return {token: index for index, token in enumerate((PAD, UNKNOWN, START, END, *WORDS, *CHARACTERS))}
