"""Steps that are HTTP calls with an idempotency key."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

from delivered.model.errors import MissingExtra, Unreachable
from delivered.model.limits import SAGA_DATA_BYTES_MAX
from delivered.model.options import resolve_secret
from delivered.model.secrets import without_passwords
from delivered.saga.definition import Call, Rejected, Verb

if TYPE_CHECKING:
    import httpx

_REASON_BYTES_MAX = 1_000
_RESULT_BYTES_MAX = SAGA_DATA_BYTES_MAX // 2
_TEXT_LENGTH_MAX = 1_000
_AGAIN = (408, 409, 425, 429)
"""Refused for now: a request with the same key is under way (409), too many requests."""


def _everything(call: Call) -> Any:
    return {"id": call.id, "key": call.key, "data": call.data, "results": dict(call.results)}


@dataclass(frozen=True)
class Http:
    """A step's `do` or `undo` as an HTTP call. The service must honour the key: `do` then takes the key by itself.

    The header Idempotency-Key is the key of the step, or, for an undo, that key and `/undo`: the body says what to take
    back. 2xx is done, with the reply as result: its JSON, or its text if it is none. 4xx is rejected, except 408, 409,
    425 and 429; these, any other status and every error of the connection leave it open whether the call was done.

    Attributes:
        url: `{id}`, `{key}` and `{step}` are replaced, percent-encoded.
        body: makes the JSON body of a call; by default id, key, data, and results of earlier steps.
        headers: values may be env:NAME or file:PATH.
        timeout_s: of connecting, of each wait for the service, and until the reply is complete; less than the step's
            timeout_s.
    """

    url: str
    method: str = "POST"
    body: Callable[[Call], Any] = _everything
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 20.0
    takes_key: ClassVar[bool] = True

    def __call__(self, call: Call) -> Any:
        own = {name: resolve_secret(name, value) for name, value in self.headers.items()}
        key = f"{call.key}/undo" if call.verb is Verb.UNDO else call.key
        url = self.url
        for name, value in (("id", call.id), ("key", call.key), ("step", call.step)):
            url = url.replace("{" + name + "}", quote(value, safe=""))
        headers = {**own, "Idempotency-Key": key}
        deadline = time.monotonic() + self.timeout_s
        with _client(os.getpid()).stream(
            self.method, url, json=self.body(call), headers=headers, timeout=self.timeout_s
        ) as reply:
            status, encoding = reply.status_code, reply.encoding or "utf-8"
            done = 200 <= status < 300
            body = _body(reply.iter_bytes(), deadline, _RESULT_BYTES_MAX if done else _REASON_BYTES_MAX)
        if done:
            return _result(body, encoding)
        what = f"{self.method} {without_passwords(url)} answered {status}: {body.decode(encoding, 'replace')[:200]}"
        if 400 <= status < 500 and status not in _AGAIN:
            raise Rejected(what)
        raise Unreachable("SAGA_HTTP", what, next_step="check the service; the saga tries again by itself")


def _body(parts: Iterator[bytes], deadline: float, bytes_max: int) -> bytes:
    """What arrives until the deadline, at most this many bytes: the status alone says whether the call was done."""
    body = bytearray()
    for part in parts:
        body += part
        if len(body) >= bytes_max or time.monotonic() > deadline:
            break
    return bytes(body[:bytes_max])


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _result(body: bytes, encoding: str) -> Any:
    """JSON, or the text. Neither changes that the call was done."""
    if not body:
        return None
    try:
        return json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return body.decode(encoding, "replace")[:_TEXT_LENGTH_MAX]


@functools.cache
def _client(process: int) -> httpx.Client:
    """One for all threads of a process: it keeps connections, and loading certificates takes long."""
    del process  # a forked child must not use its parent's connections
    try:
        import httpx
    except ImportError:
        raise MissingExtra("saga") from None
    return httpx.Client()
