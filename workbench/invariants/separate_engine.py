"""An engine with weights of its own, as one in another process has them: what is not sent to it, it does not have."""

import copy

import torch
from transformers import PreTrainedTokenizerBase

from workbench.models.policy import Policy
from workbench.rollouts.torch_engine import TorchEngine


class SeparateEngine(TorchEngine):
    """Draws from a copy of the policy that is wrong until it is synced.

    Args:
        batch_size: most completions that are written at a time.
    """

    def start(self, policy: Policy, tokenizer: PreTrainedTokenizerBase) -> None:
        """Takes a copy, and spoils it."""
        own = copy.deepcopy(policy)
        with torch.no_grad():
            for parameter in own.parameters():
                parameter.zero_()
        super().start(own, tokenizer)

    def sync_weights(self, policy: Policy, version: int) -> None:
        """Copies the weights."""
        self.policy.load_state_dict(policy.state_dict())
        self.version = version
