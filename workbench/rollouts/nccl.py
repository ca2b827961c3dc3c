"""Weights from GPU to GPU, through vLLM's own weight transfer."""

import socket
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from workbench.errors import UserError
from workbench.models.policy import Policy
from workbench.rollouts import weights
from workbench.rollouts.http import Client


class NCCLTransfer:
    """The trainer's end: rank 0 joins the workers' NCCL group, the other ranks take part in gathering alone.

    Args:
        client: of the server.
        port: on this machine, where the workers find the group.
        rank: of this process among the trainer's.
    """

    def __init__(self, client: Client, port: int, rank: int) -> None:
        self._client, self._port, self._rank = client, port, rank
        self._engine: Any = None
        self._policy: Policy | None = None
        self._name = ""

    def send(self, policy: Policy, name: str) -> None:
        """Sends the policy's weights; the server keeps ``name`` as their version. Every rank calls it."""
        self._policy, self._name = policy, name
        if self._engine is None:
            self._engine = self._join()
        self._engine.send_weights()

    def close(self) -> None:
        """Leaves the group."""
        self._engine = None
        if self._rank == 0:
            self._client.post("/shutdown_weight_transfer_engine")

    # -- what vLLM's trainer engine asks of its client ----------------------------------------------------------------

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Tells the workers where the group is."""
        self._client.post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Announces weights."""
        self._client.post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Tells names, types and shapes; the workers receive meanwhile."""
        self._client.post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ends the update and stamps its version."""
        self._client.post("/finish_weight_update", {"weight_version": weight_version or self._name})

    def shutdown_weight_transfer_engine(self) -> None:
        """Ends the group on the workers' side."""
        self._client.post("/shutdown_weight_transfer_engine")

    # -- what it asks of its source -----------------------------------------------------------------------------------

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of this update."""
        return weights.named_weights(self._policy)

    def _join(self) -> Any:
        try:
            from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        except ImportError as error:
            raise UserError(
                "method.engine.transport=nccl needs vLLM beside the trainer too: pip install 'workbench[vllm]'."
            ) from error
        transfer = self

        class Source(WeightSource):
            def metadata(self) -> list[Any]:
                dtype = next(p.dtype for p in transfer._policy.causal_lm.parameters() if p.is_floating_point())
                shapes = weights.weight_shapes(transfer._policy)
                return [ParamMeta(name, dtype, shape) for name, shape in shapes.items()]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return transfer.named()

        workers = int(self._client.get("/get_world_size")["world_size"])
        info = NCCLTrainerInitInfo(
            master_address=socket.gethostbyname(socket.gethostname()),
            master_port=self._port,
            world_size=workers + 1,
            rank=self._rank,
        )
        return WeightTransferTrainerFactory.trainer_init(info, client=self, source=Source())
