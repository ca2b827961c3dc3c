"""A cache of keys and values with room: tokens are written in place, and rows leave without a copy of the others."""

import functools
from typing import Literal

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticLayer

Kind = Literal["dynamic", "static"]
_STEP = 64  # tokens that a layer grows by, at least


class RoomLayer(DynamicLayer):
    """Keys and values of one layer ``[B, heads, L, D]``, in buffers that are longer than what they hold.

    Sliding windows are left to the mask, which any padding on the left needs in any case.

    Args:
        limit: tokens that it will hold at most, and so never has room for more; None: any number.
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.limit = limit

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.length = 0
        self.buffers = [t.new_empty(*t.shape[:2], 0, t.shape[3]) for t in (key_states, value_states)]

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[2]
        if self.length > self.buffers[0].shape[2]:
            grown = self.length if start == 0 else self.length + max(_STEP, self.length // 4)
            self._resize(start, grown if self.limit is None else max(self.length, min(grown, self.limit)))
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start : self.length] = new
        self._view()
        return self.keys, self.values

    def rearrange(self, index: Tensor) -> None:
        """Makes row ``i`` what row ``index[i]`` was, with new buffers."""
        self.buffers = [buffer.index_select(0, index) for buffer in self.buffers]
        self._view()

    def move(self, source: Tensor, target: Tensor, count: int) -> None:
        """Copies rows ``source`` to the places ``target``, and keeps the first ``count`` places."""
        for buffer in self.buffers:
            buffer[target, :, : self.length] = buffer[source, :, : self.length]
        self.buffers = [buffer[:count] for buffer in self.buffers]
        self._view()

    def _resize(self, held: int, size: int) -> None:
        for i, buffer in enumerate(self.buffers):
            self.buffers[i] = buffer.new_empty(*buffer.shape[:2], size, buffer.shape[3])
            self.buffers[i][:, :, :held] = buffer[:, :, :held]

    def _view(self) -> None:
        self.keys, self.values = (buffer[:, :, : self.length] for buffer in self.buffers)


class StaticRoomLayer(StaticLayer):
    """Keys and values of one layer in buffers of one length ``[B, heads, limit, D]``, which attention reads whole, under a mask.

    Shapes depend on the number of rows alone, as compilers like them.
    """

    def rearrange(self, index: Tensor) -> None:
        """Makes row ``i`` what row ``index[i]`` was, with new buffers."""
        self.keys, self.values = (t.index_select(0, index) for t in (self.keys, self.values))

    def move(self, source: Tensor, target: Tensor, count: int) -> None:
        """Copies rows ``source`` to the places ``target``, and keeps the first ``count`` places."""
        for buffer in (self.keys, self.values):
            buffer[target] = buffer[source]
        self.keys, self.values = self.keys[:count], self.values[:count]


def room(limit: int | None = None) -> Cache:
    """An empty cache that grows with what it holds, for any number of layers.

    Args:
        limit: tokens that it will hold at most, padding included; None: any number.
    """
    return Cache(layer_class_to_replicate=functools.partial(RoomLayer, limit))


def static_room(limit: int, config: object) -> Cache:
    """An empty cache that has its full length from the start, for a model of ``config``.

    Args:
        limit: tokens that it will hold at most, padding included.
        config: of the model, whose masks ask the layers for their length before they are first written.
    """
    return Cache(layers=[StaticRoomLayer(limit) for _ in DynamicCache(config=config).layers])


def rearrange(cache: Cache, index: Tensor) -> None:
    """Makes row ``i`` what row ``index[i]`` was, in every layer."""
    for layer in cache.layers:
        if layer.is_initialized:
            layer.rearrange(index)


def move(cache: Cache, source: Tensor, target: Tensor, count: int) -> None:
    """Copies rows ``source`` to the places ``target`` and keeps the first ``count``, in every layer."""
    for layer in cache.layers:
        if layer.is_initialized:
            layer.move(source, target, count)


def only_keys_and_values(config: object) -> bool:
    """Whether all that a model of this config remembers are keys and values, one of each a token, and no recurrent state."""
    layers = DynamicCache(config=config).layers
    return all(type(layer).__name__ in ("DynamicLayer", "DynamicSlidingWindowLayer") for layer in layers)
