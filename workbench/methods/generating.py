"""`Generating`: what methods that write completions of prompts, and have them scored, share: the engine and evaluation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from workbench.data.batch import MicroBatch
from workbench.errors import UserError, check_at_least, nearest
from workbench.losses.advantages import combine
from workbench.methods import rollouts
from workbench.methods.evaluation import Evaluation
from workbench.methods.referenced import Referenced
from workbench.methods.rollouts import Group
from workbench.models.load import ModelSpec
from workbench.models.tokenizer import end_token_ids
from workbench.rewards import RewardFunctions, RewardResult
from workbench.rollouts.types import RolloutEngine, Sampling
from workbench.strategies.info import failing_together, gather

_KINDS: dict[str, tuple[Any, str]] = {  # of the fields of eval_sampling
    "max_new_tokens": (int, "an integer"),
    "num_generations": (int, "an integer"),
    "temperature": (int | float, "a number"),
    "top_k": (int | None, "an integer or null"),
    "top_p": (int | float, "a number"),
    "min_p": (int | float | None, "a number or null"),
    "repetition_penalty": (int | float, "a number"),
    "stop": (Sequence | None, "a list of texts or null"),
}
_EVALUATION = 2**31  # beyond the numbers of windows: evaluation draws of its own


class Generating(Referenced):
    """Base of methods that sample completions of prompts.

    Args:
        model: as in `Method`.
        rewards: reward functions: short names, ``module:function``, functions, reward models, or nodes with ``_target_``.
        reward_weights: of each function, a list or a mapping by name; None: 1 each.
        engine: what writes the completions; None: the policy itself (`TorchEngine`).
        max_completion_length: most tokens of a completion.
        temperature: divides the logits, of sampler and trainer alike.
        top_k: draws from the k most likely tokens; None: from all.
        top_p: draws from the most likely tokens that together have this probability.
        min_p: draws from tokens with at least this share of the most likely one's probability; None: from all.
        repetition_penalty: divides the positive logits of tokens that are there already (multiplies negative ones).
        stop: texts at which a completion ends.
        eval_sampling: fields of `Sampling` and ``num_generations`` for evaluation; what it leaves out is greedy, 1 completion.
        seed: of the draws, each keyed by it, the window, the prompt, the attempt and the sample.
        options: as in `Referenced`.
    """

    data_types = ("prompt_only",)
    trains_tokens = False

    def __init__(
        self,
        model: str | ModelSpec | PreTrainedModel,
        *,
        rewards: str | Callable[..., Any] | Sequence[Any],
        reward_weights: Sequence[float] | Mapping[str, float] | None = None,
        engine: RolloutEngine | None = None,
        max_completion_length: int = 256,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: Sequence[str] | None = None,
        eval_sampling: dict[str, Any] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        check_at_least(0, method__seed=seed)
        if isinstance(stop, str):
            raise UserError(f"method.stop={stop!r}: expects a list of texts.")
        self.rewards = RewardFunctions(rewards, reward_weights)
        object.__setattr__(self, "engine", engine or _policy_engine())
        self.sampling = Sampling(
            max_new_tokens=max_completion_length,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            stop=tuple(stop or ()),
        )
        if self.sampling.greedy:
            raise UserError(
                "method.temperature=0 writes the same completion for every sample; set it above 0 (eval_sampling may)."
            )
        self.eval_sampling, self.eval_num_generations = _evaluation_sampling(self.sampling, eval_sampling)
        self.seed = seed
        self._started = False
        self._asleep = False
        self._synced: int | None = None
        self._answers: dict[int, list[tuple[int, Group]]] = {}
        self._logged: dict[int, dict[str, list[float]]] = {}  # numbers of reward functions' own, by evaluation set

    # -- the engine -------------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Starts the engine, and checks that it can hold what it will be asked."""
        super().on_fit_start()
        self._start_engine()

    def before_evaluation_data(self) -> None:
        """Likewise, for evaluation without training."""
        super().before_evaluation_data()
        if self.trainer.state.fn != "fit":
            self._start_engine()

    def _start_engine(self) -> None:
        if self._started:
            return
        self.engine.start(self.policy, self.tokenizer)
        self._started = True
        ends = tuple(end_token_ids(self.policy.hf, self.tokenizer))
        self.sampling, self.eval_sampling = (replace(s, end_ids=ends) for s in (self.sampling, self.eval_sampling))
        longest = max(self.sampling.max_new_tokens, self.eval_sampling.max_new_tokens)
        context, prompt = self.engine.context, self.trainer.datamodule.longest_row()
        if context is not None and (prompt or 1) + longest > context:
            raise UserError(
                f"a prompt of {prompt} tokens and a completion of up to {longest} are more than the {context} that the engine "
                f"holds; set method.max_completion_length={max(1, context - (prompt or 1))} or data.max_length="
                f"{max(2, context - longest)} (with data.truncation)."
            )

    def sync(self) -> None:
        """Wakes the engine, and gives it the weights of this step before anything is drawn."""
        if self._asleep:
            self.engine.wake()
            self._asleep = False
        version = self.trainer.global_step
        if any(getattr(callback, "is_applied", False) for callback in self.trainer.callbacks):
            version = -1 - version  # an average of the weights, which is evaluated between two steps
        if self._synced != version:
            self.engine.sync_weights(self.policy, version)
            self._synced = version

    def rest(self) -> None:
        """Lets the engine give its memory back until it writes again."""
        self.engine.sleep()
        self._asleep = True

    def teardown(self, stage: str) -> None:
        """Ends what the engine and the rewards have started."""
        self.rewards.close()
        if self._started:
            self.engine.close()
            self._started, self._asleep, self._synced = False, False, None

    def score(self, groups: Sequence[Group]) -> RewardResult:
        """The rewards of this rank's completions."""
        trainer = self.trainer
        state = SimpleNamespace(global_step=trainer.global_step, max_steps=trainer.max_steps, epoch=trainer.current_epoch)
        self.rewards.place(self.device)
        arguments = rollouts.as_arguments(groups, self.tokenizer)
        return self.rewards(**arguments, trainer_state=state, end_ids=self.sampling.end_ids)

    # -- evaluation -------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Starts the sets, with the weights as they are."""
        names = self.trainer.datamodule.eval_names
        self._evaluations = [Evaluation() for _ in names]
        self._answers = {i: [] for i in range(len(names))}
        self._logged = {i: {} for i in range(len(names))}
        self.sync()

    def validation_step(self, batch: MicroBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Answers a few prompts of one evaluation set and scores them."""
        data = self.trainer.datamodule
        rows = data.prepared_eval(data.eval_names[dataloader_idx])
        index = [] if batch.is_empty else torch.unique_consecutive(batch.row).tolist()
        asked = [rows[i] for i in index], index
        options = {"num_generations": self.eval_num_generations, "key": (self.seed, _EVALUATION + dataloader_idx)}
        with failing_together(self.trainer.strategy):
            groups = rollouts.answer(self.engine, *asked, self.eval_sampling, self.tokenizer, **options)
            result = self.score(groups)
        self._evaluate(groups, result, self._evaluations[dataloader_idx])
        self._answers[dataloader_idx] += zip(index, groups, strict=True)
        for name, values in result.metrics.items():
            self._logged[dataloader_idx].setdefault(name, []).extend(values)

    def _evaluate(self, groups: Sequence[Group], result: RewardResult, evaluation: Evaluation) -> None:
        written = [rollout for group in groups for rollout in group.rollouts]
        lengths = torch.tensor([float(len(rollout.token_ids)) for rollout in written])
        each = torch.ones(len(written))
        total = combine(torch.from_numpy(result.values), torch.tensor(result.weights))
        scored = (~total.isnan()).double()
        evaluation.add("reward", total.nan_to_num(), scored)
        if self.eval_num_generations > 1:
            best = total.nan_to_num(nan=-torch.inf).view(-1, self.eval_num_generations).amax(1)
            evaluation.add("reward_best", best.nan_to_num(neginf=0.0), best.isfinite().double())
        for i, name in enumerate(result.names):
            values = torch.from_numpy(result.values[:, i])
            evaluation.add(f"rewards/{name}/mean", values.nan_to_num(), (~values.isnan()).double())
        evaluation.add("completions/mean_length", lengths, each)
        evaluation.extreme("completions/max_length", lengths, "max")
        evaluation.add("completions/clipped_ratio", torch.tensor([float(r.finish == "length") for r in written]), each)

    def on_validation_epoch_end(self) -> None:
        """As `Method`'s; nothing more is written now."""
        super().on_validation_epoch_end()
        self.rest()

    def finish_evaluation(self, name: str, evaluation: Evaluation) -> dict[str, float]:
        """As `Method`'s, what reward functions have logged, and what ``compute_metrics(prompts, completions, **columns)`` makes
        of the whole set."""
        number = self.trainer.datamodule.eval_names.index(name)
        metrics = super().finish_evaluation(name, evaluation)
        metrics |= rollouts.means_of(gather(self._logged[number], self.trainer.strategy))
        if self.compute_metrics is None:
            return metrics
        found = sorted((a for part in gather(self._answers[number], self.trainer.strategy) for a in part), key=lambda a: a[0])
        arguments = rollouts.as_arguments([group for _, group in found], self.tokenizer)
        own = self.compute_metrics(arguments["prompts"], arguments["completions"], **arguments["columns"])
        if not isinstance(own, Mapping):
            raise UserError(f"compute_metrics must return a dict of numbers, not {type(own).__name__}.")
        try:
            return metrics | {key: float(value) for key, value in own.items()}
        except (TypeError, ValueError) as error:
            raise UserError(f"compute_metrics must return a dict of numbers: {error}.") from error


def _policy_engine() -> RolloutEngine:
    from workbench.rollouts.torch_engine import TorchEngine

    return TorchEngine()


def _evaluation_sampling(training: Sampling, given: Mapping[str, Any] | None) -> tuple[Sampling, int]:
    given = dict(given or {})
    for name, value in given.items():
        if name not in _KINDS:
            raise UserError(f"method.eval_sampling.{name} is unknown.{nearest(name, _KINDS)} Allowed: {', '.join(_KINDS)}.")
        kind, words = _KINDS[name]
        text = name == "stop" and (isinstance(value, str) or not all(isinstance(part, str) for part in value or ()))
        if isinstance(value, bool) or not isinstance(value, kind) or text:
            raise UserError(f"method.eval_sampling.{name}={value!r}: expects {words}.")
    count = given.pop("num_generations", 1)
    check_at_least(1, method__eval_sampling__num_generations=count)
    given["stop"] = tuple(given.get("stop") or training.stop)
    sampling = Sampling(**{"temperature": 0.0, "max_new_tokens": training.max_new_tokens, **given})
    if sampling.greedy and count > 1:
        raise UserError(
            f"method.eval_sampling.num_generations={count} are all the same at temperature=0; set "
            "method.eval_sampling.temperature above 0."
        )
    return sampling, count
