"""What a sink, a committer, a ledger or a source can have besides. Opt-in: found by type. No I/O here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, Self, TypeVar, runtime_checkable

import pyarrow as pa

from delivered.contract.sink import Sink, SinkGroup
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Target

S = TypeVar("S")


@runtime_checkable
class NeedsTarget(Protocol):
    """What a sink has besides whose target must be there before the first claim: where the ledger lies in it, or where
    only what we make has an identity (see `contract.powers.KnowsTarget`)."""

    def ready_target(self, schema: pa.Schema) -> None:
        """Create the target if that was asked for, and compare it with the rows' schema.

        Runs on the driver before the first claim of a start. May be called again, and by two drivers at once. Changes
        no row. Raises UsageError if rows of this schema cannot be written to the target.
        """


def ready_target(sink: Sink | SinkGroup, schema: pa.Schema) -> None:
    """What has to be called before a claim, for any sink."""
    if isinstance(sink, NeedsTarget):
        sink.ready_target(schema)


@runtime_checkable
class SetsUp(Protocol):
    """A committer whose tasks need something at the sink beside its rows: a topic or a table for markers. Opt-in.

    A sink that keeps the ledger sets that up when the ledger is claimed. Beside another sink's ledger this is asked.
    """

    def set_up(self) -> None:
        """Make what is missing. Runs on the driver at recovery, before orphans are aborted; may be called again."""

    def forget(self, batch: int) -> None:
        """Markers of batches of this incarnation before `batch` are not asked for any more. May be called again."""


@runtime_checkable
class ValidatesRows(Protocol):
    """A sink that can tell which rows it would refuse for themselves, before it writes them. Opt-in."""

    def invalid_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        """For each row the reason, null where there is none; None: it takes all of them.

        Runs on an executor; asks no server; the same row gets the same answer.
        """


@runtime_checkable
class ChecksGuarantee(Protocol):
    def check_guarantee(self, guarantee: Guarantee) -> None:
        """Raise UsageError if an option contradicts the guarantee. Runs on the driver; asks nobody."""


@runtime_checkable
class Planned(Protocol):
    def planned(self) -> Self:
        """The same source with the columns of now, whatever comes later; of one that has them already, itself.

        Runs on the driver, once for each query, before `schema`. Asks the system; raises UsageError if there are none.
        """


def planned(source: S) -> S:
    """What has to be called before a query is built on any source or scan."""
    return source.planned() if isinstance(source, Planned) else source


KEY_BYTES = 16
"""Of a key's hash: nobody makes two keys that meet in it, nor do they meet by chance."""


class KeyMemory(Protocol):
    """Keys of the records that decided batches delivered. Runs on executors; used by one thread.

    A key that is noted counts for nothing. The transaction of the decision makes those of its batch count, and forgets
    old ones. So a batch that runs again finds what it found before: never its own keys, and none of a batch that was
    not decided.
    """

    def known(self, batch: int, keys: Sequence[bytes]) -> dict[bytes, list[int]]:
        """For those of the keys that batches before this one delivered: until when each record of them is remembered,
        in microseconds since 1970, without those that were to be forgotten before this batch.

        May be called again, also after the batch was decided: the answer is the same.
        """

    def note(self, batch: int, keys: Sequence[bytes], times: Sequence[int], untils: Sequence[int]) -> None:
        """Note keys of a batch that runs: a record of this time was let in, and is remembered until then.

        Durable when it returns, and before any of the records goes on. May be called again by another attempt, with the
        same keys. What attempts under an earlier claim of the ledger noted is void.
        """

    def close(self) -> None:
        """Give connections back. May be called again."""


@runtime_checkable
class Remembers(Protocol):
    """A sink that keeps such a table in its database, beside the ledger. Opt-in; for the sink that decides."""

    def key_memory(self, scope: Scope) -> KeyMemory:
        """Runs on an executor. The ledger of the same scope was claimed before."""


@runtime_checkable
class HasOffsetMetadata(Protocol):
    """A source whose offsets hold metadata that another connector to the same system could not read.

    Spark's offset log is given the offsets without it; the metadata is kept in the checkpoint's sidecar and put back
    before the driver sees the offsets again.
    """

    @property
    def offset_metadata(self) -> frozenset[str]:
        """Top-level keys of the metadata."""

    @property
    def lasting_metadata(self) -> frozenset[str]:
        """Those of them that hold for every offset until they change; the others belong to one offset."""


@runtime_checkable
class KnowsTarget(Protocol):
    """A committer that can tell its target from one of the same name that was made anew. Opt-in."""

    def targets(self) -> Mapping[str, Target]:
        """Sink's name -> its target, with what its system tells it by; empty: it cannot tell, or there is none yet.

        The id is the same for as long as the target lives, whatever is written to it and however the options spell it;
        another once it was dropped and made anew.
        Runs on the driver at recovery, after the claim. May be called again. Changes nothing.
        """
