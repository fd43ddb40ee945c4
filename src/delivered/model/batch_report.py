"""What a batch took, step by step, for those who operate a pipeline. Proves nothing: a crash may leave none behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

STEPS = ("plan", "stage", "prepare", "decide", "apply")
"""Of a batch, in order. `stage` includes reading the source and the transform."""


@dataclass(frozen=True)
class BatchReport:
    """
    Attributes:
        decided_at_ms: since 1970.
        records: delivered by this batch, by sink.
        rewritten: shards whose prepared rows were gone when the decided batch was finished.
        seconds: by step; of `stage` and `prepare`, the slowest task's.
        bytes: of the rows written by this batch, in memory, at all sinks.
    """

    batch: int
    decided_at_ms: int
    records: Mapping[str, int]
    shards: int
    rewritten: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": {step: round(s, 4) for step, s in self.seconds.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})
