"""Attention over a forest of segments laid out in one row without padding.

A segment attends to itself, causally, and to all of the segments that it continues: a completion to its prompt, whose keys and
values were computed once for all completions of it. The function is registered with transformers' attention interface, so that
every model that uses it works unmodified; `workbench.models.probe` compares each model with its padded self before it is trusted.

What a token may see travels through the model's forward as a keyword argument, never through a global: gradient checkpointing
repeats a forward later, when a global would already describe another batch.
"""

import functools
import itertools
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from workbench.errors import UserError
from workbench.models import forest_flex

log = logging.getLogger(__name__)

PREFIX = "forest_"  # of the registered names; what follows computes whenever there is no forest
_CALL = 4096  # products of a query and a key that take about as long as one more call
OURS = ("sdpa", "eager")  # implementations that a forest can stand in for
_FLEX = ("cuda",)  # devices with a FlexAttention that has a backward pass


@dataclass
class Bucket:
    """Segments of similar sizes that are computed together, padded on the right to the largest of them.

    Args:
        queries: tokens of each segment ``[G, L]``, indices into the row; any where it is padded.
        keys: tokens that it may see, in order: those of the segments that it continues, then its own ``[G, K]``.
        before: how many of the keys are not its own ``[G]``.
        lengths: tokens of each segment ``[G]``.
    """

    queries: Tensor
    keys: Tensor
    before: list[int]
    lengths: list[int]
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict, repr=False)

    def mask(self, window: int | None) -> Tensor | None:
        """Which keys each query sees ``[G or 1, 1, L, K]``; None where each sees all before it. Padding comes after every token
        that counts, and so is seen by padding alone."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> Tensor | None:
        if not any(self.before) and (window is None or window >= self.keys.shape[1]):
            return None
        device = self.queries.device
        same = len(set(self.before)) == 1
        before = torch.tensor(self.before[:1] if same else self.before, device=device)
        query = before[:, None, None, None] + torch.arange(self.queries.shape[1], device=device)[:, None]
        distance = query - torch.arange(self.keys.shape[1], device=device)
        if window is None:
            return distance >= 0
        # Padding may lie further than a window behind the last key, and a softmax over nothing has no gradient but NaN.
        seen = (distance >= 0) & (distance < window)
        return seen | ~seen.any(-1, keepdim=True)


@dataclass
class Forest:
    """Segments of a row of N tokens, one after the other.

    Args:
        lengths: tokens of each segment, N in all.
        parent: the segment that each one continues, an earlier one, or -1.
        device: of the indices.
        kernels: let a GPU's FlexAttention compute it where that passes a test.
    """

    lengths: list[int]
    parent: list[int]
    device: torch.device = field(default=torch.device("cpu"), compare=False)
    kernels: bool = field(default=True, compare=False)
    _block_masks: dict[int | None, BlockMask] = field(default_factory=dict, repr=False, compare=False)

    def context(self, segment: int) -> list[int]:
        """The segments that ``segment`` continues, from the root on."""
        chain: list[int] = []
        while (segment := self.parent[segment]) >= 0:
            chain.append(segment)
        return chain[::-1]

    @functools.cached_property
    def buckets(self) -> list[Bucket]:
        """All segments, each in one bucket."""
        starts = [0, *itertools.accumulate(self.lengths)]
        contexts = [self.context(segment) for segment in range(len(self.lengths))]
        before = [sum(self.lengths[s] for s in context) for context in contexts]

        def tokens(segments: Sequence[int]) -> Tensor:
            return torch.cat([torch.arange(starts[s], starts[s + 1]) for s in segments])

        made = []
        for group in _similar([(before[s] + n, n) for s, n in enumerate(self.lengths)]):
            queries = pad_sequence([tokens([s]) for s in group], batch_first=True)
            keys = pad_sequence([tokens([*contexts[s], s]) for s in group], batch_first=True)
            lengths = [self.lengths[s] for s in group]
            made.append(Bucket(queries.to(self.device), keys.to(self.device), [before[s] for s in group], lengths))
        return made

    def block_mask(self, window: int | None) -> BlockMask:
        """What FlexAttention takes; made once for all layers of the same window."""
        if window not in self._block_masks:
            self._block_masks[window] = forest_flex.block_mask(self.lengths, self.parent, window, self.device)
        return self._block_masks[window]

    @functools.cached_property
    def order(self) -> Tensor:
        """For every token of the row its place in the buckets' queries, laid end to end ``[N]``."""
        place = torch.empty(sum(self.lengths), dtype=torch.int64)
        offset = 0
        for bucket in self.buckets:
            groups, width = bucket.queries.shape
            real = torch.arange(width) < torch.tensor(bucket.lengths)[:, None]
            place[bucket.queries.cpu()[real]] = (offset + torch.arange(groups * width).view(groups, width))[real]
            offset += groups * width
        return place.to(self.device)


def _similar(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Segments by ``(keys, queries)`` in groups: one more joins where the padding costs less than a call of its own would."""
    groups: list[list[int]] = []
    for segment in sorted(range(len(sizes)), key=lambda s: sizes[s]):
        keys, queries = sizes[segment]
        if groups:
            group = groups[-1]
            longest = max(sizes[s][1] for s in group)
            area = len(group) * sizes[group[-1]][0] * longest
            joined = (len(group) + 1) * keys * max(longest, queries)
            if joined - area - keys * queries <= _CALL:
                group.append(segment)
                continue
        groups.append([segment])
    return groups


def install(model: PreTrainedModel) -> bool:
    """Lets ``model`` take a `Forest`; without one it computes as before. False where its attention implementation has kernels of
    its own, which know no forest (flash attention tells documents apart by their positions)."""
    name = model.config._attn_implementation
    if name.startswith(PREFIX):
        return True
    if name not in OURS:
        return False
    model.set_attn_implementation(register(name))
    return True


def keep_softcap(model: PreTrainedModel) -> None:
    """Has scores that a model caps written out where its implementation is SDPA, which silently leaves them uncapped."""
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) and model.config._attn_implementation == "sdpa":
        log.info("%s caps its attention scores, which sdpa does not do: computed with eager", type(model).__name__)
        model.set_attn_implementation("eager")


def register(name: str) -> str:
    """Registers the function that computes forests itself and leaves all else to implementation ``name``."""
    own = PREFIX + name
    if own not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(own, functools.partial(_attention, name))
        AttentionMaskInterface.register(own, ALL_MASK_ATTENTION_FUNCTIONS[name])
    return own


def no_mask(device: torch.device) -> Tensor:
    """A mask of four dimensions, which models pass on as it is and `_attention` does not read."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def _attention(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forest: Forest | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention ``[1, N, heads, D]`` of queries ``[1, heads, N, D]`` over keys and values ``[1, kv_heads, N, D]``."""
    if forest is None:
        own = {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
        own = {k: v for k, v in own.items() if v is not None}
        function = ALL_ATTENTION_FUNCTIONS.get_interface(name, _eager_of(module))
        return function(module, query, key, value, attention_mask, **own, **kwargs)
    for unknown in ("s_aux", "position_bias"):
        if kwargs.get(unknown) is not None:
            raise UserError(f"{type(module).__name__} passes {unknown}, which packed and shared layouts do not know.")
    options = {"dropout": dropout, "scaling": scaling, "window": sliding_window, "softcap": softcap}
    return _over_forest(query, key, value, forest, options), None


@torch.compiler.disable  # indices differ from batch to batch
def _over_forest(query: Tensor, key: Tensor, value: Tensor, forest: Forest, options: dict[str, Any]) -> Tensor:
    """In one kernel where there is one, otherwise bucket by bucket."""
    # What looks at single operations, as selective checkpointing does, sees none in a compiled kernel.
    watched = is_in_torch_dispatch_mode()
    if forest.kernels and query.device.type in _FLEX and options["dropout"] == 0.0 and not watched:
        query, key, value = _as_autocast(query, key, value)
        if _flex_serves(query, key, value, options):
            mask = forest.block_mask(options["window"])
            return forest_flex.attend(query, key, value, mask, options["scaling"], options["softcap"]).transpose(1, 2)
    return _by_buckets(query, key, value, forest, options)


def _as_autocast(*tensors: Tensor) -> list[Tensor]:
    """What autocast does to the arguments of SDPA, and not to those of FlexAttention."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [t.to(torch.get_autocast_dtype(device)) for t in tensors]


def _flex_serves(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    own = {name: options[name] for name in ("scaling", "window", "softcap")}
    heads, widths = (query.shape[1], key.shape[1]), (key.shape[3], value.shape[3])
    kind = forest_flex.Kind(query.device, query.dtype, heads, widths, **own)

    def otherwise(lengths: list[int], parent: list[int], window: int | None) -> forest_flex.Compute:
        forest = Forest(lengths, parent, query.device)
        return lambda q, k, v: _by_buckets(q, k, v, forest, options | {"window": window}).transpose(1, 2)

    return forest_flex.trusted(kind, otherwise)


def _by_buckets(query: Tensor, key: Tensor, value: Tensor, forest: Forest, options: dict[str, Any]) -> Tensor:
    heads, width = query.shape[1], query.shape[3]
    rows = [t[0].transpose(0, 1).flatten(1) for t in (query, key, value)]
    outputs = []
    for bucket in forest.buckets:
        q, k, v = (_take(r, i, width) for r, i in zip(rows, (bucket.queries, bucket.keys, bucket.keys), strict=True))
        # On a CPU the kernel itself lets heads share keys, which spares the copies and a seventh of its time.
        if heads > k.shape[1] and (options["softcap"] is not None or query.device.type != "cpu"):
            k, v = (t.repeat_interleave(heads // k.shape[1], dim=1) for t in (k, v))
        out = _compute(q, k, v, bucket, **options)
        outputs.append(out.transpose(1, 2).reshape(-1, heads * value.shape[3]))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return F.embedding(forest.order, joined).view(1, -1, heads, value.shape[3])


def _take(rows: Tensor, index: Tensor, width: int) -> Tensor:
    """Rows ``[N, heads * D]`` at ``index [G, L]`` as ``[G, heads, L, D]``. (An embedding's backward adds up in parallel, that of
    an indexing operation row by row.)"""
    return F.embedding(index, rows).unflatten(2, (-1, width)).transpose(1, 2)


def _compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bucket: Bucket,
    *,
    dropout: float,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention of a bucket ``[G, heads, L, D]``."""
    mask = bucket.mask(window)
    if softcap is None:
        causal = mask is None and query.shape[2] > 1
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            scale=scaling,
            is_causal=causal,
            enable_gqa=query.shape[1] > key.shape[1],
        )
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights, dropout) @ value


def _eager_of(module: nn.Module) -> object:
    """The eager function of the module's own family, which models keep beside their attention class."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
