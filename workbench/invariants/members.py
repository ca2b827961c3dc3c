"""The executions of a canonical run that must not change its trajectory."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Way = Literal["here", "bare", "command", "notebook", "plan", "scripted", "separate", "pair", "deepspeed"]

# What a forward pass without a step behind it can show.
FORWARD = ("loss", "metrics", "rows", "completions")


@dataclass(frozen=True)
class Member:
    """One way to execute a class's run.

    Args:
        about: what it shows, for a reader of the table.
        overrides: beside those of the class.
        way: how it is started: ``here`` and ``pair`` build the configuration's parts in this process or in two; ``bare`` passes
            them to a plain ``L.Trainer``; ``command`` is ``workbench train``; ``notebook`` is ``workbench.train``; ``plan`` deals
            out the rows and trains nothing; ``scripted`` replays the completions of a run that wrote them; ``separate`` has
            an engine with weights of its own; ``deepspeed`` is a pair of its own.
        against: overrides of the run that it is compared with, where that is not the canonical one.
        fields: what is compared, of ``loss``, ``grad_norm``, ``lr``, ``num_tokens``, ``metrics``, ``grad_norms``, ``rows``,
            ``completions``, ``parameters``, ``hashes``; None: all but hashes.
        resume_from: step after which a first run saves the checkpoint that this one goes on from.
        saved_by: overrides of that first run.
        needs: a package without which it is skipped.
        online: whether it is one of methods that write completions alone.
        shown_by: the classes that have it, where it does not depend on the loss; empty: all that can.
    """

    about: str
    overrides: tuple[str, ...] = ()
    way: Way = "here"
    against: tuple[str, ...] | None = None
    fields: Collection[str] | None = None
    resume_from: int | None = None
    saved_by: tuple[str, ...] = ()
    needs: str | None = None
    online: bool = False
    shown_by: tuple[str, ...] = ()


def _micro(size: int) -> str:
    return f"data.micro_batch_size={size}"


_PAIR = ("trainer.devices=2", "strategy=ddp", _micro(2))
_SHARDED = ("trainer.devices=2", "strategy=fsdp2", _micro(2))
_ZERO = ("trainer.devices=2", _micro(1))

MEMBERS: dict[str, Member] = {
    "repeat": Member("the same run again, bit for bit", fields=("hashes", *FORWARD, "grad_norm", "lr", "grad_norms")),
    "micro_batch_1": Member("a row at a time", (_micro(1),)),
    "micro_batch_2": Member("two rows at a time, in the order of the step", (_micro(2), "data.balance=none")),
    "micro_batch_tokens": Member("as many rows at a time as a number of tokens allows", ("data.micro_batch_tokens=160",)),
    "world_sizes": Member("the rows of every step, dealt to 1 to 8 processes", way="plan", fields=("rows",)),
    "workers": Member("rows read by two loader processes", (_micro(4), "data.num_workers=2")),
    "layout_packed": Member("no padding: all sequences in one row", (_micro(4), "method.layout=packed")),
    "layout_shared": Member("a prompt shared by completions computed once", (_micro(4), "method.layout=shared")),
    "chunked_head": Member("logits formed in pieces, gradients in closed form", ("method.chunked_head=true",)),
    "whole_head": Member("the logits of all tokens at once, by autograd", ("method.chunked_head=false",)),
    "padding": Member("rows padded further", (_micro(4), "method.pad_to_multiple_of=16")),
    "eager_attention": Member("attention written out instead of fused", ("model.attn_implementation=eager",)),
    "checkpointing": Member("activations recomputed", (_micro(4), "method.gradient_checkpointing=true")),
    "selective_checkpointing": Member("all but attention recomputed", ("method.gradient_checkpointing=selective",)),
    "offloaded": Member(
        "activations wait elsewhere",
        (_micro(4), "method.activation_offloading=true"),
        shown_by=("sft", "dpo", "kto", "reward", "grpo"),
    ),
    "compiled": Member("layers compiled", ("method.torch_compile=true",), shown_by=("sft", "grpo")),
    "compiled_shared": Member(
        "layers compiled around attention over a forest",
        (_micro(4), "method.layout=shared", "method.torch_compile=true"),
        shown_by=("dpo",),
    ),
    "engine_batches": Member(
        "completions written in batches that take groups apart", ("method.engine.batch_size=3", _micro(4)), online=True
    ),
    "scripted_engine": Member("the same completions from a script", (_micro(4),), way="scripted", online=True),
    "separate_engine": Member("an engine that has the weights that it is sent", way="separate", online=True),
    "adapter_off": Member(
        "an adapter that adds nothing, on weights that stand still",
        ("peft=lora", "optim.lr=0.0", _micro(4)),
        against=("optim.lr=0.0",),
        fields=FORWARD,
    ),
    "precomputed_reference": Member(
        "the reference's log-probabilities computed before training",
        (_micro(4), "method.precompute_ref_logps=true", "method.precompute_ref_micro_batch_size=3"),
    ),
    "streaming": Member(
        "rows read as they are needed",
        ("data.streaming=true", "data.shuffle=false", _micro(4)),
        against=("data.shuffle=false",),
        fields=("loss", "grad_norm", "lr", "metrics", "num_tokens", "grad_norms", "parameters"),
    ),
    "streamed_prompts": Member(
        "prompts read as they are needed, in their order",
        ("data.streaming=true", "data.shuffle=false", "data.batch_size=4", _micro(2)),
        against=("data.shuffle=false", "data.batch_size=4"),
        fields=("loss", "grad_norm", "lr", "metrics", "num_tokens", "grad_norms", "completions", "parameters"),
        online=True,
    ),
    "evaluated": Member(
        "with evaluations in between",
        ("data.eval=${data.train}", "data.eval_micro_batch_size=5", "trainer.val_check_interval=3", _micro(4)),
    ),
    "resumed_at_1": Member("resumed after the first step", (_micro(4),), resume_from=1, saved_by=(_micro(2),)),
    "resumed_at_4": Member("resumed at an epoch's end", (_micro(2),), resume_from=4, saved_by=(_micro(2),)),
    "resumed_at_7": Member("resumed within the second epoch", (), resume_from=7, saved_by=(_micro(2),)),
    "bare_trainer": Member("a plain L.Trainer", (_micro(4),), way="bare"),
    "bare_trainer_whole": Member("a plain L.Trainer, whole steps", way="bare"),
    "command": Member("workbench train", (_micro(4),), way="command"),
    "notebook": Member("workbench.train", (_micro(4),), way="notebook"),
    "ddp": Member("two processes, DDP", _PAIR, way="pair"),
    "fsdp2": Member("two processes, FSDP2", _SHARDED, way="pair"),
    "resumed_by_two": Member(
        "two FSDP2 processes go on from the checkpoint of two DDP ones", _SHARDED, way="pair", resume_from=5, saved_by=_PAIR
    ),
    "deepspeed_1": Member("two processes, DeepSpeed ZeRO 1", _ZERO, way="deepspeed", needs="deepspeed"),
    "deepspeed_2": Member("two processes, DeepSpeed ZeRO 2", _ZERO, way="deepspeed", needs="deepspeed"),
}
