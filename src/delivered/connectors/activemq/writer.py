"""A task's side: what is staged is visible. Ids are the same when a batch runs again, so receivers can tell repeats."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from delivered.connectors.activemq.options import ActivemqSinkOptions
from delivered.connectors.activemq.publish import Message, Publisher
from delivered.model.errors import OutcomeUnknown, Unreachable
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Work

_ROWS = 1_000


class SendingWriter:
    """
    Args:
        gives_up: at_most_once: a message whose receipt is lost is counted and not sent again.
    """

    def __init__(self, options: ActivemqSinkOptions, work: Work, gives_up: bool) -> None:
        self._options = options
        self._gives_up = gives_up
        scope = work.scope
        self._id = f"{scope.pipeline}.{scope.sink}.{scope.incarnation}.{work.batch}.{work.shard}"
        self._rows = 0
        self._publisher: Publisher | None = None

    def stage(self, batch: pa.RecordBatch) -> None:
        if self._publisher is None:
            self._publisher = Publisher(self._options)
        for at in range(0, batch.num_rows, _ROWS):
            self._publisher.send(self._messages(batch.slice(at, _ROWS)))

    def prepare(self, fingerprint: Fingerprint) -> dict[str, Any]:
        del fingerprint
        publisher = self._publisher
        if publisher is None:
            return {}
        try:
            publisher.flush()
        except (OutcomeUnknown, Unreachable):
            if not self._gives_up:
                raise
            return {"given_up": publisher.unconfirmed}
        finally:
            publisher.close()
        return {}

    def abort(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _messages(self, rows: pa.RecordBatch) -> list[Message]:
        options, names = self._options, rows.schema.names
        values = rows.column("value").to_pylist()
        ids = rows.column("message_id").to_pylist() if "message_id" in names else [None] * len(values)
        keys = rows.column("key").to_pylist() if "key" in names else [None] * len(values)
        kind = {} if "::" in options.queue else {"destination-type": "ANYCAST"}
        messages = []
        for value, given, key in zip(values, ids, keys, strict=True):
            message_id = given if given is not None else f"{self._id}.{self._rows}"
            self._rows += 1
            headers = {**kind, "persistent": "true", options.id_header: message_id}
            if options.key_header is not None and key is not None:
                headers[options.key_header] = key if isinstance(key, str) else key.decode()
            body = b"" if value is None else value.encode() if isinstance(value, str) else value
            # A length, also of nothing, makes it a message of bytes: what a text holds, NUL would cut short.
            headers["content-length"] = str(len(body))
            messages.append(Message(body, headers))
        return messages
