"""What a system must offer so that the judge can write and read it, and the handles that faults use."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from delivered import Guarantee
from delivered_lab import brokers
from delivered_lab.verify.proxy import Proxy
from delivered_lab.verify.workloads import Record, Workload

_POLL_S, _WAIT_S = 0.05, 0.02


@dataclass(frozen=True)
class Row:
    """A record, as a client found it.

    Attributes:
        partition: of a topic, or the table; position: grows within it.
        sink: the sink of a group that holds it; empty: there is only one.
    """

    partition: str
    position: int
    key: str | None
    value: str
    sink: str = ""


@dataclass(frozen=True)
class Poll:
    """One step of the continuous reader.

    Attributes:
        rows: new since the previous step.
        snapshot: whether the step saw all of the sink at one moment.
    """

    rows: Sequence[Row]
    snapshot: bool


# -- clients -----------------------------------------------------------------------------------------------------


class SourceClient(Protocol):
    """Where the workload goes: the pipeline's source. A dataclass, so that another process can recreate the client."""

    system: str

    def create(self) -> None:
        """Create it, empty."""

    def options(self) -> dict[str, Any]:
        """Source options in the pipeline file."""

    def send(self, records: Sequence[Record]) -> None:
        """Write all of them; raise unless all are acknowledged."""

    def read(self) -> list[Row]:
        """Everything there is."""

    def offsets(self, logged: Any) -> dict[str, int]:
        """Partition -> end of a batch, from the checkpoint's entry for this source."""


@runtime_checkable
class QueueSource(Protocol):
    """A source that drops acknowledged messages. `SourceClient.read` reads the log that receivers fill."""

    log: Path
    patience_s: float
    """Upper bound on how long messages of a killed receiver stay hidden."""

    def arrived(self) -> frozenset[str]:
        """Ids of the records that are in the log."""

    def left(self) -> int | None:
        """Messages still in the queue, while nobody receives; None: unknown."""


@runtime_checkable
class LosesEnd(Protocol):
    """A source whose server may lose the end of a log."""

    def lose_end(self, folder: Path) -> tuple[str, int]:
        """Take the newest record batch away from a log; the server must be down.

        Args:
            folder: the server's.

        Returns:
            The partition, as in `Row`, and its end now.
        """


class SinkClient(Protocol):
    """Where the effects go: the pipeline's sink."""

    system: str
    batch_atomic: bool

    def create(self) -> None:
        """Create it, empty, unless the pipeline does."""

    def options(self) -> dict[str, Any]:
        """Sink options in the pipeline file."""

    def read(self) -> list[Row]:
        """Everything a committed reader sees now."""

    def follow(self, seen: Callable[[Poll], None], stop: threading.Event) -> None:
        """Read continuously, in the calling thread, until `stop` is set and everything there has been seen."""

    def open_transactions(self, pipeline: str) -> list[str]:
        """What blocks committed readers."""

    def remove(self) -> None:
        """Free its space. May be called again."""


class ReadDisturbed(Exception):
    """The data was removed or changed in the middle of a read."""


@runtime_checkable
class LongReads(Protocol):
    """A sink whose reads take time and must not be disturbed."""

    def reading(self) -> AbstractContextManager[None]:
        """While the context is open, a reader is in the middle of reading the current data.

        Raises:
            ReadDisturbed: on exit, the data seen at the start can no longer be read as it was.
        """


@runtime_checkable
class Lockable(Protocol):
    """A sink in which another program can hold a lock that writers need."""

    def locked(self) -> AbstractContextManager[None]:
        """Another program holds the lock."""


@runtime_checkable
class SharedTable(Protocol):
    """A table with other writers, none of whom reads or changes existing rows."""

    def append_nothing(self) -> None:
        """Commit as another writer, without rows."""

    def compact(self) -> None:
        """Commit existing rows into other files."""

    def describe(self, text: str) -> None:
        """Commit a change of the table's description."""


@runtime_checkable
class TwoPhase(Protocol):
    """A server whose prepared transactions an operator can end by hand."""

    def roll_back_prepared(self) -> list[str]:
        """Roll back all of them; return their ids."""


# -- kinds: what the fault catalogue and the environment know of a system ----------------------------------------


@dataclass(frozen=True)
class SourcePlace:
    """Where a case has its source.

    Attributes:
        name: of the case.
        broker: holds the source; None: it is in local files.
        log: folder for the receivers' log, or for the log that is the source.
        pipeline_address: of a proxy before the server; None: the server's own.
        connector: another connector for the same queues, in the pipeline file.
    """

    name: str
    broker: brokers.Broker | None
    log: Path
    pipeline_address: str | None = None
    topics: int = 1
    connector: str | None = None

    @property
    def server(self) -> brokers.Broker:
        return _present(self.broker, f"the source of case {self.name}")

    @property
    def queue(self) -> str:
        """A name in every server's alphabet, however long the case's name is."""
        return f"source-{digest(self.name)}"


@dataclass(frozen=True)
class SinkPlace:
    """Where a case has its sink.

    Attributes:
        name: of the case.
        broker: holds the sink; None: it is in local files.
        disk: for files.
        pipeline_address: of a proxy before the server; None: the server's own.
        typed: the judge creates the table, with the workload's columns; else the pipeline does.
        small: a small disk that the server must put the table on; None: the server's default.
        extra: more options of the sink in the pipeline file.
    """

    name: str
    broker: brokers.Broker | None
    disk: Path
    pipeline_address: str | None
    workload: Workload
    typed: bool = True
    small: Path | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def server(self) -> brokers.Broker:
        return _present(self.broker, f"the sink of case {self.name}")


@dataclass(frozen=True)
class Statements:
    """Statements of a SQL database that a proxy must recognize.

    Attributes:
        rows: in a task's transaction.
    """

    prepare: str
    commit: str
    rows: str


@dataclass(frozen=True)
class SinkKind:
    """
    Attributes:
        format: in a pipeline file.
        client: made from a place; None: it is a group.
        server: kind of the server that holds it, as named by `delivered_lab.brokers`; None: local files.
        source: what feeds its pipelines unless a workload or a fault needs topics.
        two_phase: under exactly_once, shards stay open from prepare to apply.
        locks: another program can hold a lock that writers need.
        locked: error of other writers while one writer locks all of the sink; None: the sink cannot be locked.
        shared: others commit to the table meanwhile.
        statements: of its protocol, which a proxy parses; None: not a SQL server.
        members: several sinks that share every batch, all or nothing; empty: a single sink.
        absent: failure point -> why there is no fault for this sink there.
        guarantees: those it supports; other tests show that the rest are refused.
        sends: what a task sends is visible to everybody at once.
        ordered: a key's rows arrive in the order in which a task wrote them.
        upserts: under exactly_once a row can replace the one with its key.
        own: a user's own pipeline into it can be verified.
    """

    name: str
    format: str
    client: Callable[[SinkKind, SinkPlace], SinkClient] | None
    server: str | None = None
    source: str = "log"
    two_phase: bool = False
    locks: bool = False
    locked: str | None = None
    shared: bool = False
    statements: Statements | None = None
    members: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    guarantees: tuple[Guarantee, ...] = tuple(Guarantee)
    sends: bool = False
    ordered: bool = True
    upserts: bool = False
    own: bool = False


@dataclass(frozen=True)
class SourceKind:
    """
    Attributes:
        name: on the command line.
        client: recreated in another process by `address`; at: the client of a place.
        server: kind of the server that holds it, as named by `delivered_lab.brokers`; None: local files.
        queue: it drops acknowledged messages, so receivers first store them in a log.
        ordered: a key's records are read in the order in which they were sent.
    """

    name: str
    client: Callable[..., SourceClient]
    at: Callable[[SourcePlace], SourceClient]
    server: str | None = None
    queue: bool = False
    ordered: bool = True


@dataclass(frozen=True)
class System:
    """Everything the verifier knows of a system: found as `SYSTEM` in a module of this folder.

    Attributes:
        properties: of its server, during verification.
        proxy: between its clients and its server; None: one that does not know the protocol.
    """

    sinks: tuple[SinkKind, ...] = ()
    sources: tuple[SourceKind, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    proxy: Callable[..., Proxy[Any]] | None = None


# -- shared by clients -------------------------------------------------------------------------------------------


def address(client: SourceClient) -> dict[str, Any]:
    """JSON values from which another process recreates the client: `system`, and the arguments of its class."""
    found = {f.name: getattr(client, f.name) for f in fields(client) if f.init}  # type: ignore[arg-type]
    return {"system": client.system, **{k: str(v) if isinstance(v, Path) else v for k, v in found.items()}}


def polling(stop: threading.Event, pause_s: float = _POLL_S) -> Iterator[bool]:
    """Rounds of a reader; yields whether it is the last one, which begins after `stop` was set."""
    while True:
        last = stop.is_set()
        yield last
        if last:
            return
        stop.wait(pause_s)


def wait_for(what: Callable[[], bool], timeout_s: float, text: str) -> None:
    """Wait until a condition is true. Raises TimeoutError: it did not become true in time."""
    deadline = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{text}: not within {timeout_s:.0f} s")
        time.sleep(_WAIT_S)


def digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def as_row(partition: str, position: int, columns: Mapping[str, Any]) -> Row:
    """A row of a table. With columns other than key and value, the row as JSON is its value."""
    if list(columns) == ["key", "value"]:
        return Row(partition, position, as_text(columns["key"]), as_text(columns["value"]) or "")
    return Row(partition, position, None, json.dumps({name: as_text(v) for name, v in columns.items()}))


def as_text(value: Any) -> str | None:
    if value is None:
        return None
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _present(broker: brokers.Broker | None, what: str) -> brokers.Broker:
    if broker is None:
        raise TypeError(f"{what} has no server")
    return broker
