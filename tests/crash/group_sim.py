"""`Sim` with several named sinks in one world; the second one gets half of the rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from tests.crash.sim import Sim
from tests.support.memory import CONNECTOR

from delivered.engine import Sinks
from delivered.engine.shard import fingerprint_seed
from delivered.model.capability import Commit, Guarantee
from delivered.model.fingerprint import Fingerprint, fingerprint
from delivered.model.identity import Scope
from delivered.model.work import Tolerance

BOTH_PREPARE = (Commit.TWO_PHASE, Commit.TWO_PHASE)
LAST_RESOURCE = (Commit.TWO_PHASE, Commit.ONE_TRANSACTION)
NAMES = ("first", "second", "third")


def even(value: bytes) -> bool:
    return value[-1] % 2 == 0


def even_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A route: rows whose value ends with an even digit."""
    mask = pa.array([v is not None and even(v) for v in batch.column("value").to_pylist()], pa.bool_())
    return batch.filter(pc.fill_null(mask, False))


@dataclass
class GroupSim(Sim):
    """
    Attributes:
        commits: how each sink commits, in the order of `NAMES`.
    """

    commits: tuple[Commit, ...] = BOTH_PREPARE

    def make_sinks(self) -> Sinks:
        sinks = [CONNECTOR.sink({"world": self.name, "commit": c.value}) for c in self.commits]
        routes = [even_rows if i == 1 else None for i in range(len(sinks))]
        return Sinks.of(list(zip(NAMES, sinks, routes, strict=False)))

    def watch(self, point: str) -> None:
        if self.guarantee is not Guarantee.EXACTLY_ONCE or self.change or self.tolerance != Tolerance():
            return
        decided = {(d.scope.incarnation, d.batch): d for d in self.decisions()}
        seen: Counter[tuple[str, int, str]] = Counter()
        with self.world.lock:
            for work, batch in self.world.visible:
                seen[(work.scope.incarnation, work.batch, work.scope.sink)] += batch.num_rows
        for (incarnation, number, sink), count in seen.items():
            decision = decided.get((incarnation, number))
            if decision is None:
                self.problems.append(f"at {point}: batch {number} is visible at {sink} and not decided")
            elif self.commits[NAMES.index(sink)] is Commit.ONE_TRANSACTION:
                whole = decision.projected(sink).fingerprint.count
                if count != whole:
                    self.problems.append(f"at {point}: batch {number} is torn at {sink}: {count} of {whole} rows")

    def visible(self) -> Counter[Any]:
        return Counter(
            (work.scope.sink, v) for work, batch in self.world.visible for v in batch.column("value").to_pylist()
        )

    def expected(self) -> Counter[Any]:
        values = [v for rows in self.world.inputs for _, v in rows if v is not None]
        return Counter((n, v) for n in NAMES[: len(self.commits)] for v in values if n != "second" or even(v))

    def given_up(self) -> int:
        return sum(self.last().projected(n).given_up.count for n in NAMES[: len(self.commits)])

    def _totals(self) -> Any:
        if not self.decisions():
            return
        for name in NAMES[: len(self.commits)]:
            seed = fingerprint_seed(Scope("p", name, "any"))
            mine = [fingerprint(b, seed) for w, b in self.world.visible if w.scope.sink == name]
            seen = sum(mine, Fingerprint())
            total = self.last().projected(name).total
            if total != seen:
                yield f"the ledger accounts for {total} at {name}, readers see {seen}"


__all__ = ["BOTH_PREPARE", "LAST_RESOURCE", "NAMES", "GroupSim", "even"]
