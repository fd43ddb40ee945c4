"""Steps that are HTTP calls with an idempotency key."""

from __future__ import annotations

import functools
import json
import os
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

from delivered.model.answers import ends_within, limited
from delivered.model.errors import BadRecord, MissingExtra, Unreachable, UsageError
from delivered.model.limits import SAGA_DATA_BYTES_MAX
from delivered.model.options import REFERENCES, check_http_url, resolve_secret
from delivered.model.secrets import without_passwords
from delivered.patterns.saga.definition import Call, Rejected, Verb
from delivered.patterns.saga.log import stored_result

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
        timeout_s: of the call, from connecting to the end of the reply, however slowly its bytes come; less than the
            step's timeout_s.
    """

    url: str
    method: str = "POST"
    body: Callable[[Call], Any] = _everything
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 20.0
    takes_key: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.url.startswith(REFERENCES) or "{" in self.url.partition("://")[2].partition("/")[0]:
            raise UsageError("OPTION_VALUE.STEP_URL", url=self.url)
        check_http_url("The URL of a step", self.url, "Http('https://host/path')")

    def __call__(self, call: Call) -> Any:
        own = {name: resolve_secret(name, value) for name, value in self.headers.items()}
        key = f"{call.key}/undo" if call.verb is Verb.UNDO else call.key
        url = self.url
        for name, value in (("id", call.id), ("key", call.key), ("step", call.step)):
            url = url.replace("{" + name + "}", quote(value, safe=""))
        # Compressed replies are no use here, and a client that unpacks them has no bound.
        headers = {"Accept-Encoding": "identity", **own, "Idempotency-Key": key}
        with (
            ends_within(self.timeout_s) as deadline,
            _client(os.getpid()).stream(
                self.method, url, json=self.body(call), headers=headers, timeout=self.timeout_s
            ) as reply,
        ):
            status, encoding = reply.status_code, reply.encoding or "utf-8"
            done = 200 <= status < 300
            body = _body(reply, deadline, _RESULT_BYTES_MAX if done else _REASON_BYTES_MAX)
        if done:
            return _result(body, encoding)
        what = f"{self.method} {without_passwords(url)} answered {status}: {_text(body, encoding)[:200]}"
        if 400 <= status < 500 and status not in _AGAIN:
            raise Rejected(what)
        raise Unreachable("SAGA_HTTP", answer=what)


def _body(reply: httpx.Response, deadline: float, bytes_max: int) -> bytes:
    """What arrives until the deadline or the connection's end, at most this many bytes: the status alone says whether
    the call was done."""
    import httpx

    body = bytearray()
    with suppress(httpx.HTTPError):
        for part in reply.iter_raw():
            body += part
            if len(body) >= bytes_max or time.monotonic() > deadline:
                break
    return _unpacked(bytes(body[:bytes_max]), reply.headers.get("Content-Encoding", ""), bytes_max)


def _unpacked(body: bytes, how: str, bytes_max: int) -> bytes:
    """Of a service that compresses although it was asked not to; empty if the encoding is unknown, or wrong."""
    match how.strip().lower():
        case "" | "identity":
            return body
        case "gzip" | "x-gzip" | "deflate":
            with suppress(zlib.error):
                return zlib.decompressobj(wbits=47).decompress(body, bytes_max)
    return b""


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _result(body: bytes, encoding: str) -> Any:
    """JSON, or the text. Neither changes that the call was done."""
    if not body:
        return None
    try:
        return stored_result(json.loads(body, parse_constant=_no_number))
    except (ValueError, RecursionError, BadRecord):
        return _text(body, encoding)[:_TEXT_LENGTH_MAX]


def _text(body: bytes, encoding: str) -> str:
    """Text that every saga log stores. The service names the encoding: some are not of text, some reject bytes."""
    try:
        text = body.decode(encoding, "replace")
    except Exception:
        text = body.decode("utf-8", "replace")
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


@functools.cache
def _client(process: int) -> httpx.Client:
    """One for all threads of a process: it keeps connections, and loading certificates takes long."""
    del process  # a forked child must not use its parent's connections
    try:
        import httpx
    except ImportError:
        raise MissingExtra("saga") from None
    client: httpx.Client = limited(httpx.Client())
    return client
