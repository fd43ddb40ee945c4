"""Classify the records of both sides in this process, by sorting hashes: what `audit.spark.reconcile` does in Spark,
for ranges that fit in memory. Tests hold both to the definition in `tests/support/reconcile.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from delivered.audit.evidence import SHOWN_LENGTH, Counts, Damage, PartitionLine, Sample
from delivered.audit.judge import Result
from delivered.audit.places import ROW_BITS, Places
from delivered.model.fingerprint import U64, Fingerprint

I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_NOWHERE = np.int64((1 << 63) - 1)


@dataclass(frozen=True)
class Side:
    """Records of one side, one element each.

    Attributes:
        low, high: both lanes of the hash of its value.
        other: a second, independent hash of its value.
        at: its slot and row.
        named, other_named: two independent hashes of its id; None: its value identifies it.
        names: its id as text; null: it has none, and is identified by its value.
        key: hash of its key; None: no order is judged.
        keyed: whether it has one.
        shown: its key, for the report.
        position: what locates it for users; None: its row does.
    """

    low: U64
    high: U64
    other: U64
    at: I64
    named: U64 | None = None
    other_named: U64 | None = None
    names: pa.Array | None = None
    key: U64 | None = None
    keyed: Flags | None = None
    shown: pa.Array | None = None
    position: I64 | None = None

    def __len__(self) -> int:
        return len(self.at)

    @property
    def id(self) -> U64:
        return self.low if self.named is None else self.named

    @property
    def other_id(self) -> U64:
        return self.other if self.other_named is None else self.other_named

    @property
    def slots(self) -> I64:
        return self.at >> ROW_BITS

    def where(self, wanted: Flags) -> Side:
        """Some of the records."""
        return Side(*(_filtered(v, wanted) for v in self._columns))

    def unordered(self) -> Side:
        """The records, with an order that is not judged."""
        return self if self.keyed is None else replace(self, keyed=np.zeros_like(self.keyed))

    @property
    def _columns(self) -> list[Any]:
        return [getattr(self, f.name) for f in fields(self)]

    def shares_id(self, others: Side) -> Flags:
        """Whether there is a record of the same id among others."""
        both, theirs = (_mixed(s.id, s.other_id) for s in (self, others))
        shares: Flags = np.isin(self.id, others.id) & np.isin(both, theirs)
        return shares

    def at_most(self, others: Side) -> Flags:
        """The first ones of each id and value: as many as there are of it among others."""
        own, theirs = (_mixed(_mixed(s.id, s.other_id), s.low) for s in (self, others))
        values, copies = np.unique(theirs, return_counts=True)
        if not len(values):
            return np.zeros(len(self), bool)
        order = np.lexsort((self.at, own))
        starts = np.flatnonzero(_changes(own[order]))
        nth = np.arange(len(own)) - np.repeat(starts, np.diff(np.append(starts, len(own))))
        found = np.minimum(np.searchsorted(values, own[order]), len(values) - 1)
        chosen = np.zeros(len(self), bool)
        chosen[order] = (values[found] == own[order]) & (nth < copies[found])
        return chosen


def joined(sides: Sequence[Side]) -> Side:
    """All records, one side after the other; sides of the same columns."""
    columns = zip(*(side._columns for side in sides), strict=True)
    return Side(*map(_concatenated, columns))


def _concatenated(parts: Sequence[Any]) -> Any:
    if parts[0] is None:
        return None
    return pa.concat_arrays(parts) if isinstance(parts[0], pa.Array) else np.concatenate(parts)


def _filtered(values: Any, wanted: Flags) -> Any:
    if values is None:
        return None
    return values.filter(pa.array(wanted)) if isinstance(values, pa.Array) else values[wanted]


def _mixed(one: U64, other: U64) -> U64:
    """Both hashes in one."""
    with np.errstate(over="ignore"):
        return one * np.uint64(0x9E3779B97F4A7C15) + other


def reconcile(
    sent: Side,
    ahead: Side | None,
    stored: Side,
    origins: Places,
    places: Places,
    samples_max: int = 20,
    sealed: Side | None = None,
) -> Result:
    """Classify every record.

    Args:
        sent: what must be in the sink.
        ahead: what may be in the sink: rows of started, undecided batches.
        stored: what is in the sink.
        origins: slots of `sent` and `ahead`.
        places: slots of `stored`.
        samples_max: damaged records collected per class.
        sealed: what was found in the sink by earlier audits: copies that were found now are duplicates.
    """
    sides = [sent, ahead or _none_of(sent), sealed or _none_of(sent), stored]
    if not sum(map(len, sides)):
        return Result(Counts())
    ids = _Ids(sides)
    with np.errstate(over="ignore"):
        classes = _classify(ids, origins, places)
        lines = _lines(ids, classes, origins)
    null_ids = sum(side.names.null_count for side in sides if side.names is not None)
    return Result.of_lines(lines, _samples(ids, classes, sides, origins, places, samples_max), null_ids)


def _none_of(side: Side) -> Side:
    return side.where(np.zeros(len(side), bool))


class _Ids:
    """All rows, sorted by id and value; and where in them each value and each id starts.

    Attributes:
        rows: indices of the sorted rows, in the sides one after the other.
        must, may, sealed, there: whether a sorted row is of that side.
        low, high: of the sorted rows.
        values: where a value starts.
        starts: where an id starts.
        value_starts: as `starts`, in `values`.
        origin, place: of each id's first row that was sent, and that is in the sink; `_NOWHERE`: none.
        key, keyed: of each id's first row that was sent; None: no order is judged.
        copies: of each value, those that must be in the sink, and those of decided batches that are.
    """

    copies: dict[str, I64]
    key: U64 | None = None
    keyed: Flags | None = None

    def __init__(self, sides: Sequence[Side]) -> None:
        def all_of(name: str) -> Any:
            return np.concatenate([getattr(side, name) for side in sides])

        self.rows, new_id, new_value = _sorted(*map(all_of, ("id", "other_id", "low")))
        self.low, self.high = (all_of(lane)[self.rows] for lane in ("low", "high"))
        number = np.repeat(np.arange(len(sides), dtype=np.int8), [len(s) for s in sides])[self.rows]
        self.must, self.may, self.sealed, self.there = (number == n for n in range(4))
        self.values, self.starts = np.flatnonzero(new_value), np.flatnonzero(new_id)
        self.value_starts = np.flatnonzero(new_id[self.values])
        at = all_of("at")[self.rows]
        self.place = np.minimum.reduceat(np.where(self.there, at, _NOWHERE), self.starts)
        at[self.there] = _NOWHERE
        self.origin = np.minimum.reduceat(at, self.starts)
        if sides[0].key is not None:
            # Of copies with other keys, the first one's counts.
            sizes = np.diff(np.append(self.starts, len(self.rows)))
            first = np.flatnonzero((at == np.repeat(self.origin, sizes)) & ~self.there)
            ids = np.searchsorted(self.starts, first, side="right") - 1
            self.key, self.keyed = np.zeros(len(self), np.uint64), np.zeros(len(self), bool)
            self.key[ids], self.keyed[ids] = (all_of(n)[self.rows[first]] for n in ("key", "keyed"))

    def __len__(self) -> int:
        return len(self.starts)

    def rows_of(self, one: int) -> npt.NDArray[np.intp]:
        """The rows of an id, in the sides one after the other."""
        end = self.starts[one + 1] if one + 1 < len(self) else len(self.rows)
        return self.rows[self.starts[one] : end]


def _sorted(ids: U64, others: U64, low: U64) -> tuple[npt.NDArray[np.intp], Flags, Flags]:
    """Indices in the order of all three; whether an id starts there; whether a value does."""

    def starts(rows: npt.NDArray[np.intp]) -> tuple[Flags, Flags]:
        new_id = _changes(ids[rows]) | _changes(others[rows])
        return new_id, new_id | _changes(low[rows])

    rows = np.argsort(ids)
    new_id, new_value = starts(rows)
    if np.count_nonzero(new_value) != np.count_nonzero(_changes(ids[rows])):
        # The first hash alone does not distinguish ids or values.
        rows = np.lexsort((low, others, ids))
        new_id, new_value = starts(rows)
    return rows, new_id, new_value


def _changes(values: U64 | I64) -> Flags:
    """Whether each differs from the one before it."""
    changes = np.ones(len(values), bool)
    changes[1:] = values[1:] != values[:-1]
    return changes


def _classify(ids: _Ids, origins: Places, places: Places) -> dict[str, I64]:
    """For each id, how many of its records are in each class."""
    must, may, sealed, there = (
        np.add.reduceat(rows, ids.values, dtype=np.int64) for rows in (ids.must, ids.may, ids.sealed, ids.there)
    )
    surplus = np.maximum(there - must - may, 0)
    in_progress = np.minimum(np.maximum(there - must, 0), may)
    was_sent = must + may + sealed > 0

    def by_id(values: I64) -> I64:
        summed: I64 = np.add.reduceat(values, ids.value_starts)
        return summed

    missing = by_id(np.maximum(must - there, 0))
    known = by_id(np.where(was_sent, surplus, 0))
    foreign = by_id(np.where(was_sent, 0, there))
    altered = np.minimum(missing, foreign)
    rest = foreign - altered
    sent, ahead = by_id(must), by_id(may)
    known_id = sent + ahead + by_id(sealed) > 0
    ids.copies = {"must": must, "there": there - in_progress}
    return {
        "must": sent,
        "may": ahead,
        "there": by_id(there),
        "in_progress": by_id(in_progress),
        Damage.LOST: missing - altered,
        Damage.DUPLICATED: known + np.where(known_id, rest, 0),
        Damage.ALTERED: altered,
        Damage.UNEXPECTED: np.where(known_id, 0, rest),
        Damage.REORDERED: _late(ids, origins, places),
    }


def _late(ids: _Ids, origins: Places, places: Places) -> I64:
    """1 for each id whose first copy in the sink comes after that of one of the same key that was sent later."""
    late = np.zeros(len(ids), np.int64)
    if ids.key is None or ids.keyed is None:
        return late
    compared = np.flatnonzero(ids.keyed & (ids.origin != _NOWHERE) & (ids.place != _NOWHERE))
    if not len(compared):
        return late
    key, origin, place = ids.key[compared], ids.origin[compared], ids.place[compared]
    source = np.asarray(origins.partitions(), np.int64)[origin >> ROW_BITS]
    target = np.asarray(places.partitions(), np.int64)[place >> ROW_BITS]
    order = np.lexsort((origin, place, target, source, key))
    key, source, target, origin = key[order], source[order], target[order], origin[order]
    starts = _changes(key) | _changes(source) | _changes(target)
    # One running maximum over all groups: each group's ranks are above those of the groups before it.
    rank = np.empty(len(order), np.int64)
    rank[np.argsort(origin)] = np.arange(len(order))
    rank += (np.cumsum(starts) - 1) * len(order)
    newest = np.maximum.accumulate(rank)
    late[compared[order[1:][newest[:-1] > rank[1:]]]] = 1
    return late


def _lines(ids: _Ids, classes: dict[str, I64], origins: Places) -> list[PartitionLine]:
    """By slot of the source. Ids that were never sent are in a line of their own."""
    slots = np.where(ids.origin == _NOWHERE, len(origins), ids.origin >> ROW_BITS).astype(np.intp)

    def by_slot(values: npt.NDArray[Any]) -> list[int]:
        summed = np.zeros(len(origins) + 1, values.dtype)
        np.add.at(summed, slots, values)
        return [int(v) for v in summed]

    def by_value(values: npt.NDArray[Any]) -> list[int]:
        return by_slot(np.add.reduceat(values, ids.value_starts))

    sums = {name: by_slot(values) for name, values in classes.items()}
    lanes = [lane[ids.values] for lane in (ids.low, ids.high)]
    prints = [
        [by_value(copies), *(by_value(copies.astype(np.uint64) * lane) for lane in lanes)]
        for copies in ids.copies.values()
    ]
    lines = []
    for slot in np.unique(slots).tolist():
        counts = Counts(
            sent=sums["must"][slot],
            delivered=sums["there"][slot],
            in_progress=sums["in_progress"][slot],
            **{d.value: sums[d][slot] for d in Damage},
        )
        both = [Fingerprint(*(part[slot] for part in parts)) for parts in prints]
        lines.append(PartitionLine(origins.name(slot if slot < len(origins) else None), counts, *both))
    return lines


def _samples(
    ids: _Ids, classes: dict[str, I64], sides: Sequence[Side], origins: Places, places: Places, samples_max: int
) -> list[Sample]:
    """Damaged records with their readable key and their position in the sink."""
    ends = np.cumsum([len(s) for s in sides])
    samples = []

    def known(at: np.int64) -> int | None:
        return None if at == _NOWHERE else int(at)

    def text(rows: npt.NDArray[np.intp]) -> str:
        number = int(np.searchsorted(ends, rows[0], side="right"))
        side, row = sides[number], int(rows[0]) - (int(ends[number - 1]) if number else 0)
        name = side.names[row].as_py() if side.names is not None else None
        return f"{int(side.low[row]):016x}{int(side.other[row]):016x}" if name is None else _decoded(name)

    for damage in Damage:
        found = np.flatnonzero(classes[damage])
        order = np.lexsort((ids.place[found], ids.origin[found]))
        for one in found[order[:samples_max]].tolist():
            rows = ids.rows_of(one)
            is_there = bool(classes["there"][one])
            own = rows[rows >= ends[-2]] - ends[-2] if is_there else rows[rows < ends[0]]
            side = sides[-1 if is_there else 0]
            position = None
            if is_there and side.position is not None:
                position = int(side.position[own[np.argmin(side.at[own])]])
            shown = side.shown.take(pa.array(own)).to_pylist() if side.shown is not None else []
            keys = [_decoded(v)[:SHOWN_LENGTH] for v in shown if v is not None]
            samples.append(
                Sample(
                    damage,
                    text(rows),
                    min(keys, default=None),
                    origins.shown(known(ids.origin[one])),
                    places.shown(known(ids.place[one]), position),
                    int(classes["must"][one] + classes["may"][one]),
                    int(classes["there"][one]),
                )
            )
    return samples


def _decoded(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
