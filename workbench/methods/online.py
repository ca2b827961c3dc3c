"""`Online`: what methods that learn from their own completions share.

A window is generated when its first micro-batch begins, with the weights as they are then, in eval mode and without gradient;
its completions are scored, compared with the reference, and then trained for as many steps as it serves.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from workbench.callbacks.progress import phase
from workbench.data.batch import MicroBatch
from workbench.data.prompts import Geometry, Ticket
from workbench.errors import UserError, check_at_least
from workbench.losses.advantages import combine, zero_spread
from workbench.methods import rollouts
from workbench.methods.completions_table import CompletionsTable
from workbench.methods.generating import Generating
from workbench.methods.rollouts import Group, Row
from workbench.methods.window import Window
from workbench.models.head_kernel import refusal
from workbench.models.load import ModelSpec
from workbench.models.logps import LogitsProcessing
from workbench.rewards import RewardResult
from workbench.strategies.info import data_parallel, failing_together, gather

log = logging.getLogger(__name__)

KEY = "window"  # in a checkpoint
_PATIENCE = 10  # windows without any spread before a warning


class Online(Generating):
    """Base of methods that sample completions of prompts, have them scored, and learn from the scores.

    Args:
        model: as in `Method`.
        num_generations: completions per prompt.
        steps_per_generation: optimizer steps that one window of completions serves.
        num_iterations: how often a window is swept.
        beta: strength of the pull towards the reference; 0 goes without one.
        mask_truncated_completions: leave completions that were cut at the bound out of the loss.
        dynamic_sampling: rounds in which groups whose rewards are all equal are replaced by further prompts.
        cast_lm_head_to_fp32: form the logits in fp32, whatever the precision.
        log_completions_every_n_steps: optimizer steps between two tables of completions; 0: none.
        num_completions_to_print: how many are printed then; 0: none.
        options: as in `Generating`.
    """

    def __init__(
        self,
        model: str | ModelSpec | PreTrainedModel,
        *,
        num_generations: int = 8,
        steps_per_generation: int = 1,
        num_iterations: int = 1,
        beta: float = 0.0,
        mask_truncated_completions: bool = False,
        dynamic_sampling: int = 0,
        cast_lm_head_to_fp32: bool = False,
        log_completions_every_n_steps: int = 10,
        num_completions_to_print: int = 0,
        **options: Any,
    ) -> None:
        if not beta >= 0:
            raise UserError(f"method.beta={beta} must be at least 0; 0 goes without a reference.")
        self.needs_reference = beta != 0
        super().__init__(model, **options)
        self.beta = beta
        self._check_reference_is_read()
        check_at_least(1, method__num_generations=num_generations)
        check_at_least(
            0,
            method__dynamic_sampling=dynamic_sampling,
            method__log_completions_every_n_steps=log_completions_every_n_steps,
            method__num_completions_to_print=num_completions_to_print,
        )
        self.num_generations = num_generations
        self.steps_per_generation = steps_per_generation
        self.num_iterations = num_iterations
        self.mask_truncated_completions = mask_truncated_completions
        self.dynamic_sampling = dynamic_sampling
        self.cast_lm_head_to_fp32 = cast_lm_head_to_fp32
        self._check_head_kernel()
        if num_completions_to_print and not log_completions_every_n_steps:
            raise UserError(
                f"method.num_completions_to_print={num_completions_to_print} has no effect with "
                "method.log_completions_every_n_steps=0; set it above 0."
            )
        self.completions_table = CompletionsTable(log_completions_every_n_steps, num_completions_to_print)
        self.window: Window | None = None
        self.generated_tokens, self.generation_seconds = 0, 0.0  # of this rank, since the start
        self._restored: dict[str, float | None] | None = None  # what a window out of a checkpoint was drawn with
        self._without_spread = 0

    def geometry(self, batch_size: int) -> Geometry:
        """``data.batch_size`` counts completions."""
        return Geometry(batch_size, self.num_generations, self.steps_per_generation, self.num_iterations)

    def policy_arguments(self) -> dict[str, Any]:
        """As `Method`'s, and the precision of the head."""
        return {**super().policy_arguments(), "head_dtype": torch.float32 if self.cast_lm_head_to_fp32 else None}

    def _check_head_kernel(self) -> None:
        if self.head_kernel == "torch":
            return
        if self.cast_lm_head_to_fp32:
            raise refusal("computes in half precision: set method.cast_lm_head_to_fp32=false")
        if self.sampling.truncates or self.sampling.repetition_penalty != 1:
            raise refusal("knows no restriction to some tokens: leave out method.top_k, top_p, min_p and repetition_penalty")

    def _check_reference_is_read(self) -> None:
        for name in ("ref_model", "ref_adapter", "sync_ref_model"):
            if getattr(self, name) and not self.needs_reference:
                raise UserError(f"method.{name} has no effect with method.beta=0, which compares with no reference; set beta.")

    def on_fit_start(self) -> None:
        """Refuses what a stream cannot give."""
        if self.dynamic_sampling and self.trainer.datamodule.streaming:
            raise UserError(
                f"method.dynamic_sampling={self.dynamic_sampling} draws further prompts, which a stream does not know yet; set "
                "data.streaming=false, or method.dynamic_sampling=0."
            )
        super().on_fit_start()

    def couplings(self) -> list[str]:
        """Dropout too: it is drawn anew in every pass, and the sampler has none."""
        noisy = ["method.disable_dropout=false: a ratio compares passes with other dropout than the sampler's"]
        return super().couplings() + ([] if self.disable_dropout else noisy)

    # -- a window ---------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Ticket, batch_idx: int) -> None:
        """Generates where a window begins."""
        super().on_train_batch_start(batch, batch_idx)
        if batch.rows is not None:
            self._restored = None
            with torch.no_grad():
                self._open(batch)
        elif self.window is None or self.window.number != batch.plan.number:
            raise UserError(
                f"step {batch.step} lies within a window of completions that the checkpoint does not hold; resume from a "
                "checkpoint of this method that was written with the same settings."
            )
        elif self._restored is not None:
            self._check_restored(batch)

    def _check_restored(self, ticket: Ticket) -> None:
        """Refuses to go on with a window whose log-probabilities are others than this run's settings mean."""
        written, ours = self._restored, self._drawn_with()
        changed = next((name for name in ours if written.get(name, ours[name]) != ours[name]), None)
        lacking = [name for name in self._wanted_logps(self.window) if getattr(self.window, name) is None]
        if changed is not None:
            what = f"was written with method.{changed}={written[changed]}, and this run has {ours[changed]}"
        elif lacking:
            what = f"does not hold {lacking[0]}, which this run's settings need (beta, top_entropy_quantile)"
        else:
            self._restored = None
            return
        raise UserError(
            f"step {ticket.step} lies within a window of completions that {what}; resume with the settings of before, or from a "
            "checkpoint at the end of a window."
        )

    def _drawn_with(self) -> dict[str, float | None]:
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return {name: getattr(self.sampling, name) for name in names}

    def micro_batch(self, ticket: Ticket) -> MicroBatch:
        """The completions that a ticket stands for, on the device."""
        rank = data_parallel(self.trainer.strategy).rank
        return self.window.micro_batch(ticket.offset, rank, ticket.k).to(self.device)

    def tokens_in(self, batch: MicroBatch) -> int:
        """Completions with their prompts: how many completions a micro-batch has on one copy of a prompt does not matter."""
        lengths, parent = batch.starts.diff(), batch.parent
        return int((lengths + lengths[parent.clamp(min=0)])[parent >= 0].sum())

    def in_first_sweep(self, ticket: Ticket) -> bool:
        """Whether a ticket's completions are trained for the first time."""
        return ticket.offset < len(self.window.plans)

    def processing(self, batch: MicroBatch) -> LogitsProcessing:
        """What the sampler did to the logits, for the policy to do too."""
        support = self.window.support_of(batch)
        return LogitsProcessing(
            temperature=self.sampling.temperature,
            repetition_penalty=self.sampling.repetition_penalty,
            support=None if support is None else tuple(part.to(self.device) for part in support),
        )

    def _open(self, ticket: Ticket) -> None:
        trainer, planner = self.trainer, self.trainer.datamodule.planner
        self.sync()
        with phase(trainer, f"generating {len(ticket.rows) * self.num_generations} completions"):
            groups, result = self._collect(ticket)
        self.rest()
        self.window = self._window_of(ticket, groups, result)
        self.window.plan(planner, self.sampling.max_new_tokens)
        self._add_logps(self.window)
        self.window.advantages = self.compute_advantages(result, self.window)
        self._report(groups, result)

    def _collect(self, ticket: Ticket) -> tuple[list[Group], RewardResult]:
        """The window's groups of all ranks in plan order, with their rewards."""
        plan, planner = ticket.plan, self.trainer.datamodule.planner
        groups, parts = self._round(ticket.rows, plan.prompts, plan.number, 0)
        taken, rounds, replaced = set(plan.prompts), 0, 0
        while rounds < self.dynamic_sampling:
            dull = [i for i, part in enumerate(parts) if _is_dull(part, self.rewards.weights)]
            index = planner.replacements(plan.number, rounds + 1, taken, len(dull)) if dull else []
            if not index:
                break
            rounds, replaced, taken = rounds + 1, replaced + len(index), taken | set(index)
            rows = self.trainer.datamodule.train_rows(index)
            for slot, group, part in zip(dull, *self._round(rows, index, plan.number, rounds), strict=False):
                groups[slot], parts[slot] = group, part
        if self.dynamic_sampling:
            self._report_means({"dynamic_sampling/rounds": rounds, "dynamic_sampling/replaced": replaced})
        return groups, RewardResult.joined(parts)

    def _round(
        self, rows: Sequence[Row], index: Sequence[int], number: int, attempt: int
    ) -> tuple[list[Group], list[RewardResult]]:
        """Answers prompts, each rank its share, and scores them; every rank gets all, in the order of ``rows``."""
        strategy = self.trainer.strategy
        world_size, rank = data_parallel(strategy)
        mine = range(rank, len(rows), world_size)
        options = {"num_generations": self.num_generations, "key": (self.seed, number), "attempt": attempt}
        asked = [rows[i] for i in mine], [index[i] for i in mine]
        with failing_together(strategy):
            with self.trainer.precision_plugin.forward_context():  # as it is trained
                started = time.perf_counter()
                own = rollouts.answer(self.engine, *asked, self.sampling, self.tokenizer, **options)
            self.generation_seconds += time.perf_counter() - started
            self.generated_tokens += sum(len(rollout.token_ids) for group in own for rollout in group.rollouts)
            results = self.score(own).split(self.num_generations)
        both = [(i, group, part) for i, group, part in zip(mine, own, results, strict=True)]
        found = sorted((item for part in gather(both, strategy) for item in part), key=lambda item: item[0])
        return [group for _, group, _ in found], [part for _, _, part in found]

    def _window_of(self, ticket: Ticket, groups: Sequence[Group], result: RewardResult) -> Window:
        written = [rollout for group in groups for rollout in group.rollouts]
        scored = ~np.isnan(result.values).all(1)
        truncated = np.array([rollout.finish == "length" for rollout in written])
        drawn = [rollout.logps for rollout in written]
        restricted = self.sampling.truncates or any(rollout.support is not None for rollout in written)
        if not scored.all():
            log.warning(
                "%d of %d completions were scored by no reward function; they are left out.", (~scored).sum(), len(scored)
            )
        return Window(
            number=ticket.plan.number,
            first=ticket.plan.first,
            group=np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups]),
            prompt_ids=[np.asarray(group.row["input_ids"], dtype=np.int64) for group in groups],
            token_ids=[np.asarray(rollout.token_ids, dtype=np.int64) for rollout in written],
            truncated=truncated,
            trained=scored & ~truncated if self.mask_truncated_completions else scored,
            counted=scored,
            advantages=np.zeros(len(written)),
            sampler_logps=None if any(d is None for d in drawn) else [np.asarray(d, dtype=np.float64) for d in drawn],
            support=[_support(rollout) for rollout in written] if restricted else None,
            order=self.completion_order(len(written)),
            version=max((rollout.version for rollout in written), default=0),
        )

    def completion_order(self, size: int) -> list[int] | None:
        """The order in which the steps of a sweep take the completions; None: prompt by prompt."""
        return None

    def compute_advantages(self, result: RewardResult, window: Window) -> np.ndarray:
        """Advantages ``[N]`` of the window's completions."""
        raise NotImplementedError

    # -- log-probabilities ------------------------------------------------------------------------------------------

    def keeps_old_logps(self, steps: int) -> bool:
        """Whether log-probabilities under the window's first weights are kept: where it serves one step they are those of the
        step itself."""
        return steps > 1

    keeps_old_entropy: bool = False

    def _wanted_logps(self, window: Window) -> list[str]:
        """Which of the window's per-token numbers are kept."""
        old = self.keeps_old_logps(len(window.plans) * self.num_iterations)
        wanted = {"old_logps": old, "old_entropy": self.keeps_old_entropy, "ref_logps": self.needs_reference}
        return [name for name, asked in wanted.items() if asked]

    def _add_logps(self, window: Window) -> None:
        """What policy and reference say of the window's tokens before its first step."""
        wanted = self._wanted_logps(window)
        if not wanted:
            return
        old = "old_logps" in wanted
        strategy = self.trainer.strategy
        rank = data_parallel(strategy).rank
        want = ["logps"] + ["entropy"] * self.keeps_old_entropy
        mine: dict[str, dict[int, np.ndarray]] = {name: {} for name in wanted}
        batches = [(offset, k) for offset in range(len(window.plans)) for k in range(window.plans[0].norm.num_micro)]
        with phase(self.trainer, "log-probabilities"), self.trainer.precision_plugin.forward_context():
            for offset, k in batches:
                batch = window.micro_batch(offset, rank, k).to(self.device)
                processing = self.processing(batch)
                if old or self.keeps_old_entropy:
                    out = self.policy(batch, want, processing=processing)
                    _keep(mine, "old_logps", window, batch, out.logps)
                    _keep(mine, "old_entropy", window, batch, out.entropy)
                if self.needs_reference:
                    _keep(mine, "ref_logps", window, batch, self.reference.logps(batch, processing=processing))
        for name, own in mine.items():
            whole: dict[int, np.ndarray] = {}
            for part in gather(own, strategy):
                whole |= part
            setattr(window, name, [whole.get(row, np.zeros(0)) for row in range(len(window))])

    # -- reports ----------------------------------------------------------------------------------------------------

    def _report_means(self, values: Mapping[str, float]) -> None:
        """Adds values of the whole window, which every rank knows, to the step's metrics."""
        for name, value in values.items():
            if not np.isnan(value):
                self._meter.add(name, float(value), 1.0)

    def _report(self, groups: Sequence[Group], result: RewardResult) -> None:
        window = self.window
        means = rollouts.completion_metrics(window.lengths, window.truncated) | result.statistics(window.group)
        means |= rollouts.means_of([result.metrics])
        self._report_means(means)
        dull = means["frac_reward_zero_std"] == 1
        self._without_spread = self._without_spread + 1 if dull else 0
        if self._without_spread == _PATIENCE:
            log.warning(
                "in %d generations in a row all completions of each prompt had the same reward, so that nothing was learnt: look "
                "at the rewards (train/reward), the prompts' difficulty, or method.temperature.",
                _PATIENCE,
            )
        steps = len(window.plans) * self.num_iterations
        self.completions_table.add(self.trainer, groups, result, window.advantages, steps)

    def record_mismatch(self, batch: MicroBatch, logps: Tensor, weights: Tensor) -> None:
        """``sampling/sampling_logp_difference``: how far the sampler's log-probabilities are from the trainer's own, in the first
        sweep of a window; ``logps`` are those of the window's first weights."""
        if "sampler_logps" not in batch.extras:
            return
        difference = (logps - batch.extras["sampler_logps"]).abs()
        known = (weights != 0) & ~difference.isnan()
        self.record("sampling/sampling_logp_difference/mean", difference.nan_to_num(), known.double())
        self.record_extreme("sampling/sampling_logp_difference/max", difference[known], "max")

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps the window, as long as steps of it are to come."""
        super().on_save_checkpoint(checkpoint)
        if self.window is not None:
            checkpoint[KEY] = {**self.window.state_dict(), "drawn_with": self._drawn_with()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes the window over, and deals it to this run's ranks."""
        super().on_load_checkpoint(checkpoint)
        if KEY in checkpoint and self.trainer.state.fn == "fit":
            self.window = Window.from_state(checkpoint[KEY])
            self._restored = checkpoint[KEY].get("drawn_with", {})
            self.window.plan(self.trainer.datamodule.planner, self.sampling.max_new_tokens)


def _is_dull(part: RewardResult, weights: Sequence[float]) -> bool:
    """Whether a group's rewards are all equal."""
    total = combine(torch.from_numpy(part.values), torch.tensor(weights))
    return bool(zero_spread(total, torch.zeros(len(total), dtype=torch.int64)).all())


def _support(rollout: Any) -> tuple[np.ndarray, np.ndarray]:
    if rollout.support is None:
        raise UserError(
            "the engine does not say which tokens could be drawn, so that with top_k, top_p or min_p the trainer's "
            "log-probabilities would be others than the sampler's; leave these out, or use engine=torch."
        )
    counts = np.array([len(ids) for ids in rollout.support], dtype=np.int64)
    return (np.concatenate(rollout.support) if len(counts) else np.zeros(0, dtype=np.int64)), counts


def _keep(mine: dict[str, dict[int, np.ndarray]], name: str, window: Window, batch: MicroBatch, values: Tensor | None) -> None:
    """Splits a micro-batch's outputs by completion."""
    rows = window.trained_rows(batch)
    if name not in mine or values is None or not rows:
        return
    parts = np.split(values.float().cpu().numpy(), np.cumsum(window.lengths[rows])[:-1])
    mine[name] |= dict(zip(rows, parts, strict=True))
