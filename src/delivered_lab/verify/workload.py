"""A workload: records of a source, what they must become, and the pipeline set-up it needs."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PARTITIONS = 4
TABLE = "DELIVERED_VERIFY_TABLE"
"""Environment variable with the folder of a workload's static table."""


@dataclass(frozen=True)
class Record:
    """One record of a source.

    Attributes:
        id: unique, unless the workload sends a record twice on purpose.
        number: its position in the sequence of its key, from 0.
        filler: characters of payload beyond the header; raw: the whole value, in place of a generated one.
    """

    id: str
    key: str | None
    number: int
    partition: int
    filler: int = 0
    raw: str | None = None

    @property
    def value(self) -> str:
        if self.raw is not None:
            return self.raw
        # The payload derives from the id, so a record altered on its way is a different effect.
        pad = hashlib.blake2b(self.id.encode(), digest_size=16).hexdigest() * (self.filler // 32 + 1)
        return json.dumps({"id": self.id, "k": self.key, "n": self.number, "pad": pad[: self.filler]})


@dataclass(frozen=True)
class Effect:
    """What the sink must hold because of a record.

    Attributes:
        id: the record's, with a suffix if the record has several effects, and a digest of the content.
    """

    id: str
    key: str | None
    number: int | None


@dataclass(frozen=True)
class Workload:
    """
    Attributes:
        make: (random, count) -> records, in send order.
        effects: value of a source record -> values that the sink must hold for it.
        together: values of all source records -> values that the sink must hold, where an effect has many causes.
        sql: the transform, over the view `source`; arrow, python: the same as "module:function"; all None: none.
        kinds: SQL types of key and value in the output.
        ordered: effects of one key must appear in the order of their numbers.
        topics: of source and sink; more than one needs a source with topics.
        faults: those that are tried with it, besides those that name it.
        teller: (key, value) of the sink -> effect; None: from the value, as `Record.value` made it.
        sink: more options of the sink in the pipeline file.
        oracle: values of all source records -> value by key of the rows that the sink must hold; None: rows have no
            identifying keys. accepts: (wanted, found) -> whether a value is as good; None: none is.
        output_mode: of the query. For "update" an oracle answers for any prefix of the batches.
        spark: configuration of the pipeline's session.
        table: (folder, number of the start): writes the static table for this start.
        sinks: those that it runs with; empty: all.
    """

    name: str
    text: str
    make: Callable[[random.Random, int], Iterator[Record]]
    effects: Callable[[str], list[str]] = lambda value: [value]
    sql: str | None = None
    arrow: str | None = None
    python: str | None = None
    together: Callable[[Sequence[str]], list[str]] | None = None
    kinds: tuple[str, str] = ("bytea", "bytea")
    ordered: bool = True
    rows_per_batch: int | None = None
    records: int = 1_200
    topics: int = 1
    faults: tuple[str, ...] = ("none", "killed-twice")
    deterministic: bool = True
    teller: Callable[[str | None, str], Effect] | None = None
    sink: Mapping[str, str] = field(default_factory=dict)
    oracle: Callable[[Sequence[str]], dict[str, str]] | None = None
    accepts: Callable[[str, str], bool] | None = None
    output_mode: str = "append"
    spark: Mapping[str, str] = field(default_factory=dict)
    table: Callable[[Path, int], None] | None = None
    sinks: tuple[str, ...] = ()

    @property
    def replaces(self) -> bool:
        """A row replaces the one with its key, so the sink holds the newest of each."""
        return self.sink.get("mode") == "upsert"

    @property
    def needs_spark(self) -> bool:
        return self.sql is not None or self.python is not None

    def effect_of(self, key: str | None, value: str) -> Effect:
        """The effect that a row in the sink stands for."""
        if self.oracle is not None:
            return Effect(f"{key} = {value}", key, None)
        return self.teller(key, value) if self.teller is not None else effect_of(value, self.deterministic)

    def sink_options(self, upserts: bool) -> dict[str, str]:
        """
        Args:
            upserts: the sink can replace the row with the same key.
        """
        by_key = {"mode": "upsert", "keyColumns": "key"} if self.output_mode == "update" and upserts else {}
        return {**by_key, **self.sink}


def effect_of(value: str, deterministic: bool = True) -> Effect:
    """Parse an effect from a value in the sink; an unreadable one is an effect that was never sent."""
    digest = hashlib.blake2b(value.encode(), digest_size=6).hexdigest() if deterministic else "-"
    try:
        head, _, tail = value.partition("}")
        data = json.loads(head + "}")
        part = tail if deterministic else ""
        return Effect(f"{data['id']}{part}:{digest}", str(data["k"]), int(data["n"]))
    except (ValueError, KeyError, TypeError):
        return Effect(f"unreadable:{digest}", None, None)


def source_id(value: str) -> str:
    """The id of a record as found in the source."""
    try:
        return str(json.loads(value)["id"])
    except (ValueError, KeyError, TypeError):
        return f"unreadable:{hashlib.blake2b(value.encode(), digest_size=6).hexdigest()}"
