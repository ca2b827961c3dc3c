"""Run by two processes: each writes its share of the completions, with whole or sharded weights; the results go to files."""

import json
import sys

import torch
import torch.distributed as dist

from workbench.models.policy import Policy, shard
from workbench.rollouts.torch_engine import TorchEngine
from workbench.rollouts.types import Request, Sampling
from workbench.tiny.model import tiny_model
from workbench.tiny.tokenizer import tiny_tokenizer

SAMPLING = Sampling(max_new_tokens=14, end_ids=tuple(range(10, 16)), top_p=0.95)


def requests() -> list[Request]:
    """Three samples of five prompts."""
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(4, 90, (n,), generator=generator).tolist() for n in (3, 20, 9, 1, 14)]
    return [Request(ids, (0, 0, row, 0, sample)) for row, ids in enumerate(prompts) for sample in range(3)]


def write(policy: Policy, asked: list[Request]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of each completion."""
    engine = TorchEngine(batch_size=4)
    engine.start(policy, tiny_tokenizer())
    return [(r.token_ids, r.logps.tolist()) for r in engine.generate(asked, SAMPLING)]


def main(folder: str) -> None:
    """Rank 0 takes a third of the requests, rank 1 the rest; then rank 1 all of them and rank 0 none."""
    dist.init_process_group("gloo")
    rank, asked = dist.get_rank(), requests()
    for name in ("whole", "sharded"):
        policy = Policy(tiny_model("llama", size="pico"))
        if name == "sharded":
            shard(policy, dist.device_mesh.init_device_mesh("cpu", (2,)))
        found = write(policy, asked[:5] if rank == 0 else asked[5:])
        uneven = write(policy, asked if rank else [])
        with open(f"{folder}/{name}-{rank}.json", "w") as file:
            json.dump([found, uneven], file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
