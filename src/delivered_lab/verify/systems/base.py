"""What a system must offer so that the judge can write and read it, the handles that faults use, and what tables of
database servers share: patient sessions, and successive snapshots.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
        expires: prepared transactions expire, after its option transactionTimeout.
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
    expires: bool = False


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


ANSWER_TIMEOUT_S = 60.0
LOCK_TIMEOUT_S = 20
RETRY_S = 0.2
_POLL_S = 0.05
SEEN = "seen_as"
"""The column that numbers a table's rows as they are written."""


class SqlTable(ABC):
    """A table `effects` in a database of its own, on a server that the judge may kill.

    Attributes:
        begin_snapshot: statements that begin a transaction with a single snapshot; lock, unlock: of a table.
    """

    begin_snapshot: tuple[str, ...] = ()
    lock: tuple[str, ...] = ()
    unlock = "COMMIT"

    def __init__(self, kind: SinkKind, place: SinkPlace) -> None:
        self.name = "effects"
        # A name in the server's alphabet, however long the case's name is.
        self.database = f"case_{digest(place.name)}"
        self.batch_atomic = not kind.two_phase
        self._place, self._server = place, place.server
        self._address = place.pipeline_address or self._server.bootstrap
        self._asked = {**({"mechanism": "two_phase"} if kind.two_phase else {}), **place.extra}

    @property
    def upserted(self) -> bool:
        """Rows replace those with their key: the table must have one per key."""
        return self._asked.get("mode") == "upsert"

    def read(self) -> list[Row]:
        """Raises Exception: the client's own; the server did not answer within 60 s."""
        with self._session() as connection:
            return self._new(connection, set())

    def follow(self, seen: Callable[[Poll], None], stop: threading.Event) -> None:
        """Reads snapshots of the server. While it is down, there is nothing to see."""
        known: set[int] = set()
        state: tuple[Any, ...] = ()
        connection: Any = None
        try:
            while True:
                last = stop.is_set()
                try:
                    if connection is None:
                        connection = self._connect(patience_s=ANSWER_TIMEOUT_S if last else 0.0)
                    now = self._state(connection)
                    rows = self._new(connection, known) if now != state else []
                except self._lost():
                    if connection is None and last:
                        raise
                    self._drop(connection)
                    connection = None
                    stop.wait(RETRY_S)
                    continue
                state = now
                if rows:
                    known |= {r.position for r in rows}
                    seen(Poll(rows, snapshot=True))
                if last:
                    return
                stop.wait(_POLL_S)
        finally:
            self._drop(connection)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A reader in the middle of a transaction with a single snapshot."""
        count = f"SELECT count(*) FROM {self.name}"  # noqa: S608
        with self._session() as other:
            before = self._run(other, *self.begin_snapshot, count)
            yield
            if self._run(other, count) != before:
                raise ReadDisturbed(f"a snapshot began with {before} rows of {self.name} and ended with others")
            self._run(other, "COMMIT")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock a table as a migration does: nobody can write or read it."""
        with self._session() as other:
            self._run(other, *(s.format(table=self.name) for s in self.lock))
            yield
            self._run(other, self.unlock)

    @contextmanager
    def _session(self, database: str | None = None) -> Iterator[Any]:
        connection = self._connect(database)
        try:
            yield connection
        finally:
            connection.close()

    def _connect(self, database: str | None = None, patience_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Connect to the server itself, never through a proxy."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return self._connect_once(self.database if database is None else database)
            except self._lost():
                if time.monotonic() >= deadline:
                    raise
                time.sleep(RETRY_S)

    @abstractmethod
    def _run(self, connection: Any, *statements: str) -> list[tuple[Any, ...]]:
        """Run them in sequence; return the rows of the last one."""

    @abstractmethod
    def _lost(self) -> tuple[type[Exception], ...]:
        """What the client raises when the server does not answer."""

    @abstractmethod
    def _connect_once(self, database: str) -> Any:
        """An autocommit connection."""

    @abstractmethod
    def _drop(self, connection: Any) -> None:
        """Close a connection whose server may be down; None: there is none."""

    @abstractmethod
    def _state(self, connection: Any) -> tuple[Any, ...]:
        """Changes whenever a transaction that added or removed rows commits."""

    @abstractmethod
    def _new(self, connection: Any, known: set[int]) -> list[Row]:
        """Unknown rows, by one statement and therefore one snapshot."""
