"""A real vLLM server on the loopback, as a process of its own that can be killed and started again."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from workbench.models.policy import Policy
from workbench.rollouts.weights import named_weights, write_checkpoint
from workbench.tiny import tiny_tokenizer


class ServerProcess:
    """Serves a policy's weights as they are now.

    Args:
        policy: written to ``folder``.
        folder: for its weights and its log.
        arguments: further ones of the command line.
        logprobs_mode: what the server's log-probabilities are.
    """

    def __init__(
        self, policy: Policy, folder: Path, arguments: tuple[str, ...] = (), *, logprobs_mode: str = "processed_logprobs"
    ) -> None:
        self.folder, self.process = folder, None
        write_checkpoint(policy, tiny_tokenizer(), folder / "served", named_weights(policy, merge=False))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "served")),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"),
            *("--logprobs-mode", logprobs_mode, "--max-logprobs", "-1", "--generation-config", "vllm"),
            *("--kv-cache-memory-bytes", str(2**27), "--gpu-memory-utilization", "0.1", "--max-num-seqs", "32"),
            *("--served-model-name", "policy", *arguments),
        ]

    def start(self, *, wait: bool = True) -> "ServerProcess":
        switches = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
        with open(self.folder / "server.log", "ab") as output:
            self.process = subprocess.Popen(
                self.command, stdout=output, stderr=output, env=os.environ | switches, start_new_session=True
            )
        if wait:
            self.wait()
        return self

    def wait(self, seconds: float = 180.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return
            except (OSError, urllib.error.URLError):
                assert self.process.poll() is None, self.log()
                time.sleep(0.3)
        raise AssertionError(self.log())

    def log(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        """Ends it at once, with the processes that it started."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
