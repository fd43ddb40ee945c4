"""Optional protocols of sources and sinks whose records have schemas, checked with `isinstance`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, Self, TypeVar, runtime_checkable

import pyarrow as pa

from delivered.contract.sink import Sink
from delivered.contract.source import Source

S = TypeVar("S")


@runtime_checkable
class RejectsRecords(Source, Protocol):
    """A source that decodes records, and can go on after one that it cannot decode."""

    def rejecting(self, *, kept: bool, raw: bool = False) -> Self:
        """A copy that does not fail at such a record, and leaves it out.

        Args:
            kept: instead, it has the column REJECTED, and gives the record as a row that is null but for it.
            raw: it has the column RAW, in front of REJECTED.
        """

    def raw_schema(self) -> pa.Schema:
        """Columns of records that are not decoded."""

    def decoded(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """Such records, as `read` returns them."""


def rejecting(source: S, *, kept: bool, raw: bool = False) -> S:
    """Any source; one that decodes nothing is returned as it is."""
    return source.rejecting(kept=kept, raw=raw) if isinstance(source, RejectsRecords) else source


@runtime_checkable
class ReadsBySchema(Protocol):
    """A source whose columns have the types of registered schemas."""

    def newest_versions(self) -> Mapping[str, int]:
        """By column, the newest version of its schema; without the columns whose schema the options name."""

    def by_versions(self, versions: Mapping[str, int]) -> Mapping[str, str]:
        """Options that name these versions."""


@runtime_checkable
class WritesBySchema(Sink, Protocol):
    """A sink whose records name a registered schema.

    Its bytes depend on the schema's id, so a batch that runs again after its decision must be written with the same.
    """

    @property
    def columns(self) -> Sequence[str]:
        """Columns with a schema."""

    def check_rows(self, schema: pa.Schema) -> None:
        """Raise UsageError if the registry has no schema that rows of `schema` fit, or would refuse a declared one.

        Runs on the driver; changes nothing. Raises Unreachable.
        """

    def settled(self, schema: pa.Schema) -> Self:
        """A copy that names the schemas to write rows with, as the registry has them now; a declared one is registered.

        Runs on the driver at a start's first batch. Raises UsageError if the registry refuses the schema, or rows do
        not fit it; Unreachable.
        """

    def schema_ids(self) -> Mapping[str, int]:
        """Ids of the schemas that a settled copy names, by column."""

    def by_ids(self, ids: Mapping[str, int]) -> Self:
        """As `settled`, with the schemas of these ids. Raises UsageError: the registry no longer has one."""
