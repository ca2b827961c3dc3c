"""What a policy has computed: tokens and floating-point operations, for measures of throughput."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from peft import PeftModel
from torch import nn

if TYPE_CHECKING:
    from workbench.models.layouts import ModelInputs
    from workbench.models.policy import Policy


@dataclass
class Work:
    """Counts over forward passes.

    Args:
        positions: places of rows that were computed, padding included.
        tokens: those of them that hold a token; a prompt that completions share counts once where it is computed once.
        outputs: trained positions, whose logits are formed.
        pairs: pairs of a query and a key that it sees (sliding windows are not minded).
    """

    positions: int = 0
    tokens: int = 0
    outputs: int = 0
    pairs: int = 0

    def count(self, inputs: "ModelInputs", outputs: int) -> None:
        """Counts one forward pass."""
        self.add(Work(inputs.input_ids.numel(), inputs.tokens, outputs, inputs.pairs()))

    def add(self, other: "Work") -> None:
        """Adds what was done elsewhere."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def take(self) -> "Work":
        """The counts so far; they start again at zero."""
        taken = Work(**vars(self))
        for field in fields(self):
            setattr(self, field.name, 0)
        return taken


@dataclass(frozen=True)
class Cost:
    """Floating-point operations of a pass: ``body`` a position, ``head`` an output, ``attention`` a pair.

    A weight takes two operations a token in the forward pass and four in the backward pass, two of which fall away where it is
    frozen; a pair of query and key takes two products of the heads' width, forward once and backward twice (PaLM, Chowdhery et
    al. 2022, arXiv:2204.02311, appendix B, with causal attention counted as what it is). What checkpointing computes again does
    not count: this is what the model needs, not what the hardware did.
    """

    body: float
    head: float
    attention: float

    @classmethod
    def of(cls, policy: "Policy", *, backward: bool = True) -> "Cost | None":
        """Of a policy as it is now; None where it cannot be told (experts, of which a token takes some; packed 4-bit weights).

        Args:
            policy: the policy.
            backward: of a forward and a backward pass; False: of a forward pass alone.
        """
        model, config = policy.causal_lm, policy.config.get_text_config()
        experts = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        if experts or getattr(model, "is_quantized", False):
            return None

        def operations(parameters: list[nn.Parameter]) -> float:
            return sum((2.0 + backward * (4.0 if p.requires_grad else 2.0)) * p.numel() for p in parameters)

        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        left_out = {id(p) for module in (embeddings, head) if module is not None for p in module.parameters()} | _idle(policy.hf)
        body = operations([p for p in policy.hf.parameters() if id(p) not in left_out])
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        pair = 2 * 2 * width * config.num_attention_heads * config.num_hidden_layers
        return cls(body, operations(list(head.parameters())) if head is not None else 0.0, pair * (3 if backward else 1))

    def __call__(self, work: Work) -> float:
        """Floating-point operations of ``work``."""
        return self.body * work.positions + self.head * work.outputs + self.attention * work.pairs


def _idle(hf: nn.Module) -> set[int]:
    """The parameters of adapters that stand beside the active one (a reference's)."""
    if not isinstance(hf, PeftModel):
        return set()
    others = set(hf.peft_config) - set(hf.active_adapters)
    return {id(p) for name, p in hf.named_parameters() if others & set(name.split("."))}
