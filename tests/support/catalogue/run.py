"""Runs values through a sink as Spark does, and says of each what became of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from tests.support.catalogue.values import BY_NAME, Kind, canonical
from tests.support.memory import CONNECTOR as MEMORY
from tests.support.memory.world import make_world, world
from tests.support.reconcile import Seen, reconcile
from tests.support.scans import scanned
from tests.support.sinks import Rig

from delivered.audit.evidence import Counts, Fingerprints, Verdict
from delivered.audit.report import AuditReport
from delivered.contract.sink import Sink
from delivered.engine import Sinks
from delivered.engine.decide import commit_batch
from delivered.engine.shard import fingerprint_seed, write_shard
from delivered.model.capability import Guarantee
from delivered.model.errors import Refused, UsageError
from delivered.model.fingerprint import Fingerprint, fingerprint, record_hashes
from delivered.model.identity import Scope
from delivered.model.rows import OnBadRow, Rows

EXACT = "exact"
BAD_ROW = "refused as bad row"
AT_START = "refused at start"
OUTCOMES = (EXACT, BAD_ROW, AT_START)
_count = itertools.count()

Cells = dict[str, dict[str, str]]
"""Type -> label of a value -> its outcome; anything else than `OUTCOMES` is a fault, in words."""
Row = Mapping[str, Any]
Read = Callable[[pa.Schema], Sequence[Row]]
"""Rows by the system's own client, as `values.canonical` has values; given the columns that were written."""


@dataclass(frozen=True)
class Path:
    """One way into a system.

    Attributes:
        make: (columns, name of the target, by default a new one) -> a sink on a fresh target, and how to read it.
        rows: (ids, values of one type) as this path's rows; None: they go into columns of their own, one per type.
        column: of the values in the rows of `read`; empty: those of their types.
        named: in the reason of a bad row; empty: the column.
        guarantee: the strongest one that the path gives.
        nothing: what null becomes, by the system's documentation.
        twice: whether a second batch with the same rows must change nothing.
    """

    make: Callable[..., tuple[Sink, Read]]
    rows: Callable[[pa.Array, pa.Array], pa.RecordBatch] | None = None
    column: str = ""
    named: str = ""
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE
    nothing: Any = None
    twice: bool = False


Place = tuple[Kind, str]


class Fault(Exception):
    """What happened is none of the three outcomes."""


def cells(path: Path, kinds: Sequence[Kind]) -> Cells:
    """The outcome of each value of these types."""
    found: dict[Place, str] = {}
    rest = [[(kind, label) for label in kind.values] for kind in kinds]
    if path.rows is None:
        rest = _together(path, rest)
    while rest:
        part = rest.pop()
        try:
            found |= zip(part, _outcomes(path, part), strict=True)
        except Exception as error:
            if len(part) == 1:
                found[part[0]] = shown(error)
            else:
                rest += [part[len(part) // 2 :], part[: len(part) // 2]]
    return {kind.name: {label: found[kind, label] for label in kind.values} for kind in kinds}


def _together(path: Path, parts: list[list[Place]]) -> list[list[Place]]:
    """All types in one batch, but those that are refused by their schema alone, or cannot have a value."""
    alone, others = [], []
    for part in parts:
        schema = _in_columns(part[:1], pa.array([0], pa.int64())).schema
        try:
            path.make(schema)[0].check_schema(schema)
        except UsageError:
            alone.append(part)
        else:
            (alone if pa.types.is_null(part[0][0].arrow) else others).append(part)
    together = [place for part in others for place in part]
    return [together, *alone] if together else alone


def name_cells(path: Path, columns: Sequence[Kind], tables: Mapping[str, str]) -> Cells:
    """The outcome of each name: of a column, and of a target."""
    found = cells(path, columns)
    for label, name in tables.items():
        try:
            [found[label]["as target"]] = _outcomes(path, [(BY_NAME["long"], "-1")], name)
        except Exception as error:
            found[label]["as target"] = shown(error)
    return found


def shown(error: BaseException) -> str:
    text = str(error) if isinstance(error, Fault) else f"{type(error).__name__}: {error}"
    return " ".join(text.encode("utf-8", "backslashreplace").decode().split())[:300]


def refused_at_start(sink: Sink, schema: pa.Schema, guarantee: Guarantee) -> bool:
    """As `start()` and the first batch ask, in this order."""
    try:
        sink.check_schema(schema)
        sink.check_rows(schema)
        if any(f.refuses for f in sink.preflight(guarantee)):
            return True
        sink.ready_target(schema)
    except (UsageError, Refused):
        return True
    return False


def _outcomes(path: Path, places: Sequence[Place], *target: str) -> list[str]:
    ids = pa.array(range(len(places)), pa.int64())
    batch = _in_columns(places, ids) if path.rows is None else path.rows(ids, _values(places))
    try:
        sink, read = path.make(batch.schema, *target)
    except UsageError:
        return _apart(path, places)
    if refused_at_start(sink, batch.schema, path.guarantee):
        return _apart(path, places)
    try:
        settled = sink.settled(batch.schema)
    except UsageError:
        return _apart(path, places)
    name = f"letters{next(_count)}"
    make_world(name)
    letters = MEMORY.sink({"world": name, "commit": "two_phase"})
    group = Sinks.of([("sink", settled, None)], OnBadRow.DEAD_LETTER, ("letters", letters))
    rig = Rig(group)  # type: ignore[arg-type]
    try:
        rig.schema = batch.schema
        context = rig.context(guarantee=path.guarantee)
        message = write_shard(group, rig.plan(context, 0), 0, 0, iter([Rows(batch)]), batch.schema)
    except (UsageError, Refused) as error:  # the first shard compares the rows with the table of a server
        if len(kinds := {kind for kind, _ in places}) == 1 and any(label != "null" for _, label in places):
            (kind,) = kinds
            if "null" in kind.values and _outcomes(path, [(kind, "null")]) != [AT_START]:
                raise Fault(f"refused at the start because of a value: {error}") from error
        return _apart(path, places)
    decision = commit_batch(context, 0, "{}", [message])
    assert decision is not None
    total = sum((p.fingerprint for p in decision.participants if p.sink == "sink"), Fingerprint())
    if path.twice:
        message = write_shard(group, rig.plan(context, 1, first=False), 0, 0, iter([Rows(batch)]), batch.schema)
        assert commit_batch(context, 1, '{"0": 2}', [message]) is not None
    rejected = _rejected(name)
    found = read(batch.schema) if len(rejected) < len(places) else []
    there = {row["id"]: row for row in found}
    if len(there) < len(found):
        raise Fault("a row is there twice")
    outcomes = []
    for i, (kind, label) in enumerate(places):
        column = path.column or kind.column
        sent = canonical(kind.values[label])[0]
        if i in rejected:
            known = i not in there and (path.named or column) in rejected[i]
            outcomes.append(BAD_ROW if known else f"refused because of {rejected[i]!r:.100}, there: {i in there}")
        elif i not in there:
            outcomes.append("lost")
        else:
            seen = there[i][column]
            sent = path.nothing if sent is None else sent
            outcomes.append(EXACT if same(seen, sent) else f"{seen!r:.100} instead of {sent!r:.100}")
    if "lost" in outcomes and path.twice and len(places) > 1:
        raise Fault("two values are one key")  # each is tried alone
    if len(rejected) < len(places) and all(o in OUTCOMES for o in outcomes) and _can_be_read_back(settled):
        kept = batch.filter(pa.array([i not in rejected for i in range(len(places))]))
        audited(settled, Scope(rig.pipeline, "sink", "i0"), kept, total, path.guarantee)
    return outcomes


def _can_be_read_back(sink: Sink) -> bool:
    """What a queue holds cannot."""
    try:
        sink.scan()
    except Refused:
        return False
    return True


def _apart(path: Path, places: Sequence[Place]) -> list[str]:
    """The outcomes of values whose types are refused at the start together: of those that are taken, and the others."""
    kinds = list(dict.fromkeys(kind for kind, _ in places))
    if len(kinds) == 1:
        return [AT_START] * len(places)
    taken = [kind for kind in kinds if _outcomes(path, [(kind, "null")]) != [AT_START]]
    if len(taken) == len(kinds):
        raise Fault("each type is taken alone, and they are refused together")
    part = [p for p in places if p[0] in taken]
    found = dict(zip(part, _outcomes(path, part), strict=True)) if part else {}
    return [found.get(p, AT_START) for p in places]


def _values(places: Sequence[Place]) -> pa.Array:
    return pa.concat_arrays([kind.values[label] for kind, label in places])


def _in_columns(places: Sequence[Place], ids: pa.Array) -> pa.RecordBatch:
    """A row for each value, in the column of its type; the others are null."""
    columns, names, first = [ids], ["id"], 0
    for kind, part in itertools.groupby(places, key=lambda p: p[0]):
        values = _values(list(part))
        after = len(places) - first - len(values)
        columns.append(pa.concat_arrays([pa.nulls(first, kind.arrow), values, pa.nulls(after, kind.arrow)]))
        names.append(kind.column)
        first += len(values)
    return pa.RecordBatch.from_arrays(columns, names=names)


def same(found: Any, sent: Any) -> bool:
    """Null columns of structs aside, type by type: True is not 1."""
    return type(found) is type(sent) and found == sent


def _rejected(name: str) -> dict[int, str]:
    """Row -> why it is a dead letter."""
    letters = [json.loads(v) for _, batch in world(name).visible for v in batch.column("value").to_pylist()]
    return {letter["row"]: letter["reason"] for letter in letters}


def audited(sink: Sink, scope: Scope, sent: pa.RecordBatch, ledger: Fingerprint, guarantee: Guarantee) -> None:
    """Compare what was sent with what a scan finds, record by record. Raises Fault: the verdict is not `held`."""
    seed = fingerprint_seed(scope)
    handed = sink.records(sent)
    names = handed.schema.names
    back = list(scanned(sink))
    hashes = [int(h) for b in back for h in record_hashes(b, seed, names)]
    counts = sum(
        reconcile(
            [Seen(int(h), int(h)) for h in (record_hashes(handed, seed) if sent.num_rows else np.array([]))],
            [Seen(h, h) for h in hashes],
        ).values(),
        Counts(),
    )
    found = sum((fingerprint(b, seed, names) for b in back), Fingerprint())
    prints = Fingerprints(fingerprint(handed, seed), ledger, Fingerprint(), found)
    report = AuditReport(scope.pipeline, scope.sink, guarantee, counts=counts, fingerprints=prints, own="true")
    if report.verdict is not Verdict.HELD or prints.sent != prints.delivered or prints.ledger != prints.delivered:
        raise Fault(f"the audit says {report.verdict}: {report.breaches} {counts}")
