"""Tokenizers and chat templates of the kinds that go wrong, built on the spot.

Every tokenizer has one token per character, so that ``decode`` gives texts back exactly.
"""

import string

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

CHARACTERS = [*string.printable, "é", "猫"]


def build(special: list[str], merges: list[tuple[str, str]] = (), bos: str | None = None, **names: str):
    tokens = [*special, *CHARACTERS, *(a + b for a, b in merges)]
    backend = Tokenizer(BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=list(merges)))
    backend.decoder = decoders.Fuse()
    if bos:
        backend.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))])
        names["bos_token"] = bos
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.add_special_tokens({"additional_special_tokens": [s for s in special if s not in names.values()]})
    return tokenizer


def t1() -> PreTrainedTokenizerBase:
    """Plain, with a start token added by the post-processor."""
    return build(["<s>", "</s>"], bos="<s>", eos_token="</s>", pad_token="</s>")


def t2() -> PreTrainedTokenizerBase:
    """ChatML: the end of a turn is the end of the sequence and the padding."""
    return build(["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>", pad_token="<|im_end|>")


def t3() -> PreTrainedTokenizerBase:
    """Two end tokens, of the sequence and of the turn."""
    return build(["<eos>", "<end_of_turn>", "<start_of_turn>"], eos_token="<eos>", pad_token="<eos>")


def t4() -> PreTrainedTokenizerBase:
    """Merges characters across the joint of prompt and completion, and a space into the next word."""
    return build(["<eos>"], [("n", "o"), (" ", "y"), ("\n", "\n")], eos_token="<eos>")


class SlowCharacters(PreTrainedTokenizer):
    """A tokenizer in Python, which tells no offsets."""

    model_input_names = ("input_ids", "attention_mask")

    def __init__(self, merges: tuple[str, ...] = (), **kwargs) -> None:
        self.merges = merges
        self._vocab = {t: i for i, t in enumerate([*CHARACTERS, *merges])}
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._vocab)

    def get_vocab(self) -> dict[str, int]:
        return {**self._vocab, **self.added_tokens_encoder}

    def _tokenize(self, text: str) -> list[str]:
        tokens = []
        while text:
            size = next((len(m) for m in self.merges if text.startswith(m)), 1)
            tokens.append(text[:size])
            text = text[size:]
        return tokens

    def _convert_token_to_id(self, token: str) -> int:
        return self._vocab[token]

    def _convert_id_to_token(self, index: int) -> str:
        return next(t for t, i in self._vocab.items() if i == index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def slow(merges: tuple[str, ...] = ()) -> PreTrainedTokenizerBase:
    """Without offsets."""
    return SlowCharacters(merges, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"])


CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# prints the start token itself; the assistant's end is the end of the sequence
M1 = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}"
    "{%- else %}{{- '[INST] ' + m.content + ' [/INST]' }}{%- endif %}{%- endfor %}"
)
M2 = CHATML  # no generation markers
# the generation prompt opens a thinking block, which a turn has only if it holds reasoning
M3 = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}"
    "{{- m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"
)
# a turn ends where the next role's marker stands
M4 = (
    "{%- for m in messages %}{{- '<|' + m.role + '|>\n' + m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"
)
# keeps reasoning, in its own field or inline, in the last assistant turn only
M5 = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- set text = m.content %}{%- set why = '' %}"
    "{%- if m.reasoning_content %}{%- set why = m.reasoning_content %}"
    "{%- elif '</think>' in text %}{%- set why = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set text = text.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if why and loop.last %}{{- '<think>\n' + why + '\n</think>\n\n' }}{%- endif %}"
    "{{- text + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# refuses the system role and roles that do not alternate
M6 = (
    "{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}"
    "{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('Conversation roles must alternate') }}{%- endif %}"
    "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{- m.content | trim + '<end_of_turn>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"
)
# prints tools and calls as JSON
TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
MARKED = CHATML.replace(
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}",
    "{{- '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}{%- generation %}{{- m.content + '<|im_end|>' }}"
    "{%- endgeneration %}{{- '\n' }}{%- else %}{{- m.content + '<|im_end|>\n' }}{%- endif %}",
)


def with_template(tokenizer: PreTrainedTokenizerBase, template: str) -> PreTrainedTokenizerBase:
    tokenizer.chat_template = template
    return tokenizer


def user(text: str, **more) -> dict:
    return {"role": "user", "content": text, **more}


def assistant(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> dict:
    return {"role": "system", "content": text}
