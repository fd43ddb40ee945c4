"""How far a source is behind, in `StreamingQueryProgress`: Spark's own Kafka source says it there, and PySpark lets no
Python source do so. Offsets tell it: where a batch ended, and where the source ends now.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_PYTHON_STREAM = "org.apache.spark.sql.execution.datasources.v2.python.PythonMicroBatchStream"


def is_python_stream(description: str) -> bool:
    """Whether Spark describes a source by the class of all Python sources."""
    return description.startswith(_PYTHON_STREAM)


def lag(end: str | None, latest: str | None) -> dict[str, str]:
    """`minOffsetsBehindLatest`, `maxOffsetsBehindLatest` and `avgOffsetsBehindLatest` over the partitions, in records'
    offsets, spelled as Spark's Kafka source does; empty where offsets are not numbers.

    Args:
        end, latest: offsets as JSON, numbers by partition, perhaps by topic first.
    """
    ended, newest = _numbers(end), _numbers(latest)
    behind = [max(0, at - ended[partition]) for partition, at in newest.items() if partition in ended]
    if not behind:
        return {}
    return {
        "minOffsetsBehindLatest": str(min(behind)),
        "maxOffsetsBehindLatest": str(max(behind)),
        "avgOffsetsBehindLatest": str(sum(behind) / len(behind)),
    }


def _numbers(offsets: str | None) -> dict[tuple[str, ...], int]:
    try:
        found = json.loads(offsets or "null")
    except ValueError:
        return {}
    return dict(_leaves((), found)) if isinstance(found, dict) else {}


def _leaves(path: tuple[str, ...], value: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], int]]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _leaves((*path, key), inner)
        elif isinstance(inner, int) and not isinstance(inner, bool):
            yield (*path, key), inner
