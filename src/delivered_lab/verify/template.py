"""A user's own pipeline, to be broken on purpose: its transform, guarantee and options, between the verifier's own
source and sink. Nothing of the user's is written to; a few records of the source are read.

The expected output is that of an undisturbed run, so the transform must give the same rows each time.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from delivered import Guarantee, UsageError
from delivered.testing import definition, first_records
from delivered_lab.verify.systems import POSTGRES_2PC, SINK_KINDS
from delivered_lab.verify.systems.base import as_text
from delivered_lab.verify.workloads import PARTITIONS, Effect, Record, Workload

SAMPLE_MAX = 600
_SOURCES = ("kafka", "log")
_SINKS = tuple(dict.fromkeys(k.format for k in SINK_KINDS.values() if k.own))
_REPLACED = {
    "assign", "subscribepattern", "subscribe", "path", "topic", "table", "startingoffsets", "startingtimestamp",
    "startingoffsetsbytimestamp", "maxoffsetspertrigger", "commitoffsetstogroup", "ledgertopic", "url", "dbtable",
    "user", "password", "ifnotexists", "fileformat", "partitionby",
}  # fmt: skip
"""Options that say where and how much; all others are kept."""


@dataclass
class Template:
    """
    Attributes:
        data: the pipeline as its file has it.
        folder: of the file; modules of its transform may lie there.
        sample: records of its source.
        reference: effects of an undisturbed run; None: not run yet.
    """

    data: dict[str, Any]
    folder: Path
    sample: list[Record]
    reference: Counter[str] | None = None
    workload: Workload = field(init=False)

    def __post_init__(self) -> None:
        self.workload = Workload(
            name="own",
            text="records of your own source",
            make=lambda _random, _count: iter(self.sample),
            ordered=False,
            records=len(self.sample),
            effect_reader=row_effect,
        )

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee.parse(self.data["guarantee"])

    @property
    def source(self) -> str:
        return _system(self.data["source"])

    @property
    def sink(self) -> str:
        """The verifier's name of the sink, which includes the mechanism."""
        sink = self.data["sinks"][0]
        two_phase = (_option(sink, "mechanism") or "").lower() == "two_phase"
        return POSTGRES_2PC if two_phase else _system(sink)

    @property
    def needs_spark(self) -> bool:
        transform = self.data.get("transform") or {}
        return "sql" in transform or "python" in transform

    def filled(self, source: Mapping[str, Any], sink: Mapping[str, Any]) -> dict[str, Any]:
        """The pipeline with another source and sink of the same formats; other options stay."""
        data = copy.deepcopy(self.data)
        for place, new in ((data["source"], source), (data["sinks"][0], sink)):
            ours = {k.lower() for k in new} | _REPLACED
            kept = {k: v for k, v in place.items() if k.lower() not in ours}
            # The verifier's broker has no secrets or certificates.
            secret = ("kafka.security", "kafka.s", "storage.")
            kept = {k: v for k, v in kept.items() if not k.lower().startswith(secret)}
            place.clear()
            place.update(kept | dict(new))
        return data


def load(path: Path) -> Template:
    """Read a pipeline file and a few records of its source.

    Raises:
        UsageError: the file is not a pipeline, its formats cannot be verified yet, or its source has no records.
    """
    data = definition(path)
    source, sinks = data["source"], data["sinks"]
    for what, system, known in (("source", _system(source), _SOURCES), ("sink", _system(sinks[0]), _SINKS)):
        if system not in known:
            raise UsageError("VERIFY_FORMAT", what=what, system=system, known=" or ".join(known))
    if len(sinks) != 1:
        raise UsageError("VERIFY_SINKS", sink_count=len(sinks))
    sample = [
        Record(f"own{number}", as_text(key), number, number % PARTITIONS, raw=as_text(value) or "")
        for number, (key, value) in enumerate(first_records(path, SAMPLE_MAX))
    ]
    if not sample:
        raise UsageError("VERIFY_NO_RECORDS", pipeline=data["pipeline"])
    return Template(data, path.parent.resolve(), sample)


def row_effect(key: str | None, value: str) -> Effect:
    """The effect is the content of a row."""
    digest = hashlib.blake2b(json.dumps([key, value]).encode(), digest_size=10).hexdigest()
    return Effect(digest, key, None)


def _system(endpoint: Mapping[str, Any]) -> str:
    return str(endpoint["format"]).removeprefix("delivered_")


def _option(endpoint: Mapping[str, Any], name: str) -> str | None:
    return next((str(v) for k, v in endpoint.items() if k.lower() == name), None)
