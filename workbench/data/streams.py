"""Orders of streams that depend on their seed alone, and resume at the row.

The ones of `datasets` do neither: interleaved streams prefetch in threads, so that a resumed one loses or repeats rows by
chance; a resumed shuffle loses its buffer; and both draw anew inside a loader worker.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from datasets import IterableDataset

from workbench.errors import UserError


def stream_of(rows: Callable[[Sequence[IterableDataset]], Iterator[dict]], streams: Sequence[IterableDataset]) -> IterableDataset:
    """The stream ``rows(streams)``; resuming it reads the rows before the position again and leaves them out."""
    # a tuple, because a list would be taken for shards
    return IterableDataset.from_generator(rows, features=streams[0].features, gen_kwargs={"streams": tuple(streams)})


@dataclass(frozen=True)
class Draw:
    """Draws the source of each row: the same rows in the same order from map-style data sets and from streams.

    Args:
        weights: share of each source.
        seed: of the draw.
        until_all: stop when every source has given its last row, starting the shorter ones over, and not at the first one.
    """

    weights: list[float]
    seed: int
    until_all: bool

    def sources(self) -> Iterator[int]:
        """Numbers of the sources drawn, without end."""
        generator = np.random.default_rng(self.seed)
        shares = np.array(self.weights) / sum(self.weights)
        while True:
            yield from generator.choice(len(shares), size=1000, p=shares).tolist()

    def order(self, lengths: list[int]) -> list[int]:
        """Row numbers in the concatenation of sources of these lengths."""
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        position, done, order = [0] * len(lengths), [False] * len(lengths), []
        for source in self.sources():
            order.append(starts[source] + position[source])
            position[source] = (position[source] + 1) % lengths[source]
            done[source] |= position[source] == 0
            if self._stop(done):
                return order
        raise AssertionError("the draw has no end")

    def rows(self, streams: Sequence[IterableDataset]) -> Iterator[dict]:
        """Rows of streams, none of them empty."""
        refuse_workers()
        iterators = [iter(stream) for stream in streams]
        ahead = [next(iterator) for iterator in iterators]
        done = [False] * len(streams)
        for source in self.sources():
            yield ahead[source]
            row = next(iterators[source], None)
            if row is None:
                done[source] = True
                if self._stop(done):
                    return
                iterators[source] = iter(streams[source])
                row = next(iterators[source])
            ahead[source] = row

    def _stop(self, done: list[bool]) -> bool:
        return all(done) if self.until_all else any(done)


@dataclass(frozen=True)
class Shuffle:
    """Shuffles a stream: each row given is drawn from a buffer, and the next one read takes its place.

    Args:
        seed: of the draw.
        size: rows of the buffer.
    """

    seed: int
    size: int

    def rows(self, streams: Sequence[IterableDataset]) -> Iterator[dict]:
        """Rows of the only one of ``streams``."""
        refuse_workers()
        generator = np.random.default_rng(self.seed)
        buffer: list[dict] = []
        for row in streams[0]:
            if len(buffer) < self.size:
                buffer.append(row)
                continue
            place = int(generator.integers(self.size))
            yield buffer[place]
            buffer[place] = row
        yield from (buffer[place] for place in generator.permutation(len(buffer)))


def refuse_workers() -> None:
    """Raises `UserError` in one of several loader workers, which would get a part of every stream each."""
    if "torch" in sys.modules:
        worker = sys.modules["torch"].utils.data.get_worker_info()
        if worker is not None and worker.num_workers > 1:
            count = worker.num_workers
            raise UserError(f"A mixed or shuffled stream is read by one worker, not {count}: set data.num_workers to 0 or 1.")
