"""What sources share: a message's columns in Spark, ranges of offsets, bounded scans, a stream's lag.

The columns are those of Spark's own Kafka source, for any system. What splits ranges is pure, so that a rerun of a
batch, perhaps in another process, is split the same way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Generic, Self, TypeVar

import pyarrow as pa

from delivered.contract.sink import BoundedScan
from delivered.contract.source import Address, Offsets, Slice, Source

HEADER = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
HEADERS = pa.field("headers", pa.list_(HEADER))
"""Last column, if `includeHeaders` is set."""

TIMESTAMP = pa.timestamp("us", tz="UTC")
COLUMNS = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", TIMESTAMP),
        pa.field("timestampType", pa.int32()),
    ]
)
"""timestampType: -1 none, 0 set by the producer, 1 set by the broker."""


US_MIN, US_MAX = -(2**63), 2**63 - 1
"""The earliest and latest microsecond that Arrow and Spark can represent: years -290308 and 294247."""


def micros(count: int, us_per: int) -> int:
    """A producer's time in microseconds, saturated: a time in the wrong unit must not wrap around to another date.

    Args:
        count: since 1970, in units of `us_per` microseconds.
    """
    return min(max(count * us_per, US_MIN), US_MAX)


REPRESENTED = ("b'", 'b"')
"""How the name of a header starts whose bytes are not UTF-8; see `header_name`."""
UNKNOWN_BYTES = "\ufffd"
"""What Java puts in place of bytes that are not UTF-8: different bytes become the same text."""


def header_name(name: bytes) -> str:
    """A header's name as text: as it is if it is UTF-8, else as Python writes bytes, b'caf\\xe9'. Different names stay
    different: so does a text that starts as such bytes do."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return repr(name)
    return repr(name) if text.startswith(REPRESENTED) else text


def intact(message_id: str | None) -> str | None:
    """A sender's id, where a broker in Java handed it on. None: none, or one whose bytes were replaced: two messages
    with different such ids would count as one."""
    return message_id if message_id and UNKNOWN_BYTES not in message_id else None


def id_text(message_id: bytes | None) -> str | None:
    """A sender's id as text. Bytes that are not UTF-8 become lone surrogates: see `id_bytes`."""
    return None if message_id is None else message_id.decode("utf-8", "surrogateescape")


def id_bytes(message_id: str) -> bytes:
    """The id as it was sent."""
    return message_id.encode("utf-8", "surrogateescape")


def columns(headers: bool, base: pa.Schema = COLUMNS) -> pa.Schema:
    """`base`, followed by the headers if requested."""
    return base.append(HEADERS) if headers else base


Key = TypeVar("Key")


@dataclass(frozen=True)
class Range(Generic[Key]):
    """Offsets `start` (inclusive) to `end` (exclusive) of one partition.

    Attributes:
        key: names the partition.
    """

    key: Key
    start: int
    end: int

    @property
    def size(self) -> int:
        """Offsets, not records: transaction markers and aborted records leave gaps."""
        return self.end - self.start


def admit(sizes: Mapping[Key, int], limit: int | None) -> dict[Key, int]:
    """How many offsets of each partition the next batch reads.

    Shares are proportional to the backlog; their sum is `limit` or the backlog, whichever is smaller. Every
    partition with a backlog gets at least one, so that busy ones do not starve it: with more such partitions than
    `limit`, the sum is their count.

    Args:
        sizes: backlog per partition, in offsets, at least 0. Ties are broken by the order of this mapping.
        limit: at least 1; None: no bound.
    """
    waiting = {k: n for k, n in sizes.items() if n > 0}
    total = sum(waiting.values())
    if limit is None or total <= limit:
        return dict(sizes)
    rest = max(0, limit - len(waiting))
    extra = total - len(waiting)  # each has one already
    shares = _apportion({k: n - 1 for k, n in waiting.items()}, rest, extra)
    return {k: (1 + shares[k] if k in waiting else 0) for k in sizes}


def split(ranges: Sequence[Range[Key]], pieces_min: int | None, size_max: int | None = None) -> list[Range[Key]]:
    """Split ranges into at least `pieces_min` pieces, if there are that many offsets; large ranges first.

    Empty ranges yield no piece. The pieces of a range are contiguous and cover it; their sizes differ by at most one,
    unless `size_max` is set too.

    Args:
        size_max: of a piece, in offsets.
    """
    wanted = [r for r in ranges if r.size > 0]
    if size_max is not None:
        wanted = [piece for r in wanted for piece in _cut(r, -(-r.size // size_max))]
    if pieces_min is None or pieces_min <= len(wanted):
        return wanted
    total = sum(r.size for r in wanted)
    more = min(pieces_min, total) - len(wanted)
    extra = _apportion(dict(enumerate(r.size - 1 for r in wanted)), more, total - len(wanted))
    pieces: list[Range[Key]] = []
    for i, r in enumerate(wanted):
        pieces += _cut(r, 1 + extra[i])
    return pieces


def _cut(r: Range[Key], count: int) -> list[Range[Key]]:
    bounds = [r.start + r.size * n // count for n in range(count + 1)]
    return [Range(r.key, a, b) for a, b in pairwise(bounds)]


def backwards(start: Mapping[str, Any], end: Mapping[str, Any]) -> str | None:
    """Where a logged range of offsets ends before its start, for messages; None: nowhere.

    Args:
        start, end: nested by partition. Positions that are not numbers are not compared.
    """
    for name in start.keys() & end.keys():
        a, b = start[name], end[name]
        if isinstance(a, dict) and isinstance(b, dict):
            if (inner := backwards(a, b)) is not None:
                return f"{name} {inner}"
        elif isinstance(a, int) and isinstance(b, int) and a > b:
            return f"{name}: from {a} to {b}"
    return None


def _apportion(weights: Mapping[Key, int], seats: int, total: int) -> dict[Key, int]:
    """Distribute `seats` (at most `total`, the sum of `weights`) by largest remainder, none above its weight."""
    if total == 0:
        return dict.fromkeys(weights, 0)
    shares = {k: seats * w // total for k, w in weights.items()}
    left = seats - sum(shares.values())
    by_remainder = sorted(weights, key=lambda k: -(seats * weights[k] % total))
    for k in by_remainder[:left]:
        shares[k] += 1
    return shares


@dataclass(frozen=True)
class SourceScan(BoundedScan):
    """See `delivered.contract.sink.BoundedScan`."""

    source: Source

    def planned(self) -> Self:
        return replace(self, source=self.source.planned())

    def schema(self) -> pa.Schema:
        return self.source.schema()

    def slices(self, since: Offsets | None = None, until: Offsets | None = None) -> Sequence[Slice]:
        """Partitions that `since` does not name are read from their earliest offsets."""
        with closing(self.source.driver()) as driver:
            start, end = driver.batch()
            return driver.slices(_over(start, since or {}), until or end)

    def address(self) -> Address | None:
        return self.source.address()

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        return self.source.read(piece)


def _over(start: Offsets, since: Offsets) -> Offsets:
    return {
        **start,
        **{
            k: _over(start[k], v) if isinstance(v, dict) and isinstance(start.get(k), dict) else v
            for k, v in since.items()
        },
    }


# A stream's lag: the end of a batch compared with the current end of the source.


def spark_metrics(end: str | None, latest: str | None) -> dict[str, str]:
    """`minOffsetsBehindLatest`, `maxOffsetsBehindLatest` and `avgOffsetsBehindLatest` over the partitions, in offsets,
    spelled as in Spark's Kafka source; empty if offsets are not numbers.

    Args:
        end, latest: offsets as JSON.
    """
    ends = dict(_numbers(end))
    pairs = [(at, ends.get(partition)) for partition, at in _numbers(latest)]
    behind = [max(0, now - at) for now, at in pairs if now is not None and at is not None]
    if not behind:
        return {}
    return {
        "minOffsetsBehindLatest": str(min(behind)),
        "maxOffsetsBehindLatest": str(max(behind)),
        "avgOffsetsBehindLatest": str(sum(behind) / len(behind)),
    }


def lag(source: Mapping[str, Any]) -> int | None:
    """Lag in offsets, summed over all partitions; None: offsets are not numbers, or not reported yet.

    Args:
        source: of a progress report, with `endOffset` and `latestOffset`.
    """
    behind = lag_by_partition(source)
    return None if behind is None else sum(behind.values())


def lag_by_partition(source: Mapping[str, Any]) -> dict[str, int] | None:
    """As `lag`, by partition: "orders/0"."""
    newest, end = dict(_numbers(source.get("latestOffset"))), dict(_numbers(source.get("endOffset")))
    if not newest or None in newest.values():
        return None
    return {"/".join(p): max(0, (at or 0) - (end.get(p) or 0)) for p, at in newest.items()}


def _numbers(offsets: Any) -> Iterator[tuple[tuple[str, ...], int | None]]:
    """Offset by partition; None: not a number."""
    if isinstance(offsets, str):
        try:
            offsets = json.loads(offsets)
        except ValueError:
            return
    if isinstance(offsets, Mapping):
        of_log = isinstance(offsets.get("version"), int) and isinstance(offsets.get("offsets"), Mapping)
        yield from _leaves((), offsets["offsets"] if of_log else {k: v for k, v in offsets.items() if k != "lsn"})


def _leaves(path: tuple[str, ...], value: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], int | None]]:
    for key, inner in value.items():
        if key.startswith("#"):
            continue
        if isinstance(inner, Mapping):
            yield from _leaves((*path, key), inner)
        else:
            yield (*path, key), inner if isinstance(inner, int) and not isinstance(inner, bool) else None
