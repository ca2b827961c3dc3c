"""One rank that shards a policy (FSDP2, gloo) and compares what it would send with the whole weights."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from test_weights import lora_policy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from workbench.rollouts.weights import fingerprint, named_weights, weight_shapes, write_adapter


def main(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    policy = lora_policy()
    merged, base = fingerprint(named_weights(policy)), fingerprint(named_weights(policy, merge=False))
    shapes = weight_shapes(policy)
    fully_shard(policy, mesh=init_device_mesh("cpu", (2,)))
    local = next(iter(policy.parameters())).to_local().numel()
    assert local < next(iter(policy.parameters())).numel(), "it is sharded"
    assert weight_shapes(policy) == shapes
    assert fingerprint(named_weights(policy)) == merged
    assert fingerprint(named_weights(policy, merge=False)) == base
    write_adapter(policy, Path(folder) / "adapter", first=rank == 0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
