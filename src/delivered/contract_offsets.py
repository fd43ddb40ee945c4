"""What a source implements whose offsets hold more than positions. Opt-in."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


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

    @property
    def identity_metadata(self) -> frozenset[str]:
        """Those of them whose value maps what is read to an id: another id under one name is another thing, whose
        offsets mean other records."""

    @property
    def stops_on_data_loss(self) -> bool:
        """Whether the query must stop when records may be lost."""
