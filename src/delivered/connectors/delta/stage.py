"""Names of data files: who wrote them stands in the name, so that only its own pipeline ever takes one away.

    delivered/p-<pipeline>/s-<sink>/i-<incarnation>/<batch / 100>/[<column>=<value>/]
        <batch>-<shard>-<attempt>-<nonce>-<n>.parquet

They lie in the table's folder from the start: to make them count, the log only has to name them. Files of direct
writers (at_least_once, at_most_once) lie in `direct/` and are not swept: whether one counts, only the log knows.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from urllib.parse import quote

from delivered.model.identity import Scope, Work

BLOCK_BATCHES = 100
"""Batches in one folder: a sweep lists the folders of the newest batches alone."""
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_ROOT = "delivered"


@dataclass(frozen=True)
class Place:
    """Where the files of one writer lie."""

    folder: str
    stem: str

    def name(self, partition: str, number: int) -> str:
        return f"{self.folder}/{partition}{self.stem}-{number}.parquet"


def sink_folder(scope: Scope) -> str:
    # Prefixed, so that a pipeline named ".." stays inside.
    return f"{_ROOT}/p-{scope.pipeline}/s-{scope.sink}"


def incarnation_folder(scope: Scope, incarnation: str) -> str:
    return f"{sink_folder(scope)}/i-{incarnation}"


def incarnation_of(scope: Scope, name: str) -> str | None:
    """Of a staged file of this sink of this pipeline; None if it is none."""
    head, _, tail = name.partition(f"{sink_folder(scope)}/i-")
    return None if head or not tail else tail.partition("/")[0]


def block_folder(scope: Scope, incarnation: str, batch: int) -> str:
    return f"{incarnation_folder(scope, incarnation)}/{batch // BLOCK_BATCHES:08d}"


def new_place(work: Work, direct: bool) -> Place:
    scope = work.scope
    folder = f"{sink_folder(scope)}/direct" if direct else block_folder(scope, scope.incarnation, work.batch)
    return Place(folder, f"{work.batch}-{work.shard}-{work.attempt}-{uuid.uuid4().hex}")


def partition_folder(values: dict[str, str | None]) -> str:
    """`day=2024-05-01/`, as Hive writes it. What counts is what the log says."""
    return "".join(
        f"{quote(k, safe='')}={NULL_PARTITION if v is None else quote(v, safe='')}/" for k, v in values.items()
    )


def batch_of(name: str) -> int | None:
    """The batch that a staged file belongs to, by its name; None if it is no name of ours."""
    digits = name.rpartition("/")[2].partition("-")[0]
    return int(digits) if digits.isdigit() else None


def writer_of(name: str) -> str:
    """One text for all files of one writer."""
    return name.rpartition("/")[2].rpartition("-")[0]
