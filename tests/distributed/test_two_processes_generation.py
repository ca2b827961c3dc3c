"""Two processes (gloo), with whole or sharded weights, write what one process writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from generation_members import requests, write

from workbench.models.policy import Policy
from workbench.tiny.model import tiny_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_two_processes_write_what_one_writes(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = Path(__file__).with_name("generation_members.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), str(tmp_path)], capture_output=True, text=True, env=env, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    expected = write(Policy(tiny_model("llama", size="pico")), requests())
    for name in ("whole", "sharded"):
        (first, none), (second, whole) = (json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in (0, 1))
        assert none == []
        for found in (first + second, whole):
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
            for (_, mine), (_, own) in zip(found, expected, strict=True):
                assert np.allclose(mine, own, atol=1e-5)
