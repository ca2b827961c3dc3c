"""`DataModule`: from sources to micro-batches."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import numpy as np
from datasets import Dataset, IterableDataset
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from workbench.data.formats import WITHOUT_TRIPLES, detect_type, normalise_row
from workbench.data.intervals import accumulate, first_evaluation, limited, refuse_batch_size_search
from workbench.data.loader import (
    EvalDataset,
    InOrder,
    StepDataset,
    StepLoader,
    StepSampler,
    StreamDataset,
    StreamLoader,
    row_sizes,
    sizes_of,
)
from workbench.data.mismatched import Mismatch
from workbench.data.plan import Balance, Planner, RowSizes, check_batch_sizes
from workbench.data.prepare import PrepareReport, PrepareSpec, prepare
from workbench.data.prompts import Geometry, PromptDataset, PromptPlanner, PromptStream
from workbench.data.sources import load_source
from workbench.data.splits import split_off
from workbench.data.targets import check_prompts_read, check_tokens_read
from workbench.errors import UserError, check_at_least
from workbench.strategies.info import backward_divisor, data_parallel

log = logging.getLogger(__name__)

Source = str | dict[str, Any] | list[Any] | Dataset | IterableDataset


class DataModule(L.LightningDataModule):
    """Sources, prepared for the trainer's method and dealt to micro-batches.

    Args:
        train: training source: a name, a path, a mapping of options, a list of them to mix, or a data set in memory.
        eval: evaluation source, or a mapping of names to sources.
        eval_size: instead of ``eval``, rows (or a share of them) that are taken from the training source.
        batch_size: rows per optimizer step over all devices.
        micro_batch_size: most rows in one forward pass on one device; None: a device's whole share of the step.
        micro_batch_tokens: most tokens in one forward pass, instead of ``micro_batch_size``.
        eval_micro_batch_size: most rows in one evaluation forward; None: as in training.
        balance: ``tokens`` evens out micro-batches by length; ``none`` cuts the step's rows in order.
        shuffle: visit the rows in a new order each epoch.
        drop_last: leave out an epoch's last step if it is shorter.
        seed: of the order of rows and of mixing.
        streaming: read rows as they are needed; wants ``trainer.max_steps``.
        eval_packing: pack evaluation rows too; None: as in training.
        num_workers: loader processes.
        num_proc: processes that prepare rows.
        cache_dir: where prepared data sets are kept; None: the default cache.
        prepare: fields of `PrepareSpec`: how rows become tokens and which of them are trained.
    """

    options_from: ClassVar[type] = PrepareSpec

    def __init__(
        self,
        train: Source,
        *,
        eval: Source | None = None,
        eval_size: int | float | None = None,
        batch_size: int = 8,
        micro_batch_size: int | None = None,
        micro_batch_tokens: int | None = None,
        eval_micro_batch_size: int | None = None,
        balance: Balance = "tokens",
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        streaming: bool = False,
        eval_packing: bool | None = None,
        num_workers: int = 0,
        num_proc: int | None = None,
        cache_dir: str | None = None,
        **prepare: Any,
    ) -> None:
        super().__init__()
        check_batch_sizes(batch_size, micro_batch_size, micro_batch_tokens, balance)
        check_at_least(1, data__eval_micro_batch_size=eval_micro_batch_size, data__num_proc=num_proc)
        check_at_least(0, data__num_workers=num_workers, data__seed=seed)
        if eval is not None and eval_size is not None:
            raise UserError("data.eval and data.eval_size exclude each other; set one of them to null.")
        if streaming and eval_size is not None:
            raise UserError(f"data.eval_size={eval_size} draws rows at random, which a stream cannot; name a data.eval source.")
        self.train_source = train
        self.eval_source = eval
        self.eval_size = eval_size
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.micro_batch_tokens = micro_batch_tokens
        self.eval_micro_batch_size = eval_micro_batch_size
        self.balance: Balance = balance
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.streaming = streaming
        self.spec = PrepareSpec(**prepare)
        self.eval_packing = eval_packing
        self.num_workers = num_workers
        self.num_proc = num_proc
        self.cache_dir = cache_dir
        self.reports: dict[str, PrepareReport] = {}
        self.planner: Planner | PromptPlanner | None = None
        self.geometry: Geometry | None = None  # of an online method's windows
        self.num_micro = 1
        self.steps_per_epoch: int | None = None
        self.total_steps: int | None = None
        self._train: Any = None
        self._evals: dict[str, Dataset] = {}
        self._eval_rows: dict[str, Dataset] = {}

    # -- preparation ------------------------------------------------------------------------------------------------

    def sources(self) -> dict[str, Source]:
        """Evaluation sources by name; a single one is called ``eval``."""
        if self.eval_source is None:
            return {"eval": None} if self.eval_size else {}
        named = isinstance(self.eval_source, dict) and not {"path", "sources"} & self.eval_source.keys()
        return dict(self.eval_source) if named else {"eval": self.eval_source}

    def load_train(self, data_types: tuple[str, ...] | None = None) -> Any:
        """The raw training rows; of ``data_types``, where a source has a choice."""
        rows = load_source(self.train_source, split="train", streaming=self.streaming, **self._options(data_types))
        return split_off(rows, self.eval_size, self.seed, "data.eval_size")[0] if self.eval_size else rows

    def load_eval(self, name: str, data_types: tuple[str, ...] | None = None) -> Dataset:
        """The raw rows of an evaluation set, likewise."""
        if not self.eval_size:
            return load_source(self.sources()[name], split="test", **self._options(data_types))
        rows = load_source(self.train_source, split="train", **self._options(data_types))
        return split_off(rows, self.eval_size, self.seed, "data.eval_size")[1]

    def _options(self, data_types: tuple[str, ...] | None) -> dict[str, Any]:
        return {"seed": self.seed, "data_types": (self.spec.data_type,) if self.spec.data_type else data_types}

    @property
    def eval_names(self) -> list[str]:
        """Names of the evaluation sets, in the order of their loaders."""
        return list(self.sources())

    def prepare_train(self, tokenizer: PreTrainedTokenizerBase, data_types: tuple[str, ...]) -> Any:
        """The prepared training rows, a ``Dataset`` or, streaming, an ``IterableDataset``."""
        spec = replace(self.spec, data_types=tuple(data_types))
        rows, self.reports["train"] = prepare(
            self.load_train(data_types), tokenizer, spec, num_proc=self.num_proc, cache_dir=self.cache_dir, name="train"
        )
        return rows

    def prepare_eval(self, tokenizer: PreTrainedTokenizerBase, data_types: tuple[str, ...]) -> dict[str, Dataset]:
        """The prepared rows of each evaluation set."""
        spec = replace(self.eval_spec, data_types=tuple(data_types))
        prepared = {}
        for name in self.eval_names:
            self._eval_rows[name] = self.load_eval(name, data_types)
            prepared[name], self.reports[name] = prepare(
                self._eval_rows[name], tokenizer, spec, num_proc=self.num_proc, cache_dir=self.cache_dir, name=name
            )
        return prepared

    @property
    def eval_spec(self) -> PrepareSpec:
        """How evaluation rows are prepared: all steps of a solution are judged, also where training has the last one alone."""
        packing = self.spec.packing if self.eval_packing in (None, True) else None
        return replace(self.spec, packing=packing, train_on=self.spec.train_on if self.spec.train_on != "last_step" else "auto")

    def eval_rows(self, name: str | None = None, limit: int | None = None) -> list[dict[str, Any]]:
        """Rows of an evaluation set to generate from: ``prompt``, ``reference`` and the row's other columns."""
        if not self._eval_rows:
            return []
        name = name or self.eval_names[0]
        rows = self._eval_rows[name]
        kind = "triple_preference" if self.reports[name].data_type == "triple_preference" else None
        return [prompt_and_reference(rows[i], kind) for i in range(min(len(rows), len(rows) if limit is None else limit))]

    @property
    def reference_dir(self) -> Path | None:
        """Where log-probabilities of a reference are kept: beside the prepared rows; None: the default cache."""
        return Path(self.cache_dir) / "reference" if self.cache_dir else None

    def train_column(self, name: str) -> np.ndarray | None:
        """A column of the prepared training rows, one number each; None for a stream, whose rows are not known."""
        if self.streaming or self._train is None:
            return None
        return self._train.select_columns([name]).with_format("numpy")[:][name]

    def map_prepared(self, function: Callable[[Dataset, str], Dataset]) -> None:
        """Replaces every prepared set by ``function(rows, name)``, which may add columns but keeps rows and their order.

        Raises:
            UserError: the training rows are a stream.
        """
        if self.streaming:
            raise UserError("method.precompute_ref_logps needs all rows before training: set data.streaming=false.")
        if self._train is not None:
            self._train = function(self._train, "train")
        self._evals = {name: function(rows, name) for name, rows in self._evals.items()}

    # -- the trainer ------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Prepares the data for the trainer's method (rank 0 first, the others read its cache) and plans the steps."""
        refuse_batch_size_search(self.trainer)
        method = self.trainer.lightning_module
        strategy = self.trainer.strategy
        check_tokens_read(self.spec.train_on, self.spec.role_weights, method)
        check_prompts_read(self.spec.train_on, method)
        if not strategy.is_global_zero:
            strategy.barrier("prepare")
        if stage == "fit" and self._train is None:
            self._train = self.prepare_train(method.tokenizer, method.data_types)
        if not self._evals:
            self._evals = self.prepare_eval(method.tokenizer, method.data_types)
        if strategy.is_global_zero:
            strategy.barrier("prepare")
        if not self._evals:
            self.trainer.limit_val_batches = 0
        if stage == "fit":
            self._plan(self.trainer)
            self._note_unevaluated(self.trainer)

    def _plan(self, trainer: Trainer) -> None:
        self.geometry = trainer.lightning_module.geometry(self.batch_size)
        self.total_steps = self._total_steps(trainer, None)
        if self.streaming:
            self._plan_stream(trainer)
        else:
            if self.geometry is not None:
                self.planner = self._prompt_planner(len(self._train))
            else:
                sizes = row_sizes(self._train)
                self.steps_per_epoch = limited(trainer, -(-len(sizes) // self.batch_size))
                self.total_steps = self._total_steps(trainer, self.steps_per_epoch)
                self.planner = self._planner(sizes)
            self.num_micro = self.planner.num_micro
            self.steps_per_epoch = limited(trainer, self.planner.steps_per_epoch)
            self.total_steps = self._total_steps(trainer, self.steps_per_epoch)
        accumulate(trainer, self.num_micro, self.steps_per_epoch)

    def _prompt_planner(self, num_rows: int) -> PromptPlanner:
        """The plan of an online method's prompts, and of the completions that it writes for them."""
        if self.micro_batch_tokens is not None:
            raise UserError(
                f"data.micro_batch_tokens={self.micro_batch_tokens} needs lengths before the completions are written; set "
                "data.micro_batch_size, which counts completions."
            )
        strategy = self.trainer.strategy
        return PromptPlanner(
            num_rows,
            self.geometry,
            micro_batch_size=self.micro_batch_size,
            world_size=data_parallel(strategy).world_size,
            seed=self.seed,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            balance=self.balance,
            extra_scale=lambda num_micro: backward_divisor(strategy, num_micro),
        )

    def _note_unevaluated(self, trainer: Trainer) -> None:
        if not self._evals or not trainer.limit_val_batches or not trainer.is_global_zero:
            return
        first = first_evaluation(trainer, self.steps_per_epoch)
        if first is None or (self.total_steps is not None and first > self.total_steps):
            when = "an epoch, and a stream has none" if first is None else f"step {first}, and the run ends at {self.total_steps}"
            log.warning(
                "data.eval is never evaluated: that would come after %s; set trainer.val_check_interval, in optimizer steps.",
                when,
            )

    def _plan_stream(self, trainer: Trainer) -> None:
        if trainer.max_steps is None or trainer.max_steps < 0:
            raise UserError("data.streaming=true has no known length; set trainer.max_steps, in optimizer steps.")
        if self.micro_batch_tokens is not None:
            raise UserError("data.micro_batch_tokens needs all lengths; with data.streaming=true set data.micro_batch_size.")
        if self.num_workers > 1:
            raise UserError(f"data.num_workers={self.num_workers}: a stream is read in order by one worker; allowed: 0, 1.")
        if self.shuffle and not any(isinstance(s, dict) and s.get("shuffle") is not None for s in _each(self.train_source)):
            log.warning(
                "data.shuffle does not act on a stream, which is read in its order: shuffle the source "
                "(data.train={path: ..., shuffle: <seed>}), or set data.shuffle=false."
            )
        self.steps_per_epoch = limited(trainer, None)
        world_size = data_parallel(trainer.strategy).world_size
        share = self.micro_batch_size or -(-self.batch_size // world_size)
        self.num_micro = -(-self.batch_size // (world_size * share))
        if self.geometry is not None:
            self.planner = self._prompt_planner(self.geometry.prompts)  # of a window's completions

    def _planner(self, sizes: RowSizes, *, shuffle: bool | None = None, drop_last: bool | None = None) -> Planner:
        strategy = self.trainer.strategy
        return Planner(
            sizes,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            micro_batch_tokens=self.micro_batch_tokens,
            world_size=data_parallel(strategy).world_size,
            seed=self.seed,
            shuffle=self.shuffle if shuffle is None else shuffle,
            drop_last=self.drop_last if drop_last is None else drop_last,
            balance=self.balance,
            total_steps=self.total_steps,
            extra_scale=lambda num_micro: backward_divisor(strategy, num_micro),
        )

    def _total_steps(self, trainer: Trainer, steps_per_epoch: int | None) -> int | None:
        """Optimizer steps of the whole run, or None if nothing bounds it."""
        bounds = [trainer.max_steps] if trainer.max_steps and trainer.max_steps > 0 else []
        if trainer.max_epochs and trainer.max_epochs > 0 and steps_per_epoch is not None:
            bounds.append(trainer.max_epochs * steps_per_epoch)
        return min(bounds) if bounds else None

    def train_dataloader(self) -> DataLoader:
        """Micro-batches of this rank from the trainer's optimizer step on."""
        rank, mismatch = data_parallel(self.trainer.strategy).rank, self._mismatch()
        options = {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}
        if self.geometry is not None:
            return self._prompt_loader(options)
        if self.streaming:
            stream = StreamDataset(
                self._train,
                lambda window: self._planner(sizes_of(window), shuffle=False, drop_last=False),
                self.batch_size,
                rank,
                self.drop_last,
                mismatch,
            )
            return StreamLoader(stream, lambda: self.trainer.global_step, num_workers=self.num_workers)
        dataset = StepDataset(self._train, self.planner, rank, mismatch)
        sampler = StepSampler(dataset, lambda: self.trainer.global_step, self.steps_per_epoch)
        return StepLoader(dataset, batch_size=None, sampler=sampler, **options)

    def _prompt_loader(self, options: dict[str, Any]) -> DataLoader:
        if self.streaming:
            stream = PromptStream(self._train, self.geometry, self.num_micro)
            return StreamLoader(stream, lambda: self.trainer.global_step, num_workers=self.num_workers)
        dataset = PromptDataset(self._train, self.planner)
        sampler = StepSampler(dataset, lambda: self.trainer.global_step, self.steps_per_epoch)
        return StepLoader(dataset, batch_size=None, sampler=sampler, **options)

    def train_rows(self, index: Sequence[int]) -> list[dict[str, Any]]:
        """Prepared training rows, with all their columns."""
        return [self._train[i] for i in index]

    def prepared_eval(self, name: str) -> Dataset:
        """The prepared rows of an evaluation set."""
        return self._evals[name]

    def longest_row(self) -> int | None:
        """Tokens of the longest prepared row of any set; None where that is not known (a stream)."""
        sets = [*([] if self._train is None or self.streaming else [self._train]), *self._evals.values()]
        return max((int(row_sizes(rows).tokens.max()) for rows in sets if len(rows)), default=None)

    def val_dataloader(self) -> list[DataLoader]:
        """One loader per evaluation set."""
        self.trainer.lightning_module.before_evaluation_data()
        world_size, rank = data_parallel(self.trainer.strategy)
        rows = self.eval_micro_batch_size or self.micro_batch_size or min(self.batch_size, 64)
        loaders = []
        for prepared in self._evals.values():
            dataset = EvalDataset(prepared, row_sizes(prepared), rows, world_size, rank, self._mismatch())
            loaders.append(StepLoader(dataset, batch_size=None, sampler=InOrder(dataset), num_workers=self.num_workers))
        return loaders

    def _mismatch(self) -> Mismatch | None:
        scope = self.trainer.lightning_module.mismatched
        return scope and Mismatch(self.spec.row_limit, self.spec.truncation == "keep_end", scope)

    # -- resuming ---------------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """What a position in steps refers to; kept in checkpoints."""
        rows = None if self.planner is None or self.streaming else self.planner.num_rows
        identity = {"batch_size": self.batch_size, "rows": rows, "shuffle": self.shuffle, "seed": self.seed}
        return identity | ({} if self.geometry is None else asdict(self.geometry))

    def check_identity(self, saved: dict[str, Any]) -> None:
        """Raises `UserError` if a checkpoint's position means other rows here."""
        for name, value in self.identity().items():
            if name in saved and saved[name] != value:
                raise UserError(
                    f"the checkpoint was written with data {name}={saved[name]}, this run has {name}={value}, so its position "
                    "means other rows; resume with the same data settings, or start a new run from its weights "
                    "(model.name=<run>/model)."
                )


def _each(source: Source) -> list[Any]:
    source = source.get("sources", source) if isinstance(source, dict) else source
    return list(source) if isinstance(source, list | tuple) else [source]


def prompt_and_reference(row: dict[str, Any], data_type: str | None = None) -> dict[str, Any]:
    """Splits a row of any type and layout into what to generate from and what was expected (``reference``; None where the row
    does not tell, such as by a completion that is labelled as bad)."""
    row = normalise_row(row, data_type or detect_type(row, WITHOUT_TRIPLES))
    others = {k: v for k, v in row.items() if k not in ("prompt", "completion", "chosen", "rejected", "messages", "text")}
    if "messages" in row:
        messages = list(row["messages"])
        last = max((i for i, m in enumerate(messages) if m.get("role") == "assistant"), default=len(messages))
        reference = messages[last]["content"] if last < len(messages) else None
        return {"prompt": messages[:last], "reference": reference, **others}
    if "text" in row:
        return {"prompt": row["text"], "reference": None, **others}
    reference = row.get("completion", row.get("chosen")) if row.get("label", True) else None
    if isinstance(reference, list):
        reference = reference[-1]["content"] if reference else None
    gold = others.get("reference")
    if isinstance(gold, list) and gold and isinstance(gold[-1], dict) and "content" in gold[-1]:  # of a triple
        others["reference"] = gold[-1]["content"]
    return {"prompt": row["prompt"], "reference": reference, **others}
