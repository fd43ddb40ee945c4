"""A comparison of an audit record by record, in this process: what Spark's must find, for small pipelines without a
transform."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from tests.support.reconcile import classify

from delivered.audit.account import Comparison, Findings, Ranges
from delivered.audit.evidence import NOBODY, Counts, PartitionLine
from delivered.audit.judge import Result
from delivered.audit.request import AuditRequest, Positions
from delivered.audit.sealing import open_sources
from delivered.contract.sink import BoundedScan
from delivered.contract.source import Slice
from delivered.engine.shard import fingerprint_seed
from delivered.model.fingerprint import Fingerprint, fingerprint
from delivered.model.identity import Scope


@dataclass(frozen=True)
class _Row:
    id: Hashable
    value: Hashable
    print: Fingerprint


@contextmanager
def by_record(request: AuditRequest, scope: Scope, scan: BoundedScan) -> Iterator[RecordComparison]:
    """As `delivered.audit.account.Comparing`. `request.id` is the name of a column, or None; `request.transform` maps
    record batches."""
    with closing(open_sources(request)) as sources:
        comparison = RecordComparison(request, scope, scan)
        comparison.sources = sources
        yield comparison


class RecordComparison(Comparison):
    def __init__(self, request: AuditRequest, scope: Scope, scan: BoundedScan) -> None:
        self._request, self._scan, self._seed = request, scan.planned(), fingerprint_seed(scope)
        self._stored: list[_Row] = []
        self._old: list[_Row] = []

    def read(self, slices: Sequence[Slice], expected: int, again: int = 0) -> tuple[int, int]:
        names = self._names()
        for number, piece in enumerate(slices):
            for batch in self._scan.read(piece):
                rows = self._rows(batch.select(names))
                (self._old if number < again else self._stored).extend(rows)
        return len(self._stored) + len(self._old), 0

    def _names(self) -> list[str]:
        (source,) = self._request.sources.values()
        return list(self._written(pa.RecordBatch.from_pylist([], source.schema())).schema.names)

    def compare(self, ranges: Ranges) -> Findings:
        undecided = ranges.read.undecided
        must = self._sent(ranges.must)
        may = self._sent([*ranges.optional, *([undecided] if undecided is not None else [])])
        wanted = {r.id for r in (*must, *may)}
        old = [r for r in self._old if r.id in wanted]
        first = [r for r in self._old if r.id not in wanted]
        copies = Counter((r.id, r.value) for r in old)
        for row in self._sent(ranges.again):
            if copies[row.id, row.value]:
                copies[row.id, row.value] -= 1
                may.append(row)
                first.append(row)
        before = self._sent(ranges.before)
        if ranges.sealed is not None:
            names = self._names()
            first += (r for s in ranges.sealed for b in self._scan.read(s) for r in self._rows(b.select(names)))
            copies = Counter((r.id, r.value) for r in first)
            for row in before:
                copies[row.id, row.value] -= 1
                may += [row] if copies[row.id, row.value] < 0 else []
        return Findings(_result(must, may, [*self._stored, *old], before))

    def _sent(self, ranges: Sequence[tuple[Positions, Positions]]) -> list[_Row]:
        (source,) = self._request.sources.values()
        pieces = [piece.data[1] for start, end in ranges for piece in self.sources.slices(start, end)]
        return [r for piece in pieces for batch in source.read(piece) for r in self._rows(self._written(batch))]

    def _written(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        transform: Any = self._request.transform
        return self._request.sink.records(batch if transform is None else transform(batch))

    def _rows(self, batch: pa.RecordBatch) -> Iterator[_Row]:
        for i, row in enumerate(batch.to_pylist()):
            value = repr(row)
            one = fingerprint(batch.slice(i, 1), self._seed)
            yield _Row(value if self._request.id is None else row[self._request.id], value, one)


def _result(must: list[_Row], may: list[_Row], there: list[_Row], sealed: list[_Row]) -> Result:
    sides: list[dict[Hashable, Counter[Hashable]]] = []
    for rows in (must, may, there, sealed):
        by_id: dict[Hashable, Counter[Hashable]] = defaultdict(Counter)
        for r in rows:
            by_id[r.id][r.value] += 1
        sides.append(by_id)
    prints = {(r.id, r.value): r.print for r in (*must, *may, *there)}
    counts, sent, delivered = Counts(), Fingerprint(), Fingerprint()
    for one in {*sides[0], *sides[1], *sides[2]}:
        counts += classify(sides[0][one], sides[1][one], sides[2][one], sides[3][one])
        for value in {*sides[0][one], *sides[2][one]}:
            m, y, t = (side[one][value] for side in sides[:3])
            in_progress = min(max(t - m, 0), y)
            sent = sum([prints[one, value]] * m, sent)
            delivered = sum([prints[one, value]] * (t - in_progress), delivered)
    return Result(counts, (PartitionLine(NOBODY, counts, sent, delivered),), sent=sent, delivered=delivered)
