"""The sink: at_least_once and at_most_once, with an external ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.activemq import DUPLICATE_ID, ActivemqSinkOptions
from delivered.connectors.activemq.client import Session
from delivered.connectors.activemq.queue import findings
from delivered.contract.sink import BoundedScan
from delivered.contract.source import Finding
from delivered.kits.queue import COLUMNS, MessageSink, SendingWriter, check_names, check_types, column, sends, text
from delivered.ledger import Ledgers
from delivered.model.capability import Guarantee, SinkCapability
from delivered.model.errors import BadRecord, DeliveredError, OutcomeUnknown, Refused, Unreachable
from delivered.model.identity import Work
from delivered.model.limits import REQUEST_TIMEOUT_S
from delivered.model.rows import check_lengths

# Executor side: rows to messages, many in flight. A receipt means that the broker has the message on disk.

IN_FLIGHT_MAX = 2_000
"""Unconfirmed messages per task."""


@dataclass(frozen=True)
class Message:
    body: bytes
    headers: dict[str, str]


class Publisher:
    """One connection. Any ERROR frame ends it, whichever message it refers to."""

    def __init__(self, options: ActivemqSinkOptions) -> None:
        self._queue = options.queue
        self._session = Session(options)

    @property
    def unconfirmed(self) -> int:
        """Number of messages sent but not confirmed."""
        return len(self._session.unconfirmed)

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages; blocks while too many are in flight. Raises if one was rejected."""
        session = self._session
        try:
            for message in messages:
                if len(session.unconfirmed) >= IN_FLIGHT_MAX:
                    self._wait(IN_FLIGHT_MAX // 2)
                headers = {**message.headers, "receipt": session.receipt()}
                session.transmit(session.frames.send, self._queue, message.body, headers=headers)
        except Unreachable as error:
            raise self._unknown(error) from error

    def flush(self) -> None:
        """Wait until every message is confirmed. Raises if one was rejected, or its outcome is unknown."""
        try:
            self._wait(0)
        except Unreachable as error:
            raise self._unknown(error) from error

    def close(self) -> None:
        """Idempotent."""
        self._session.close()

    def _wait(self, left: int) -> None:
        unconfirmed = self._session.unconfirmed
        self._session.wait(lambda: len(unconfirmed) <= left, REQUEST_TIMEOUT_S, "confirm messages")

    def _unknown(self, error: DeliveredError) -> OutcomeUnknown:
        return OutcomeUnknown("ACTIVEMQ_UNCONFIRMED", unconfirmed=self.unconfirmed, error=error.message)


class ActivemqWriter(SendingWriter[ActivemqSinkOptions, Message]):
    def _connect(self) -> Publisher:
        return Publisher(self._options)

    def _messages(self, rows: pa.RecordBatch) -> list[Message]:
        options = self._options
        columns = (column(rows, name, pa.binary()) for name in ("value", "message_id", "key"))
        kind = {} if "::" in options.queue else {"destination-type": "ANYCAST"}
        messages = []
        for value, chosen, key in zip(*columns, strict=True):
            own = self._next_id()
            message_id = own if chosen is None else text(chosen, "column 'message_id'")
            check_lengths("activemq", key=key, message_id=message_id, value=value)
            check_header(key=key, message_id=message_id)
            headers = {**kind, "persistent": "true", options.id_header: message_id}
            if options.key_header is not None and key is not None:
                headers[options.key_header] = text(key, "column 'key'")
            # With a length, even 0, it is a bytes message: NUL truncates a text message.
            content = value or b""
            headers["content-length"] = str(len(content))
            messages.append(Message(content, headers))
        return messages


def check_header(**columns: str | bytes | None) -> None:
    """Raises BadRecord: a value has a zero byte, which ends a STOMP frame and cannot be escaped."""
    for name, value in columns.items():
        if value is not None and ("\0" in value if isinstance(value, str) else 0 in value):
            raise BadRecord("ZERO_BYTE", value=value, name=name)


_DROPS = (
    "Artemis drops a duplicate while its id is among the newest of its address (id-cache-size, 20,000 by default); "
    "older duplicates, and all on Classic, are delivered"
)


@dataclass(frozen=True)
class ActivemqSink(MessageSink):
    options: ActivemqSinkOptions
    ledgers: Ledgers

    def capability(self) -> SinkCapability:
        options = self.options
        drops = options.id_header == DUPLICATE_ID
        return sends(
            "activemq",
            mechanism="receipts",
            send=f"activemq {options.queue}: persistent, with a receipt for each message",
            assumes=(f"the ledger {options.ledger} is kept with the checkpoint",),
            limits=(_DROPS,) if drops else (),
            repeats=f"the header {options.id_header} is the same in a replayed batch (unless a column message_id "
            "overrides it), so consumers can detect duplicates",
        )

    def _look(self, guarantee: Guarantee) -> Iterator[Finding]:
        del guarantee
        session = Session(self.options)
        try:
            yield from findings(session, self.options, receives=False)
        finally:
            session.close()

    def _check_schema(self, schema: pa.Schema) -> None:
        known = set(COLUMNS) if self.options.key_header is not None else set(COLUMNS) - {"key"}
        action = "select these columns; a column key needs the option keyHeader"
        check_names("activemq", schema, {"value"}, known, action)
        check_types(schema)

    def _writer(self, work: Work, *, gives_up: bool) -> ActivemqWriter:
        return ActivemqWriter(self.options, work, gives_up)

    def scan(self) -> BoundedScan:
        raise Refused("NOT_READABLE.ACTIVEMQ", queue=self.options.queue)
