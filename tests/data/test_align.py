"""The tokens of a whole text and of its parts are those that the offsets tell."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.data import rig
from workbench.data.align import TextEncoder
from workbench.data.targets import END


def _padded():
    """Puts a mark that is no character of the text before it, and drops every c."""
    vocabulary = {t: i for i, t in enumerate(["▁", *"abc猫", "<eos>"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace("c", "")])
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("▁", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.mark.parametrize("make", [rig.t1, rig.t2, rig.t4, _padded])
@pytest.mark.parametrize("text", ["", " ", "c", "a", "abc", "no yes\n\n", "é猫 no", "<|im_start|>no<|im_end|>", "ca猫c"])
def test_places_are_those_of_the_offsets(make, text):
    tokenizer = make()
    (encoded,) = TextEncoder(tokenizer).encode([text])
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert encoded.ids.tolist() == out["input_ids"]
    pairs = np.array(out["offset_mapping"], dtype=int).reshape(-1, 2)
    ends = np.maximum.accumulate(pairs[:, 1])
    starts = np.minimum(pairs[:, 0], np.concatenate([[0], ends])[: len(ends)])
    for start in range(len(text) + 1):
        for end in (*range(start, len(text) + 1), END):
            expected = int((ends <= start).sum()), int((starts < end).sum())
            assert encoded.tokens_in(start, end) == expected, (start, end)


def test_offsets_of_a_whole_text_are_not_read():
    (encoded,) = TextEncoder(rig.t2()).encode(["a text"])
    assert encoded.tokens_in(0, 6) == (0, 6)
    assert "places" not in vars(encoded)
