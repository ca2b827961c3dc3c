"""Attention over a forest of segments laid out in one row without padding.

A segment attends to itself, causally, and to all of the segments that it continues: a completion to its prompt, whose keys and
values were computed once for all completions of it. The function is registered with transformers' attention interface, so that
every model that uses it works unmodified; `workbench.models.probe` compares each model with its padded self before it is trusted.

What a token may see travels through the model's forward as a keyword argument, never through a global: gradient checkpointing
repeats a forward later, when a global would already describe another batch.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from workbench.errors import UserError

PREFIX = "forest_"  # of the registered names; what follows computes whenever there is no forest
OURS = ("sdpa", "eager")  # implementations that a forest can stand in for


@dataclass
class Forest:
    """Segments of a row of N tokens, one after the other.

    Args:
        lengths: tokens of each segment, N in all.
        parent: the segment that each one continues, an earlier one, or -1.
    """

    lengths: list[int]
    parent: list[int]
    _masks: dict[tuple, Tensor] = field(default_factory=dict, repr=False)

    def context(self, segment: int) -> list[int]:
        """The segments that ``segment`` continues, from the root on."""
        chain: list[int] = []
        while (segment := self.parent[segment]) >= 0:
            chain.append(segment)
        return chain[::-1]

    def mask(self, length: int, before: int, window: int | None, device: torch.device) -> Tensor:
        """Which of ``before + length`` keys each of ``length`` queries at their end sees ``[length, before + length]``."""
        key = (length, before, window, device)
        if key not in self._masks:
            query = torch.arange(before, before + length, device=device)[:, None]
            distance = query - torch.arange(before + length, device=device)[None]
            seen = distance >= 0
            self._masks[key] = seen if window is None else seen & (distance < window)
        return self._masks[key]


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
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    # One split each: the backward of a slice would write a tensor of the whole row for every segment.
    queries, keys, values = (t.split(forest.lengths, dim=2) for t in (query, key, value))
    options = {"dropout": dropout, "scaling": scaling, "window": sliding_window, "softcap": softcap}
    outputs = []
    for segment, q in enumerate(queries):
        chain = [*forest.context(segment), segment]
        k, v = (_join([parts[s] for s in chain]) for parts in (keys, values))
        outputs.append(_segment(forest, q, k, v, **options))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)


def _segment(
    forest: Forest,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention of the last ``L`` of ``K`` tokens over all of them."""
    length, total = query.shape[2], key.shape[2]
    window = window if window is not None and window < total else None
    plain = length == total and window is None
    if softcap is None and plain:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scaling, is_causal=length > 1)
    mask = forest.mask(length, total - length, window, query.device)
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights, dropout) @ value


def _eager_of(module: nn.Module) -> object:
    """The eager function of the module's own family, which models keep beside their attention class."""
    import sys

    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
