"""Reconcile in memory: the definition of lost, duplicated, altered, unexpected and reordered.

The Spark job in `delivered.audit.spark.reconcile` does the same with aggregations, `delivered.audit.local`
by sorting; tests compare them.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from delivered.audit.evidence import ROW_BITS, Counts
from delivered.audit.local import Side
from delivered.model.fingerprint import record_hashes


@dataclass(frozen=True)
class Seen:
    """One record as seen on one side.

    Attributes:
        id: identifies the record; several may share one and then differ in value.
        value: represents the whole record: equal values, equal records.
        key: records of one key are ordered; None: this record has no order.
        partition: of the source or the sink; records are ordered within it.
        position: in the partition.
        in_progress: sent in a batch that is not decided yet: it may or may not be in the sink.
    """

    id: Hashable
    value: Hashable
    key: Hashable | None = None
    partition: Hashable = 0
    position: int = 0
    in_progress: bool = False


def classify(
    sent: Mapping[Hashable, int],
    ahead: Mapping[Hashable, int],
    found: Mapping[Hashable, int],
    sealed: Collection[Hashable] = (),
) -> Counts:
    """What happened to the records of one id.

    Args:
        sent: value -> copies that must be in the sink.
        ahead: value -> copies that may be in the sink: sent in a batch that is not decided yet.
        found: value -> copies in the sink.
        sealed: values that an earlier audit has found in the sink.

    A missing value is paired with a foreign one (it was altered), never with a second copy of another record of the
    id: a duplicate and a loss are two findings, even if the counts cancel.
    """
    missing = known = foreign = in_progress = 0
    for value in {*sent, *ahead, *found}:
        must, may, is_there = sent.get(value, 0), ahead.get(value, 0), found.get(value, 0)
        missing += max(must - is_there, 0)
        in_progress += min(max(is_there - must, 0), may)
        surplus = max(is_there - must - may, 0)
        if must + may or value in sealed:
            known += surplus
        else:
            foreign += surplus
    altered = min(missing, foreign)
    rest = foreign - altered
    anybody_sent_it = any(sent.values()) or any(ahead.values()) or bool(sealed)
    return Counts(
        sent=sum(sent.values()),
        delivered=sum(found.values()),
        lost=missing - altered,
        duplicated=known + (rest if anybody_sent_it else 0),
        altered=altered,
        unexpected=0 if anybody_sent_it else rest,
        in_progress=in_progress,
    )


def reconcile(sent: Iterable[Seen], found: Iterable[Seen]) -> dict[Hashable, Counts]:
    """Classify every id, in memory: for tests and small sets."""
    must: dict[Hashable, Counter[Hashable]] = defaultdict(Counter)
    may: dict[Hashable, Counter[Hashable]] = defaultdict(Counter)
    there: dict[Hashable, Counter[Hashable]] = defaultdict(Counter)
    first_sent: dict[Hashable, Seen] = {}
    first_found: dict[Hashable, Seen] = {}
    for s in sent:
        (may if s.in_progress else must)[s.id][s.value] += 1
        _keep_first(first_sent, s)
    for f in found:
        there[f.id][f.value] += 1
        _keep_first(first_found, f)
    late = _reordered(first_sent, first_found)
    ids = {*must, *may, *there}
    return {i: classify(must[i], may[i], there[i]) + Counts(reordered=int(i in late)) for i in ids}


def _keep_first(first: dict[Hashable, Seen], seen: Seen) -> None:
    before = first.get(seen.id)
    if before is None or (seen.partition, seen.position) < (before.partition, before.position):
        first[seen.id] = seen


def _reordered(first_sent: Mapping[Hashable, Seen], first_found: Mapping[Hashable, Seen]) -> set[Hashable]:
    """Ids whose first copy in the sink comes after that of an id of the same key that was sent later.

    Compared within one key, one source partition and one sink partition: there is no order across partitions.
    """
    groups: dict[Hashable, list[tuple[int, int, Hashable]]] = defaultdict(list)
    for i, there in first_found.items():
        origin = first_sent.get(i)
        if origin is not None and origin.key is not None:
            groups[(origin.key, origin.partition, there.partition)].append((there.position, origin.position, i))
    late: set[Hashable] = set()
    for group in groups.values():
        newest = -1
        for _, position, i in sorted(group, key=lambda entry: entry[:2]):
            if position < newest:
                late.add(i)
            newest = max(newest, position)
    return late


def histories(rng: random.Random, count: int) -> tuple[list[Seen], list[Seen]]:
    """Random small histories, one after the other: what was sent, and what is in the sink."""
    sent: list[Seen] = []
    found: list[Seen] = []
    for case in range(count):
        mine = [
            Seen(
                f"{case}-{rng.randrange(5)}",
                rng.randrange(3),
                None,
                _somewhere(rng),
                100 * case + n,
                rng.random() < 0.1,
            )
            for n in range(rng.randrange(7))
        ]
        # One key per id, null for some; now and then, a copy has another.
        mine = [
            Seen(
                s.id,
                s.value,
                None if str(s.id).endswith("4") else case + 10_000 if rng.random() < 0.1 else case,
                s.partition,
                s.position,
                s.in_progress,
            )
            for s in mine
        ]
        there = [s for s in mine if rng.random() < 0.85]
        there += [s for s in mine if rng.random() < 0.15]
        there = [Seen(s.id, 9) if rng.random() < 0.1 else s for s in there]
        there += [Seen(f"{case}-{rng.randrange(8)}", rng.randrange(5)) for _ in range(rng.randrange(2))]
        if rng.random() < 0.3:
            rng.shuffle(there)
        sent += mine
        found += [Seen(s.id, s.value, s.key, _somewhere(rng), 100 * case + n) for n, s in enumerate(there)]
    return sent, found


def _somewhere(rng: random.Random) -> str:
    return "0" if rng.random() < 0.9 else "1"


def as_sides(sent: Iterable[Seen], found: Iterable[Seen]) -> tuple[Side, Side, Side]:
    """What must be in the sink, what may be, and what is, with partitions "0" and "1" in slots 0 and 1."""
    sent = list(sent)
    return _side([s for s in sent if not s.in_progress]), _side([s for s in sent if s.in_progress]), _side(list(found))


def _side(records: list[Seen]) -> Side:
    ids = [str(r.id) for r in records]
    named = pa.RecordBatch.from_arrays([pa.array(ids, pa.string())], names=["id"])
    low = np.array([r.value for r in records], np.uint64)
    return Side(
        low,
        high=low,
        other=low,
        named=record_hashes(named, 1),
        other_named=record_hashes(named, 2),
        key=np.array([r.key or 0 for r in records], np.uint64),
        keyed=np.array([r.key is not None for r in records], bool),
        at=np.array([(int(str(r.partition)) << ROW_BITS) + r.position for r in records], np.int64),
        names=pa.array(ids, pa.large_string()),
        shown=pa.array([f"key {r.key}" for r in records], pa.large_string()),
    )
