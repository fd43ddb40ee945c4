"""What a workload is: records of a source, what they must become, and how the pipeline has to be set up for it."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PARTITIONS = 4
TABLE = "DELIVERED_VERIFY_TABLE"
"""The variable of the environment that names the folder of a workload's static table."""


@dataclass(frozen=True)
class Record:
    """One record of a source.

    Attributes:
        id: unique, unless the workload sends a record twice on purpose.
        number: its place in the sequence of its key, from 0.
        filler: characters of payload beyond the header; raw: the whole value, in place of a made one.
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
        # The payload is made from the id, so that a record that changed on its way is another effect.
        pad = hashlib.blake2b(self.id.encode(), digest_size=16).hexdigest() * (self.filler // 32 + 1)
        return json.dumps({"id": self.id, "k": self.key, "n": self.number, "pad": pad[: self.filler]})


@dataclass(frozen=True)
class Effect:
    """What the sink must hold because of a record.

    Attributes:
        id: of the record, with a suffix where a record has several effects, and a digest of what it says.
    """

    id: str
    key: str | None
    number: int | None


@dataclass(frozen=True)
class Workload:
    """
    Attributes:
        make: (random, how many) -> records, in the order of sending.
        effects: value of a source record -> values that the sink must hold for it.
        together: values of all source records -> values that the sink must hold, where an effect has many causes.
        sql: the transform, over the view `source`; arrow, python: the same as "module:function"; all None: none.
        kinds: SQL types of the key and the value that come out.
        ordered: effects of one key must appear in the order of their numbers.
        topics: of source and sink; more than one wants a source with topics.
        faults: those that are tried with it, besides what needs it by name.
        teller: (key, value) of the sink -> effect; None: the value says it, as `Record.value` made it.
        sink: more options of the sink in the pipeline file.
        oracle: values of all source records -> value by key of the rows that the sink must hold; None: rows have no
            keys that tell them apart. accepts: (wanted, found) -> whether a value is as good; None: none is.
        output_mode: of the query. Of "update" an oracle speaks of any stretch of batches from the first one on.
        spark: configuration of the pipeline's session.
        table: (folder, number of the start): what a static table holds in this start.
        sinks: that it is run with; empty: all.
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
        """A row takes the place of the one with its key, so the sink holds the newest of each."""
        return self.sink.get("mode") == "upsert"

    @property
    def needs_spark(self) -> bool:
        return self.sql is not None or self.python is not None

    def effect_of(self, key: str | None, value: str) -> Effect:
        """What a row in the sink says of itself."""
        if self.oracle is not None:
            return Effect(f"{key} = {value}", key, None)
        return self.teller(key, value) if self.teller is not None else effect_of(value, self.deterministic)

    def sink_options(self, upserts: bool) -> dict[str, str]:
        """
        Args:
            upserts: the sink can put a row into the place of the one with its key.
        """
        by_key = {"mode": "upsert", "keyColumns": "key"} if self.output_mode == "update" and upserts else {}
        return {**by_key, **self.sink}


def effect_of(value: str, deterministic: bool = True) -> Effect:
    """Read an effect off a value in the sink; whatever cannot be read is an effect that nobody sent."""
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
