"""The top level of the configuration, as dataclasses: the schema and the Python defaults of the keys in
``conf/*.yaml``.

Nodes that are built from a ``_target_`` are marked with `Target`; their keys are checked against that class's
signature.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal


@dataclass(frozen=True)
class Target:
    """Marks a node built from its ``_target_``: an instance of the class (or result of the function) at ``path``."""

    path: str


Callbacks = dict[str, Annotated[Any, Target("lightning.pytorch.callbacks.Callback")] | None]
Loggers = dict[str, Annotated[Any, Target("lightning.pytorch.loggers.Logger")] | None]


@dataclass(kw_only=True)
class Paths:
    """Folders, relative to where the command is typed.

    Args:
        root: every run gets a folder of its own below this one.
        run_dir: folder of this run; null makes <root>/<name>/<date_time>.
        sweep_dir: folder of a sweep (-m); null makes <root>/<name>/sweep_<date_time>.
        cache_dir: prepared data sets; null is this program's own cache (see `workbench env`).
    """

    root: str = "runs"
    run_dir: str | None = None
    sweep_dir: str | None = None
    cache_dir: str | None = None


@dataclass(kw_only=True)
class Common:
    """Keys that every command shares.

    Args:
        name: name of the run; null takes the experiment, else <method>_<model>.
        seed: one seed for initial weights, data order and sampling.
        model: the model group.
        peft: the peft group; null trains all weights.
        data: the data group.
        trainer: the trainer group (`lightning.Trainer`).
        strategy: the strategy group: a name Lightning knows or a node.
        paths: the paths group.
    """

    model: Annotated[Any, Target("workbench.models.load.ModelSpec")]
    data: Annotated[Any, Target("workbench.data.module.DataModule")]
    trainer: Annotated[Any, Target("lightning.Trainer")]
    name: str | None = None
    seed: int = 0
    peft: Annotated[Any, Target("workbench.models.peft.PeftSpec")] | None = None
    strategy: str | Annotated[Any, Target("lightning.pytorch.strategies.Strategy")] = "auto"
    paths: Paths = field(default_factory=Paths)


@dataclass(kw_only=True)
class Train(Common):
    """Keys of ``workbench train``.

    Args:
        method: the method group.
        optim: the optim group.
        scheduler: the scheduler group.
        callbacks: the callbacks group: name -> node; null switches one off.
        logger: the logger group: name -> node; null switches one off.
        resume: continue a run: last, best, a step number, the path of a checkpoint or run folder; auto is last if there is one.
        exact_match: evaluation rows answered before, during and after training, where answers are short; 0 is off.
        save_model: write <run_dir>/model in the end, which transformers loads.
        merge_adapter: with an adapter, also write the merged model, to <run_dir>/model/merged.
        push_to_hub: repository id to upload the saved model to; null does not upload.
        hub_private: make that repository private; null is the account's default.
        matmul_precision: precision of fp32 products on CUDA: highest is exact, high uses TF32.
        metric: logged metric that a sweep ranks jobs by.
        metric_goal: whether the best job has the lowest or the highest metric.
    """

    method: Annotated[Any, Target("workbench.methods.base.Method")]
    optim: Annotated[Any, Target("torch.optim.Optimizer")] | None = None
    scheduler: Any = None
    callbacks: Callbacks | None = None
    logger: Loggers | None = None
    resume: str | int | None = None
    exact_match: int = 0
    save_model: bool = True
    merge_adapter: bool = False
    push_to_hub: str | None = None
    hub_private: bool | None = None
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    metric: str = "val/loss"
    metric_goal: Literal["min", "max"] = "min"


@dataclass(kw_only=True)
class InspectOptions:
    """What ``workbench inspect`` shows.

    Args:
        rows: how many rows of a data set are printed with their trained tokens coloured, or which ones ([0, 17]).
        html: file to write the same report to as a page; null writes none.
        tolerance: share of the rows from which on untrained, cut, unterminated or lost ones are a fault.
        stream_rows: rows that are read of a stream.
    """

    rows: int | list[int] = 4
    html: str | None = None
    tolerance: float = 0.1
    stream_rows: int = 1000


@dataclass(kw_only=True)
class Inspect(Train):
    """Keys of ``workbench inspect``: those of train, and what to show.

    Args:
        method: the method group; null prepares rows of any type.
        inspect: what is shown.
    """

    method: Annotated[Any, Target("workbench.methods.base.Method")] | None = None
    inspect: InspectOptions = field(default_factory=InspectOptions)


@dataclass(kw_only=True)
class Evaluate(Train):
    """Keys of ``workbench evaluate``: those of train, and what to measure.

    Args:
        run: folder of a finished run, to evaluate its saved model on its own data; null evaluates the model group.
        output: JSON file to write the measures to; null only prints them.
    """

    run: str | None = None
    output: str | None = None


@dataclass(kw_only=True)
class Generate:
    """Keys of ``workbench generate``.

    Args:
        model: the model group.
        run: folder of a finished run, to use its saved model; null uses the model group.
        prompt: text or list of texts to answer; null reads them from the terminal, one a line.
        system: system message put before every prompt.
        chat: render prompts with the chat template; null does so if the tokenizer has one.
        max_new_tokens: longest answer, in tokens.
        temperature: 0 takes the likeliest token, 1 samples from the model's own distribution.
        top_p: sample from the smallest set of tokens with this much probability.
        top_k: sample from this many likeliest tokens; 0 is all.
        num_samples: answers per prompt.
        seed: seed of the sampling.
        device: auto, cpu, cuda, cuda:1, mps ...
    """

    model: Annotated[Any, Target("workbench.models.load.ModelSpec")]
    run: str | None = None
    prompt: str | list[str] | None = None
    system: str | None = None
    chat: bool | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    num_samples: int = 1
    seed: int = 0
    device: str = "auto"


# command -> (primary file in conf/, dataclass of its top level)
COMMAND_SETTINGS = {
    "train": ("train", Train),
    "inspect": ("inspect", Inspect),
    "evaluate": ("evaluate", Evaluate),
    "generate": ("generate", Generate),
}
