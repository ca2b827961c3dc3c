"""A stand-in for a vLLM server on the loopback: what it was asked, which weights it holds, deaths on order."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

POSTS = {"/collective_rpc", "/update_weight_version", "/reset_prefix_cache", "/v1/completions"}
LORA = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}


class FakeServer:
    """Completions follow from seed and weights alone, so that a test can tell what wrote them."""

    def __init__(self, *, posts: set[str] = POSTS, root: str = "") -> None:
        self.posts, self.root = posts, root
        self.seen: list[dict[str, Any]] = []  # bodies of completions that were answered
        self.calls: list[tuple[str, Any]] = []
        self.deaths: list[int] = []  # answers after which the process dies
        self.answer: dict[str, Any] = {}  # replaces parts of a choice
        self.refusal: tuple[int, str] | None = None
        self.lock = threading.Lock()
        self.lives = 0
        self._born()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                owner.get(self)

            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                owner.post(self, json.loads(self.rfile.read(size) or b"{}"))

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def _born(self) -> None:
        """A new process: the weights it was started with."""
        self.lives += 1
        self.weights, self.mark, self.adapters, self.away = "base", "default", [], 0

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def send(self, handler: BaseHTTPRequestHandler, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def get(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path
        if self._gone(handler):
            return
        if path == "/v1/models":
            base = {"id": "base", "max_model_len": 64, "root": self.root}
            self.send(handler, {"data": [base, *({"id": name, "parent": "base"} for name in self.adapters)]})
        elif path == "/weight_info":
            self.send(handler, {"weight_version": self.mark})
        elif path == "/get_world_size":
            self.send(handler, {"world_size": 2})
        elif path == "/health":
            self.send(handler, None)
        else:
            self.send(handler, {"detail": "no"}, 405 if path in self.posts else 404)

    def post(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        path = handler.path
        if self._gone(handler):
            return
        if path not in self.posts:
            return self.send(handler, {"detail": "Not Found"}, 404)
        if path == "/v1/completions":
            return self._complete(handler, body)
        self.calls.append((path, body))
        if path == "/collective_rpc":
            folder = Path(body["kwargs"]["weights_path"])
            assert (folder / "config.json").is_file()
            self.weights = f"{sum(float(t.double().sum()) for t in load_file(folder / 'model.safetensors').values()):.6f}"
        elif path == "/update_weight_version":
            self.mark = body["new_version"]
        elif path == "/v1/load_lora_adapter":
            assert (Path(body["lora_path"]) / "adapter_config.json").is_file()
            self.adapters.append(body["lora_name"])
        elif path == "/v1/unload_lora_adapter":
            self.adapters.remove(body["lora_name"])
        self.send(handler, None)

    def _gone(self, handler: BaseHTTPRequestHandler) -> bool:
        with self.lock:
            if self.away <= 0:
                return False
            self.away -= 1
            handler.close_connection = True
            return True  # the connection closes without an answer

    def _complete(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if self.refusal:
            return self.send(handler, {"error": {"message": self.refusal[1]}}, self.refusal[0])
        if body["model"] not in ("base", *self.adapters):
            return self.send(handler, {"error": {"message": f"{body['model']} does not exist"}}, 404)
        with self.lock:
            self.seen.append({**body, "weights": self.weights, "life": self.lives})
            if self.deaths and len(self.seen) == self.deaths[0]:
                self.deaths.pop(0)
                self._born()
                self.away = 5
                handler.close_connection = True
                return None
        tokens = [body["seed"] >> shift & 63 for shift in (0, 6, 12)]
        choice = {
            "index": 0,
            "token_ids": tokens,
            "prompt_token_ids": body["prompt"],
            "finish_reason": "length",
            "logprobs": {
                "token_logprobs": [-99.0 if self.weights == "base" else -1.0, -2.0, -0.5],
                "top_logprobs": [{f"token_id:{t}": -1.0, "token_id:7": -9999.0, "token_id:9": -0.3} for t in tokens],
            },
        }
        return self.send(handler, {"choices": [choice | self.answer]})
