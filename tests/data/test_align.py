"""The tokens of a whole text and of its parts are those that the offsets tell."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
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


def _bytes():
    """Bytes, as GPT-2 writes them, some in pairs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("n", "o"), ("Ġ", "y"), ("Ġy", "e"), ("Ċ", "Ċ")]
    vocabulary = {t: i for i, t in enumerate([*alphabet, *(a + b for a, b in merges), "<eos>", "<|im_start|>"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.normalizer, backend.pre_tokenizer = normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor, backend.decoder = processors.ByteLevel(trim_offsets=True), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", extra_special_tokens=["<|im_start|>"])


def _prefixed():
    """Puts a blank before a text."""
    backend = Tokenizer(models.BPE(vocab={"<eos>": 0, "Ġ": 1, "a": 2}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.mark.parametrize("make", [rig.t1, rig.t2, rig.t4, _bytes, _prefixed, _padded])
@pytest.mark.parametrize("text", ["", " ", "c", "a", "abc", "no yes\n\n", "é猫 no", "<|im_start|>no<|im_end|>", "ca猫c"])
@pytest.mark.parametrize("places", [True, False])
def test_places_are_those_of_the_offsets(make, text, places):
    tokenizer = make()
    (encoded,) = TextEncoder(tokenizer).encode([text], [places])
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


def test_byte_pairs_cover_their_text():
    covers = {make: TextEncoder(make()).covers for make in (rig.t1, rig.t2, _bytes, _padded, _prefixed)}
    assert [make for make, covered in covers.items() if not covered] == [_padded, _prefixed]


def test_texts_with_places_and_without_keep_their_order():
    tokenizer = rig.t1()
    texts = ["no yes", "a", "", "yes\n\nno", "é猫"]
    made = TextEncoder(tokenizer).encode(texts, [True, False, False, True, False])
    assert [e.ids.tolist() for e in made] == tokenizer(texts, add_special_tokens=False)["input_ids"]


def test_ids_heed_what_the_tokenizer_is_set_to():
    tokenizer = rig.t1()
    special = tokenizer.all_special_tokens[0]
    tokenizer("a long text", truncation=True, max_length=2, padding="max_length")  # leaves the backend so
    for split in (False, True):
        tokenizer.split_special_tokens = split
        (encoded,) = TextEncoder(tokenizer).encode([f"no {special} yes"], [False])
        assert encoded.ids.tolist() == tokenizer(f"no {special} yes", add_special_tokens=False)["input_ids"]
