"""A stream's lag: the end of a batch compared with the current end of the source. Pure.

A source writes its offsets as JSON: numbers by partition, perhaps nested by topic; a key that begins with `#` is
metadata. A log's version and a position in PostgreSQL's WAL count no records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


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
