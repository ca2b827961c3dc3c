"""`Classifier`: what reward models share, a head that scores in place of one that writes."""

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel

from workbench.errors import UserError
from workbench.methods.base import Method
from workbench.methods.generate import Prompt
from workbench.models.heads import Kind, classification_head, load_classifier
from workbench.models.load import ModelSpec
from workbench.models.policy import Policy

log = logging.getLogger(__name__)


class Classifier(Method):
    """A language model's backbone under a classification head, which is read from the checkpoint or drawn.

    Args:
        model: hub name, path, `ModelSpec`, or a model that is already built.
        seed: of a new head on a model handed in as an object; a `ModelSpec` has its own ``init_seed``.
        options: as in `Method`.
    """

    generates = False
    trains_lm_head = False
    kind: ClassVar[Kind]
    num_labels: ClassVar[int]

    def __init__(self, model: str | ModelSpec | PreTrainedModel, *, seed: int = 0, **options: Any) -> None:
        super().__init__(model, **options)
        self.head_seed = seed
        self.want = ["scores"] + ["aux_loss"] * (self.router_aux_loss_coef is not None)

    def load_network(self) -> PreTrainedModel:
        """The classifier before any adapter."""
        seed = self.head_seed if isinstance(self.model_spec, nn.Module) else None
        return load_classifier(self.model_spec, kind=self.kind, num_labels=self.num_labels, seed=seed)

    def build_policy(self) -> Policy:
        """As in `Method`; says where an adapter leaves the head as it is."""
        policy = super().build_policy()
        if not any(parameter.requires_grad for parameter in classification_head(policy.hf).parameters()):
            log.warning("The classification head is frozen: the adapter does not train it (see peft.modules_to_save).")
        return policy

    def generate(self, prompts: Sequence[Prompt], **options: Any) -> list[str]:
        """Refused."""
        name = type(self).__name__
        raise UserError(f"{name} trains a model that scores text and writes none; use workbench.models.scoring.score.")
