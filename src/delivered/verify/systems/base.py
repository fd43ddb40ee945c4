"""What a system must offer to be written to and read by the judge, and what a fault can take hold of in it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from delivered import brokers
from delivered.model.guarantee import Guarantee
from delivered.verify.proxy import Proxy
from delivered.verify.workload import Record, Workload

_POLL_S = 0.05


@dataclass(frozen=True)
class Row:
    """A record, as a client found it.

    Attributes:
        partition: of a topic, or the table; position: grows within it.
        sink: which sink of a group holds it; empty: there is one.
    """

    partition: str
    position: int
    key: str | None
    value: str
    sink: str = ""


@dataclass(frozen=True)
class Poll:
    """What a reader that runs all along found in one step.

    Attributes:
        rows: new since the step before.
        snapshot: whether the step saw all of the sink at one moment.
    """

    rows: Sequence[Row]
    snapshot: bool


# -- clients -----------------------------------------------------------------------------------------------------


class SourceClient(Protocol):
    """Where the workload goes: the pipeline's source. A dataclass, so that another process makes the same client."""

    system: str

    def create(self) -> None:
        """Make it, empty."""

    def options(self) -> dict[str, Any]:
        """Of the source in the pipeline file."""

    def send(self, records: Sequence[Record]) -> None:
        """Write all of them; raise unless all are acknowledged."""

    def read(self) -> list[Row]:
        """All that is there."""

    def offsets(self, logged: Any) -> dict[str, int]:
        """Partition -> end of a batch, from what the checkpoint says of this source."""


@runtime_checkable
class QueueSource(Protocol):
    """A source that drops what was acknowledged. `SourceClient.read` reads the log that receivers fill."""

    log: Path
    patience_s: float
    """Nothing that a killed receiver held stays hidden for so long."""

    def arrived(self) -> frozenset[str]:
        """Ids of the records that are in the log."""

    def left(self) -> int | None:
        """Messages that the queue still holds, while nobody receives; None: it does not tell."""


class SinkClient(Protocol):
    """Where the effects go: the pipeline's sink."""

    system: str
    batch_atomic: bool

    def create(self) -> None:
        """Make it, empty, unless the pipeline does."""

    def options(self) -> dict[str, Any]:
        """Of the sink in the pipeline file."""

    def read(self) -> list[Row]:
        """All that a committed reader finds now."""

    def follow(self, seen: Callable[[Poll], None], stop: threading.Event) -> None:
        """Read all along, in the calling thread, until `stop` is set and everything that is there was seen."""

    def open_transactions(self, pipeline: str) -> list[str]:
        """What blocks committed readers."""

    def remove(self) -> None:
        """Give space back. May be called again."""


class ReadDisturbed(Exception):
    """What a reader had begun to read was taken away from under it."""


@runtime_checkable
class LongReads(Protocol):
    """A sink whose readers need time, and must be left alone meanwhile."""

    def reading(self) -> AbstractContextManager[None]:
        """From its begin to its end, a reader is in the middle of reading what is there now.

        Raises:
            ReadDisturbed: at the end, what was there at the begin cannot be read as it was.
        """


@runtime_checkable
class Lockable(Protocol):
    """A sink of which another program can hold what a writer must wait for."""

    def locked(self) -> AbstractContextManager[None]:
        """Another program holds it."""


@runtime_checkable
class SharedTable(Protocol):
    """A table to which others write too, none of whom reads or changes a row that is there."""

    def append_nothing(self) -> None:
        """A commit of another writer, without rows."""

    def compact(self) -> None:
        """A commit that puts the rows that are there into other files."""

    def describe(self, text: str) -> None:
        """A commit that changes what the table says of itself."""


@runtime_checkable
class TwoPhase(Protocol):
    """A server whose prepared transactions an operator can end by hand."""

    def roll_back_prepared(self) -> list[str]:
        """All of them; returns their ids."""


# -- kinds: what the catalogue of faults and the environment know of a system ------------------------------------


@dataclass(frozen=True)
class SourcePlace:
    """Where a case has its source.

    Attributes:
        name: of the case.
        broker: holds the source; None: files of this machine do.
        log: folder for what receivers keep, or for the log that is the source.
        pipeline_address: of a proxy before the server; None: the server's own.
        connector: another one of the same queues, in the pipeline file.
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
        """A name of every server's own alphabet, however long the case's is."""
        return f"source-{digest(self.name)}"


@dataclass(frozen=True)
class SinkPlace:
    """Where a case has its sink.

    Attributes:
        name: of the case.
        broker: holds the sink; None: files of this machine do.
        disk: for files.
        pipeline_address: of a proxy before the server; None: the server's own.
        typed: the judge makes the table, with the columns of the workload; else the pipeline does.
        small: a small disk that the server must put the table on; None: where it likes.
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
    """How a SQL database words what a proxy must tell apart.

    Attributes:
        rows: in a transaction of a task.
    """

    prepare: str
    commit: str
    rows: str


@dataclass(frozen=True)
class SinkKind:
    """
    Attributes:
        format: in a pipeline file.
        client: of a place; None: it is a group.
        server: kind of the server that holds it, as `delivered.brokers` names it; None: files of this machine.
        source: what feeds its pipelines unless a workload or a fault needs topics.
        two_phase: under exactly_once, shards stay open between their promise and the decision's being applied.
        locks: another program can hold what a writer must wait for.
        locked: how others are turned away while one writer holds all of the sink; None: nobody can hold it.
        shared: others commit to the table meanwhile.
        statements: of its protocol, which a proxy reads along; None: it is no SQL server.
        members: several sinks that share every batch, all or nothing; empty: it is one.
        absent: failure point -> why nothing can be done to this sink there.
        guarantees: that it can give; of the others it is shown elsewhere that they are refused.
        sends: what a task sends is there at once, for everybody.
        ordered: a key's rows arrive in the order in which a task wrote them.
        upserts: under exactly_once a row can take the place of the one with its key.
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
        name: its format in a pipeline file.
        client: made again in another process by `address`; at: the client of a place.
        server: kind of the server that holds it, as `delivered.brokers` names it; None: files of this machine.
        queue: it drops what was acknowledged, so receivers keep its messages in a log first.
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
    """All that the verifier knows of a system: a module of this folder that has one as `SYSTEM` is found by itself.

    Attributes:
        properties: of its server, while it is verified.
        proxy: between its clients and its server; None: one that knows nothing of the protocol.
    """

    sinks: tuple[SinkKind, ...] = ()
    sources: tuple[SourceKind, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    proxy: Callable[..., Proxy[Any]] | None = None


# -- what clients share ------------------------------------------------------------------------------------------


def address(client: SourceClient) -> dict[str, Any]:
    """JSON values by which another process makes the same client: `system`, and the arguments of its class."""
    found = {f.name: getattr(client, f.name) for f in fields(client) if f.init}  # type: ignore[arg-type]
    return {"system": client.system, **{k: str(v) if isinstance(v, Path) else v for k, v in found.items()}}


def polling(stop: threading.Event, pause_s: float = _POLL_S) -> Iterator[bool]:
    """Rounds of a reader, the last of which begins when `stop` is set already; yields whether it is the last."""
    while True:
        last = stop.is_set()
        yield last
        if last:
            return
        stop.wait(pause_s)


def digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def as_row(partition: str, position: int, columns: Mapping[str, Any]) -> Row:
    """A row of a table. Of one with other columns than key and value, all of the row is its value."""
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
