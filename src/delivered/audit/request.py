"""The parameters of an audit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from delivered.audit.recompute import Recompute
from delivered.contract.sink import Sink
from delivered.contract.source import Offsets, Source
from delivered.engine.sinks import Sinks
from delivered.model.dedup import Dedup
from delivered.model.errors import UsageError
from delivered.model.guarantee import Guarantee

SAMPLES_MAX = 20

Transform = Callable[[Mapping[str, Any]], Any]
"""From a Spark DataFrame per source, by name, to another DataFrame."""


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
            None: the whole record does, and an altered record shows as one lost and one unexpected.
        key: SQL over the sink's columns; order is judged within a key. None: the column `key`, if there is one.
        own: SQL over the sink's columns, true for this pipeline's records; the others are foreign. None: not declared.
        samples_max: damaged records listed, per class.
        sink_from: read the sink from here on, if it holds records of others or of earlier checkpoints.
        transform_version: fingerprint of `transform`; batches that ran with another one are not recomputed. Empty:
            every batch is assumed to have run with it.
        dead_letters: name of the sink that gets dead letters; rows that this sink refuses are not expected here then.
        recompute: compare with the transform over the whole range as one batch; None: account for every record.
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
    transform_version: str = ""
    recompute: Recompute | None = None

    @property
    def named_sink(self) -> str:
        return self.sink_name or self.sink.name


class BadExpression(UsageError):
    """The id, the key or the condition `own` is not SQL over the sink's columns."""
