"""Steps that are HTTP calls with an idempotency key."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

from delivered.model.errors import MissingExtra, Unreachable
from delivered.model.options import resolve_secret
from delivered.saga.definition import Call, Rejected, Verb

if TYPE_CHECKING:
    import httpx

_AGAIN = (408, 409, 425, 429)
"""Refused for now: a request with the same key is under way (409), too many requests."""


def _everything(call: Call) -> Any:
    return {"id": call.id, "key": call.key, "data": call.data, "results": dict(call.results)}


@dataclass(frozen=True)
class Http:
    """A step's `do` or `undo` as an HTTP call. The service must honour the key: `do` then takes the key by itself.

    The header Idempotency-Key is the key of the step, or, for an undo, that key and `/undo`: the body says what to take
    back. 2xx is done, with the JSON of the reply as result. 4xx is rejected, except 408, 409, 425 and 429; these, any
    other status and every error of the connection leave it open whether the call was done.

    Attributes:
        url: `{id}`, `{key}` and `{step}` are replaced, percent-encoded.
        body: makes the JSON body of a call; by default id, key, data, and results of earlier steps.
        headers: values may be env:NAME or file:PATH.
        timeout_s: of connecting, and of each wait for the service; less than the step's timeout_s.
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
        reply = _client(os.getpid()).request(
            self.method, url, json=self.body(call), headers={**own, "Idempotency-Key": key}, timeout=self.timeout_s
        )
        if 200 <= reply.status_code < 300:
            return reply.json() if reply.content else None
        what = f"{self.method} {url} answered {reply.status_code}: {reply.text[:200]}"
        if 400 <= reply.status_code < 500 and reply.status_code not in _AGAIN:
            raise Rejected(what)
        raise Unreachable("SAGA_HTTP", what, next_step="check the service; the saga tries again by itself")


@functools.cache
def _client(process: int) -> httpx.Client:
    """One for all threads of a process: it keeps connections, and loading certificates takes long."""
    del process  # a forked child must not use its parent's connections
    try:
        import httpx
    except ImportError:
        raise MissingExtra("saga") from None
    return httpx.Client()
