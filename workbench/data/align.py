"""Texts to token ids, and characters to tokens of the same tokenisation."""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from tokenizers import Encoding
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, TokenizersBackend

from workbench.data.skeleton import common_length
from workbench.errors import UserError


class Encoded(Protocol):
    """One text's tokens."""

    ids: np.ndarray

    def tokens_in(self, start: int, end: int) -> tuple[int, int]:
        """Range of the tokens that hold any character of ``start:end``."""
        ...

    def joined(self, place: int) -> bool:
        """Whether one token holds the characters on both sides of ``place``."""
        ...


class WithOffsets:
    """Tokens with the characters of each, from a fast tokenizer.

    Characters that the tokenizer leaves out of its offsets (a space joined to the next word) count to the token after.
    Offsets cost more to read than ids, so that they stay with the tokenizer's ``encoding`` until a place inside is asked for.

    Args:
        ids: token ids ``[n]``.
        encoding: the tokenizer's own, of the same tokens.
        size: characters of the text.
    """

    def __init__(self, ids: Sequence[int], encoding: Encoding, size: int) -> None:
        self.ids = np.array(ids, dtype=np.int32)
        self.encoding = encoding
        self.size = size

    @cached_property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """First character of each token ``[n]``, and one past its last ``[n]``."""
        pairs = np.array(self.encoding.offsets, dtype=np.int64).reshape(-1, 2)
        ends = np.maximum.accumulate(pairs[:, 1]) if len(pairs) else pairs[:, 1]
        starts = np.minimum(pairs[:, 0], np.concatenate([[0], ends[:-1]])) if len(pairs) else pairs[:, 0]
        return starts, ends

    def tokens_in(self, start: int, end: int) -> tuple[int, int]:
        if start == 0 and end >= self.size and self._fills():
            return 0, len(self.ids)
        starts, ends = self.places
        return int(np.searchsorted(ends, start, "right")), int(np.searchsorted(starts, end, "left"))

    def joined(self, place: int) -> bool:
        starts, first = self.places[0], self.tokens_in(place, place)[0]
        return first < len(starts) and bool(starts[first] < place)

    def _fills(self) -> bool:
        """Whether neither the first nor the last token lies outside the text (one that the tokenizer adds holds nothing)."""
        outer = [self.encoding.token_to_chars(i) for i in (0, len(self.ids) - 1)] if len(self.ids) else [None]
        return None not in outer and outer[0][1] > 0 and outer[-1][0] < self.size


class Whole:
    """Tokens of a text that they cover from end to end; places within it are looked up once one is asked for.

    Args:
        ids: token ids ``[n]``.
        text: the text.
        look_up: tokenises it again, with places.
    """

    def __init__(self, ids: Sequence[int], text: str, look_up: Callable[[str], Encoded]) -> None:
        self.ids = np.array(ids, dtype=np.int32)
        self.text, self._look_up = text, look_up

    @cached_property
    def _placed(self) -> Encoded:
        return self._look_up(self.text)

    def tokens_in(self, start: int, end: int) -> tuple[int, int]:
        whole = start == 0 and end >= len(self.text) > 0
        return (0, len(self.ids)) if whole else self._placed.tokens_in(start, end)

    def joined(self, place: int) -> bool:
        return self._placed.joined(place)


@dataclass
class WithoutOffsets:
    """Tokens of a tokenizer that tells no offsets: a boundary is where the tokens of the text before it end."""

    ids: np.ndarray
    text: str
    tokenizer: PreTrainedTokenizerBase
    _counts: dict[int, tuple[int, bool]] = field(default_factory=dict)

    def tokens_in(self, start: int, end: int) -> tuple[int, int]:
        last, clean = self._before(end)
        return self._before(start)[0], last if clean else last + 1

    def joined(self, place: int) -> bool:
        return not self._before(place)[1]

    def _before(self, place: int) -> tuple[int, bool]:
        """Tokens that lie wholly before ``place``, and whether one of them ends there."""
        if place >= len(self.text):
            return len(self.ids), True
        if place not in self._counts:
            alone = self.tokenizer.encode(self.text[:place], add_special_tokens=False)
            common = common_length(alone, self.ids.tolist())
            self._counts[place] = common, common == len(alone)
        return self._counts[place]


@dataclass
class Apart:
    """Tokens of a text whose pieces were tokenised one by one, so that no token holds characters of two.

    Args:
        pieces: tokens of each piece.
        places: first character of each piece in the text, ascending from 0.
    """

    pieces: list[Encoded]
    places: list[int]

    def __post_init__(self) -> None:
        self.ids = np.concatenate([piece.ids for piece in self.pieces])
        self._first = np.cumsum([0, *(len(piece.ids) for piece in self.pieces)]).tolist()

    def tokens_in(self, start: int, end: int) -> tuple[int, int]:
        first, last = bisect_right(self.places, start) - 1, max(0, bisect_left(self.places, end) - 1)
        before = self.pieces[first].tokens_in(start - self.places[first], start - self.places[first])[0]
        up_to = self.pieces[last].tokens_in(0, end - self.places[last])[1]
        return self._first[first] + before, self._first[last] + up_to

    def joined(self, place: int) -> bool:
        piece = bisect_right(self.places, place) - 1
        return self.pieces[piece].joined(place - self.places[piece])


class TextEncoder:
    """Tokenises texts in batches, and knows what the tokenizer puts around a plain text.

    Args:
        tokenizer: any tokenizer of transformers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.prefix, after = _added(tokenizer)
        self.suffix = [i for i in after if i != self.eos]

    def encode(self, texts: Iterable[str], places: Sequence[bool] | None = None) -> list[Encoded]:
        """Token ids of each text as it stands (no special tokens added). ``places``: of which texts places within will be asked
        for, all by default; ids alone take a fast tokenizer half the time."""
        texts = list(texts)
        if places is None or not self.covers:
            places = [True] * len(texts)
        # Some tokenizers leave blanks out of their offsets, those at the start of a text too.
        places = [place or text[:1].isspace() for text, place in zip(texts, places, strict=True)]
        asked = iter(self._encode([text for text, place in zip(texts, places, strict=True) if place]))
        whole = [text for text, place in zip(texts, places, strict=True) if not place]
        ids = iter(self._ids(whole))
        look_up = lambda text: self._encode([text])[0]  # noqa: E731
        return [next(asked) if place else Whole(next(ids), text, look_up) for text, place in zip(texts, places, strict=True)]

    @cached_property
    def covers(self) -> bool:
        """Whether every token stands for some of its text, so that all of them belong to the whole: byte pairs, where nothing is
        put before a text and nothing of it is left out."""
        if not self.tokenizer.is_fast or type(self.tokenizer)._encode_plus is not TokenizersBackend._encode_plus:
            return False
        backend = self.tokenizer.backend_tokenizer
        splits = _parts(backend.pre_tokenizer, "pretokenizers")
        return (
            type(backend.model) is BPE
            and all(part["type"] == "NFC" for part in _parts(backend.normalizer, "normalizers"))
            and all(part["type"] in ("ByteLevel", "Digits", "Split") for part in splits)
            and all(part.get("behavior", "Isolated") == "Isolated" for part in splits)
            and not any(part.get("add_prefix_space") for part in splits)
        )

    def _encode(self, texts: list[str]) -> list[Encoded]:
        if not texts:
            return []
        options: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        out = self.tokenizer(texts, return_token_type_ids=False, **options)
        if self.tokenizer.is_fast:
            made = zip(out["input_ids"], out.encodings, texts, strict=True)
            return [WithOffsets(ids, encoding, len(text)) for ids, encoding, text in made]
        return [
            WithoutOffsets(np.array(i, dtype=np.int32), t, self.tokenizer) for i, t in zip(out["input_ids"], texts, strict=True)
        ]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """Ids by the tokenizer's backend, set up as the tokenizer itself does before each call."""
        if not texts:
            return []
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = self.tokenizer.split_special_tokens
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_apart(self, text: str, places: Sequence[int]) -> Encoded:
        """Token ids of a text that is cut at ``places`` first."""
        cuts = [0, *(place for place in places if 0 < place < len(text)), len(text)]
        return Apart(self.encode([text[a:b] for a, b in pairwise(cuts)]), cuts[:-1])

    def around(self, ids: np.ndarray, *, end: bool) -> tuple[list[int], int, list[int], bool]:
        """What makes a plain text's ``ids`` a sequence.

        Returns:
            ids to put before, number of ids to take off the front, ids to put after, and whether the text brought a
            start token of its own on top of the tokenizer's.
        """
        own = int(self.bos is not None and len(ids) > 0 and ids[0] == self.bos)
        doubled = bool(own and self.prefix and self.prefix[-1] == self.bos)
        after = list(self.suffix)
        if end:
            if self.eos is None:
                raise UserError("The tokenizer has no end-of-sequence token, which text rows need: set model.eos_token.")
            ended = len(ids) > 0 and ids[-1] == self.eos and not after
            after += [] if ended else [self.eos]
        return self.prefix, int(doubled), after, doubled


def _parts(component: Any, key: str) -> list[dict[str, Any]]:
    """Settings of a backend's normaliser or pre-tokenizer: of its parts, if it is a sequence."""
    settings = json.loads(component.__getstate__()) if component is not None else {"type": "Sequence", key: []}
    return settings[key] if settings["type"] == "Sequence" else [settings]


def _probes(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    yield from ("a", "1", ".")
    special = set(tokenizer.all_special_tokens)
    yield from (t for t in tokenizer.get_vocab() if t not in special)


def _added(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Ids that the tokenizer puts before and after a text."""
    text = next((p for p in _probes(tokenizer) if tokenizer.encode(p, add_special_tokens=False)), "")
    inner, outer = (tokenizer.encode(text, add_special_tokens=flag) for flag in (False, True))
    at = next((i for i in range(len(outer)) if outer[i : i + len(inner)] == inner), None)
    if at is None:
        raise UserError(f"The tokenizer ({type(tokenizer).__name__}) changes a text when it adds its special tokens.")
    return outer[:at], outer[at + len(inner) :]
