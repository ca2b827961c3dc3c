"""A small JSON client: one attempt per call, faults told apart by whether trying again can help."""

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

_PASSING = {408, 429, 500, 502, 503, 504}


class Unreachable(Exception):
    """No answer, or one that another attempt may change (a server that is down, starting, or full)."""


class Refused(Exception):
    """An answer that another attempt does not change.

    Args:
        status: of the answer.
        text: its message.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status, self.text = status, text


class Client:
    """JSON over HTTP.

    Args:
        base_url: of the server.
        timeout: seconds for one answer.
        api_key: sent as a bearer token; None: none.
    """

    def __init__(self, base_url: str, timeout: float, api_key: str | None = None) -> None:
        self.base_url, self.timeout = base_url.rstrip("/"), timeout
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        # Never through a proxy: tokens and weights go to the machine that was named.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str, *, timeout: float | None = None) -> Any:
        """The answer to a GET."""
        return self._call(urllib.request.Request(self.base_url + path, headers=self._headers), timeout)

    def post(self, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        """The answer to a POST of ``body``."""
        data = json.dumps({} if body is None else body).encode()
        return self._call(urllib.request.Request(self.base_url + path, data, self._headers, method="POST"), timeout)

    def has(self, path: str) -> bool:
        """Whether the server knows a path that takes a POST, asked with a GET that changes nothing."""
        try:
            self.get(path)
        except Refused as error:
            return error.status == 405
        return True

    def _call(self, request: urllib.request.Request, timeout: float | None) -> Any:
        try:
            with self._opener.open(request, timeout=timeout or self.timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            message = _message(error)
            if error.code in _PASSING:
                raise Unreachable(f"{error.code}: {message}") from error
            raise Refused(error.code, message) from error
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(str(getattr(error, "reason", error)) or type(error).__name__) from error
        try:
            return json.loads(text) if text.strip() else None
        except ValueError as error:
            raise Unreachable(f"an answer that is no JSON: {text[:80]!r}") from error


def _message(error: urllib.error.HTTPError) -> str:
    try:
        body = json.loads(error.read())
        found = body.get("error", body) if isinstance(body, dict) else body
        found = found.get("message", found.get("detail", found)) if isinstance(found, dict) else found
        return " ".join(str(found).split())[:300]
    except (ValueError, OSError, http.client.HTTPException):
        return str(error.reason)
