"""What a sink is: a writer, a committer, a store for a ledger. Small protocols; engine and planner know no more of it.

Every docstring says: the promise in one line; runs on; may it be called again; what is true before and after it.
`Outcome` has three cases. A method that returns one never raises for a server's answer: it says Failed when the
change is not in and will not get in, and Unknown when it cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import pyarrow as pa

from delivered.contract.finding import Finding
from delivered.contract.source import Offsets, Slice
from delivered.model.bad_row import OnBadRow
from delivered.model.capability import SinkCapability
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Work
from delivered.model.outcome import Outcome
from delivered.model.work import Prepared

if TYPE_CHECKING:  # executors do without
    from delivered.ledger.store import Store


class Writer(Protocol):
    """Writes one shard of one batch in one attempt. Runs on an executor, in one thread, used once."""

    def stage(self, batch: pa.RecordBatch) -> None:
        """Take rows.

        exactly_once: invisible to readers of the sink. Else: on their way to being visible; at_most_once never
        sends a row twice. Memory stays bounded: blocks while the sink is behind.
        Dies here: nothing counts (exactly_once); some rows may be visible (else).
        """

    def prepare(self, fingerprint: Fingerprint) -> dict[str, Any]:
        """Make the rows durable and promise to commit; return the handle for `Committer`.

        `fingerprint` is of all rows staged; a sink whose promise can expire keeps it in a marker beside the rows.

        Runs after the last `stage`, once, also when there were no rows. After it the process may die.
        The handle names the rows of this writer alone, never those of another with the same `Work`: Spark counts
        attempts from 0 again when a batch or a stage runs again, and an earlier task may still be alive.
        exactly_once: raises if the promise cannot be given. at_least_once: returns {} when every row was
        acknowledged, else raises. at_most_once: returns when every row was acknowledged or given up: {}, or
        {"given_up": n} with the count of those without an acknowledgement.
        """

    def abort(self) -> None:
        """Give back what was staged, as far as possible. May be called at any time, again, and after an error."""


class Committer(Protocol):
    """The driver's hand on participants, prepared by tasks that may be gone. Runs on the driver."""

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        """Make a decided participant visible. Idempotent: may be called again, by another process.

        `work.scope` names the sink of this participant.

        Ok: visible. Failed: the promise is gone, and this call did not make it visible; `applied` tells whether an
        earlier one did. Unknown: ask again.
        """

    def was_committed(self, work: Work) -> bool:
        """Whether the shard of this batch is visible, by evidence that lies in the sink with the rows.

        Sees every outcome of transactions that `abort_orphans` or `commit` ended before.
        """

    def abort(self, prepared: Prepared) -> Outcome[None]:
        """Give a participant back that was not decided. Idempotent.

        Runs in a task, too: of one of several sinks when another one could not promise.
        """

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        """Abort every open participant of this pipeline and sink, of any incarnation, that `keep` does not name.

        Runs at recovery, after older owners were fenced. Never touches what belongs to others. Returns how many.
        """

    def close(self) -> None:
        """Give connections back. May be called again."""


class BoundedScan(Protocol):
    """What a sink holds now, once, and not as a stream. Picklable; holds no connection."""

    def schema(self) -> pa.Schema:
        """Same columns as `Sink.records` gives, and what the system adds (Kafka: partition and offset).

        Raises a `DeliveredError` if there is nothing to read, or it cannot be read.
        """

    def slices(self, since: Offsets | None = None) -> Sequence[Slice]:
        """Cut what the sink holds when this is called. Runs on the driver.

        Args:
            since: where to begin, in the system's own terms ({"rowid": 5001}), as far as it keeps an order.
        """

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        """Runs on an executor. Bounded memory."""


@runtime_checkable
class Sink(Protocol):
    """A sink as the user named it: options, checked, no connection. Picklable."""

    @property
    def name(self) -> str:
        """Default name of this sink in its pipeline; tells two sinks of one pipeline apart."""

    def capability(self) -> SinkCapability:
        """Static: asks no server."""

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        """Ask the live system whether it can keep the promise. Runs on the driver before the first batch."""

    def check_schema(self, schema: pa.Schema) -> None:
        """Raise UsageError if rows of this schema cannot be written. Runs on the driver; asks no server."""

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows as a reader of the sink finds them: canonical columns, order and types; the fingerprint's input."""

    def writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Writer:
        """Runs on an executor. May reuse clients that earlier shards left warm in this process."""

    def scan(self) -> BoundedScan:
        """All records that a reader of this sink sees, for the audit. Raises Refused if nobody can read them back."""

    def store(self, scope: Scope) -> Store:
        """Where decisions of this scope are durable, below the rules of `ledger.Ledger`. Opens nothing yet."""

    def committer(self, scope: Scope) -> Committer: ...


DEAD_LETTERS = pa.schema(
    [
        pa.field("sink", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("batch", pa.int64()),
        pa.field("shard", pa.int32()),
        pa.field("row", pa.int64()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("record", pa.string()),
    ]
)
"""What a dead-letter sink gets: who refused the row and why, its place in the batch (`row` counts the rows of that sink
in that shard), where the source had it, if the rows still say so, and the row itself as JSON."""


Route = Callable[[pa.RecordBatch], pa.RecordBatch]
"""Which rows and columns of a batch a sink gets. Picklable; the same rows give the same rows."""


@dataclass(frozen=True)
class Member:
    """One of several sinks that a batch is written to, all or nothing.

    Attributes:
        name: in the pipeline; tells whose a participant is (`Prepared.sink`).
        route: None: all rows, all columns.
        dead_letters: it gets the dead letters of the others, through its route, and no rows.
    """

    name: str
    sink: Sink
    route: Route | None = None
    dead_letters: bool = False


@runtime_checkable
class SinkGroup(Protocol):
    """Several sinks that share every batch. Its ledger decides for all of them; its committer tells whose participant
    is whose by `Prepared.sink`, and by the sink that `Work.scope` names. Picklable."""

    @property
    def name(self) -> str:
        """Of the sink that keeps the ledger."""

    @property
    def members(self) -> Sequence[Member]:
        """In the order in which they are prepared and applied."""

    @property
    def on_bad_row(self) -> OnBadRow:
        """What becomes of rows that a member `ValidatesRows` and refuses."""

    @property
    def others(self) -> frozenset[str]:
        """Names of all but the sink that keeps the ledger."""

    def check_schema(self, schema: pa.Schema) -> None:
        """As of a sink: rows before the routes."""

    def store(self, scope: Scope) -> Store:
        """Of the sink that keeps the ledger, for all."""

    def committer(self, scope: Scope) -> Committer: ...
