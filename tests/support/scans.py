"""A sink's content as read by an audit."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from delivered.contract.sink import Sink


def scanned(sink: Sink) -> Iterator[pa.RecordBatch]:
    scan = sink.scan()
    for piece in scan.slices():
        yield from scan.read(piece)


def scanned_table(sink: Sink) -> pa.Table:
    return pa.Table.from_batches(scanned(sink), sink.scan().schema().remove_metadata())
