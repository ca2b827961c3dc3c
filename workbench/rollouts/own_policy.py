"""What engines share that write with the policy itself."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.models.policy import Policy


class OwnPolicyEngine:
    """Base of engines that have no weights of their own: there is nothing to send, and nothing to hold between calls."""

    policy: "Policy | None" = None
    version = 0

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and completion together: the positions that the model knows."""
        return getattr(self.policy.config.get_text_config(), "max_position_embeddings", None)

    def sync_weights(self, policy: "Policy", version: int) -> None:
        """Notes the version; the weights are the policy's own."""
        self.policy, self.version = policy, version

    def sleep(self) -> None:
        """Nothing is held between calls."""

    def wake(self) -> None:
        """Nothing is held between calls."""

    def close(self) -> None:
        """Nothing was started."""
