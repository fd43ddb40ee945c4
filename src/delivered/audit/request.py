"""The parameters of an audit, and what it cannot judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from delivered.contract.sink import Sink
from delivered.contract.source import Offsets, Source
from delivered.engine.sinks import Sinks
from delivered.model.capability import WriteMode
from delivered.model.dedup import Dedup
from delivered.model.errors import Refused, UsageError
from delivered.model.guarantee import Guarantee
from delivered.model.ranges import backquoted

SAMPLES_MAX = 20

Transform = Callable[[Mapping[str, Any]], Any]
"""From a Spark DataFrame per source, by name, to another DataFrame."""


@dataclass(frozen=True)
class Recompute:
    """
    Attributes:
        output_mode: of the query.
        keys: columns that identify a row of the result; empty: unknown.
        changing: functions in the transform whose value changes between runs.
        deterministic: as declared; None: not declared.
        sql: the transform is SQL: what it names by value is the same at every start.
    """

    output_mode: str
    keys: tuple[str, ...] = ()
    changing: tuple[str, ...] = ()
    deterministic: bool | None = None
    sql: bool = False


@dataclass(frozen=True)
class AuditRequest:
    """
    Attributes:
        checkpoint: as Spark spells it. It names the incarnation, so an audit covers a single checkpoint.
        sources: by name.
        sink_name: None: the connector's default name.
        dedup: which repeats in the source are dropped before the transform; None: none.
        transform: the pipeline's; None: the records of its only source go through as they are.
        id: SQL over the sink's columns that identifies a record, for example `get_json_object(value, '$.id')`.
            None: all columns do, and an altered record shows as one lost and one unexpected.
        key: SQL over the sink's columns; order is judged within a key. None: the column `key`, if there is one.
        own: SQL over the sink's columns, true for this pipeline's records; the others are foreign. None: not declared.
        samples_max: damaged records listed, per class.
        sink_from: read the sink from here on, if it holds records of others or of earlier checkpoints.
        transform_version: fingerprint of `transform`; batches that ran with another one are not recomputed. Empty:
            every batch is assumed to have run with it.
        dead_letters: name of the sink that gets dead letters; rows that this sink refuses are not expected here then.
        rejects: records that the sources cannot make rows of are dead letters, and not expected in the sink.
        recompute: compare with the transform over the complete range as one batch; None: account for every record.
        decided_by: the sinks among which its batches are decided. None: it decides itself.
    """

    pipeline: str
    guarantee: Guarantee
    checkpoint: str
    sources: Mapping[str, Source]
    sink: Sink
    sink_name: str | None = None
    transform: Transform | None = None
    dedup: Dedup | None = None
    id: str | None = None
    key: str | None = None
    own: str | None = None
    samples_max: int = SAMPLES_MAX
    sink_from: Offsets | None = None
    decided_by: Sinks | None = None
    dead_letters: str | None = None
    rejects: bool = False
    transform_version: str = ""
    recompute: Recompute | None = None

    @property
    def named_sink(self) -> str:
        return self.sink_name or self.sink.name

    @property
    def write_mode(self) -> WriteMode:
        return self.sink.capability().write


class BadExpression(UsageError):
    """The id, the key or the condition `own` is not SQL over the sink's columns."""


def id_sql(mode: WriteMode) -> str:
    """SQL that identifies a key of an upsert."""
    return f"to_json(struct({', '.join(map(backquoted, mode.keys))}))"


def check_write_mode(mode: WriteMode, *, dedup: bool = False) -> None:
    """
    Raises:
        Refused: the source does not determine the final state.
    """
    if mode.complete:
        raise Refused("AUDIT_ORDER.COMPLETE")
    if mode.replaces:
        raise Refused("AUDIT_ORDER.OVERWRITE", replaces=", ".join(mode.replaces))
    if mode.expected is not None:
        raise Refused("AUDIT_ORDER.EXPECTED_VERSION", expected=mode.expected)
    if mode.insert and dedup:
        raise Refused("AUDIT_ORDER.DEDUP")
    if mode.upserts and not mode.insert and mode.version is None:
        raise Refused("AUDIT_ORDER.ARRIVAL", keys_text=mode.keys_text)
