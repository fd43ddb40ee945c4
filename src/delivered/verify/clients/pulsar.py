"""A topic of Pulsar, read from its first message by a reader, which leaves no trace."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from typing import Any

from delivered.verify.clients.base import Row, as_text
from delivered.verify.clients.messages import Messages

_BUNCH = 1_000
_WAIT_MS = 200


class PulsarTopic(Messages):
    system = "pulsar"
    _client: Any = None
    _reader: Any = None
    _skip = 0

    def create(self) -> None:
        with contextlib.suppress(urllib.error.HTTPError):
            self._admin("DELETE", "?force=true")
        self._admin("PUT", "")

    def sink_options(self) -> dict[str, Any]:
        return {
            "format": "pulsar",
            "url": f"pulsar://{self._given}",
            "adminUrl": f"http://{self._server.listeners['HTTP']}",
            "topic": self.name,
        }

    def take(self, after: int | None) -> list[Row]:
        import pulsar

        if self._reader is None:
            self._client = pulsar.Client(self._server.url, operation_timeout_seconds=5, logger=quiet())
            self._reader = self._client.create_reader(self.name, pulsar.MessageId.earliest)
            # A reader always begins at the first message: those that are known already are met again.
            self._skip = 0 if after is None else after + 1
        at = (-1 if after is None else after) + 1
        found: list[Row] = []
        while len(found) < _BUNCH and self._reader.has_message_available():
            message = self._reader.read_next(timeout_millis=_WAIT_MS)
            if self._skip:
                self._skip -= 1
                continue
            found.append(Row(self.name, at + len(found), None, as_text(message.data()) or ""))
        return found

    def all_taken(self) -> bool:
        if self._reader is None:
            return False
        return not self._reader.has_message_available()

    def disconnect(self) -> None:
        client, self._client, self._reader = self._client, None, None
        if client is not None:
            client.close()

    def _admin(self, method: str, more: str) -> None:
        address = f"http://{self._server.listeners['HTTP']}/admin/v2/persistent/public/default/{self.name}{more}"
        body = json.dumps({}).encode() if method == "PUT" else None
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(address, data=body, headers=headers, method=method)
        urllib.request.urlopen(request, timeout=30).close()  # noqa: S310


def quiet() -> Any:
    import logging

    logger = logging.getLogger("delivered.verify.pulsar")
    logger.setLevel(logging.CRITICAL)
    return logger
