"""`GroupSim` with a dead-letter sink: every third row is too long for the first sink."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.crash.group_sim import GroupSim
from tests.support.memory import CONNECTOR

from delivered.engine import Sinks
from delivered.model.capability import Guarantee
from delivered.model.rows import OnBadRow

EXACTLY, LEAST, MOST = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE
NTH_MAX = 30


@dataclass
class LetterSim(GroupSim):
    """Every third row is too long for the first sink."""

    on_bad_row: OnBadRow = OnBadRow.DEAD_LETTER

    def __post_init__(self) -> None:
        super().__post_init__()
        self.world.inputs = [
            [(k, (v or b"") + b"-long" * (i % 3 == 1)) for i, (k, v) in enumerate(rows)] for rows in self.world.inputs
        ]

    def make_sinks(self) -> Sinks:
        first = CONNECTOR.sink({"world": self.name, "commit": self.commits[0].value, "valueBytesMax": "5"})
        letters = CONNECTOR.sink({"world": self.name, "commit": self.commits[1].value})
        dead_letter = ("letters", letters) if self.on_bad_row is OnBadRow.DEAD_LETTER else None
        return Sinks.of([("first", first, None)], self.on_bad_row, dead_letter)

    def watch(self, point: str) -> None:
        decided = {(d.scope.incarnation, d.batch) for d in self.decisions()}
        if self.guarantee is EXACTLY:
            with self.world.lock:
                seen = {(w.scope.incarnation, w.batch) for w, batch in self.world.visible if batch.num_rows}
            self.problems += [f"at {point}: {s} is visible and not decided" for s in seen - decided]

    def visible(self) -> Counter[Any]:
        found: Counter[Any] = Counter()
        for work, batch in self.world.visible:
            for value in batch.column("value").to_pylist():
                name = work.scope.sink
                told = json.loads(value) if name == "letters" else None
                found[(name, told["record"] and json.loads(told["record"])["value"].encode() if told else value)] += 1
        return found

    def letters(self) -> list[dict[str, Any]]:
        batches = (batch for work, batch in self.world.visible if work.scope.sink == "letters")
        return [json.loads(value) for batch in batches for value in batch.column("value").to_pylist()]

    def expected(self) -> Counter[Any]:
        values = [v for rows in self.world.inputs for _, v in rows if v is not None]
        return Counter(("letters" if v.endswith(b"long") else "first", v) for v in values)

    def given_up(self) -> int:
        return sum(self.last().projected(n).given_up.count for n in ("first", "letters"))

    def _totals(self) -> Iterator[str]:
        for name in ("first", "letters"):
            seen = sum(n for (sink, _), n in self.visible().items() if sink == name)
            if self.decisions() and self.last().projected(name).total.count != seen:
                yield f"{name}: {seen} rows are seen, the ledger has {self.last().projected(name).total}"
