"""Sealed batches compared once more: log to SQLite, without Spark."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.compared import by_record
from tests.support.orders import COPY, DELETE, ROWS, Orders

from delivered.audit.evidence import Verdict
from delivered.audit.recheck import Again, Rechecked, recheck
from delivered.audit.request import AuditRequest
from delivered.audit.seal import Seal, Sums, current
from delivered.connectors.log import append
from delivered.model.capability import Guarantee
from delivered.pipeline import registry


@pytest.fixture(autouse=True)
def looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connectors of installed packages."""
    monkeypatch.setattr(registry, "_find_others", cache(registry._find_others))


def request(orders: Orders, **how: Any) -> AuditRequest:
    made = orders.pipeline()
    return AuditRequest(
        pipeline=made.name,
        guarantee=Guarantee(made.guarantee),
        checkpoint=made.checkpoint,
        sources={n: e.source().planned() for n, e in made.sources.items()},
        sink=made.sinks[0].sink(),
        **{"transform_version": made.spec.transform, **how},
    )


def again(
    orders: Orders, first: int = 0, last: int = 99, seals: list[Seal] | None = None, **how: Any
) -> list[Rechecked]:
    """Batches of `first` to `last`."""

    def wanted(seal: Seal) -> bool:
        return seal.last >= first and seal.first <= last

    seals = orders.seals() if seals is None else seals
    return recheck(request(orders, **how), by_record, seals, wanted, lambda _: None)


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four batches, of which the last one is not sealed."""
    orders = Orders(tmp_path_factory.mktemp("sealed"))
    for is_sealed in (True, True, True, False):
        orders.run()
        if is_sealed:
            assert orders.audit().verdict is Verdict.HELD
    return orders.folder


@pytest.fixture
def orders(sealed: Path, tmp_path: Path) -> Orders:
    """A copy of it."""
    shutil.copytree(sealed, tmp_path, dirs_exist_ok=True)
    return Orders(tmp_path, 4 * ROWS)


def outcomes(found: list[Rechecked]) -> list[tuple[Again, tuple[int, int]]]:
    return [(f.outcome, f.batches) for f in found]


def test_a_row_that_came_after_its_seal_was_sealed_later(tmp_path: Path) -> None:
    orders = Orders(tmp_path)
    orders.run()
    orders.sql("CREATE TABLE kept AS SELECT * FROM orders WHERE value = CAST('5' AS BLOB)", DELETE.format(5))
    orders.audit()
    orders.run()
    orders.sql("INSERT INTO orders SELECT * FROM kept")
    orders.audit()
    assert outcomes(again(orders)) == [(Again.VERIFIED, (0, 0)), (Again.VERIFIED, (1, 1))]
    assert outcomes(again(orders, 1)) == [(Again.VERIFIED, (1, 1))]


def test_what_is_still_there_is_verified_again(orders: Orders) -> None:
    before = orders.seals()
    assert outcomes(again(orders)) == [(Again.VERIFIED, (0, 2))]
    assert outcomes(again(orders, 1, 1)) == [(Again.VERIFIED, (1, 1))]
    assert orders.seals() == before


def test_a_row_that_was_removed_since_is_found_in_its_range(orders: Orders) -> None:
    orders.sql(DELETE.format(25))
    found = again(orders)
    assert outcomes(found) == [
        (Again.VERIFIED, (0, 0)),
        (Again.DIFFERS, (1, 1)),
        (Again.VERIFIED, (2, 2)),
    ]
    assert found[1].says.startswith("1 records are lost, and 0 were sealed")


def test_a_row_that_was_changed_since_is_found(orders: Orders) -> None:
    orders.sql("UPDATE orders SET value = CAST('x' AS BLOB) WHERE value = CAST('45' AS BLOB)")
    found = again(orders)
    assert outcomes(found) == [(Again.VERIFIED, (0, 0)), (Again.VERIFIED, (1, 1)), (Again.DIFFERS, (2, 2))]


def test_damage_that_was_sealed_is_as_it_was_sealed(orders: Orders) -> None:
    orders.sql(DELETE.format(67))
    assert orders.audit().verdict is Verdict.BROKEN
    assert outcomes(again(orders)) == [(Again.VERIFIED, (0, 3))]


def test_records_that_changed_in_the_source_are_found(orders: Orders, tmp_path: Path) -> None:
    """As many records as before, written later."""
    shutil.rmtree(tmp_path / "log")
    rows = range(4 * ROWS)
    table = pa.table({"key": [b"%d" % (n % 5) for n in rows], "value": [b"%d" % n for n in rows]})
    for start in rows[::ROWS]:
        append(str(tmp_path / "log"), table.slice(start, ROWS), partition_by=2)
    found = again(orders)
    assert outcomes(found) == [(Again.DIFFERS, (n, n)) for n in range(3)]
    assert found[0].says == "the source yields 20 records, as sealed, but other ones"


def test_batches_of_another_transform_are_not_compared(orders: Orders) -> None:
    seals = [replace(s, transform="one") for s in orders.seals()]
    assert [f.says for f in again(orders, seals=seals, transform_version="two")] == ["they ran with another transform"]
    assert outcomes(again(orders, seals=seals, transform_version="one")) == [(Again.VERIFIED, (0, 2))]


def test_of_batches_that_were_compared_twice_the_newest_seal_counts(orders: Orders) -> None:
    assert orders.audit(full=True).verdict is Verdict.HELD
    assert [(s.first, s.last) for s in current(orders.seals())] == [(0, 3)]
    assert outcomes(again(orders)) == [(Again.VERIFIED, (0, 3))]


def test_a_range_that_was_never_audited(orders: Orders) -> None:
    assert orders.audit(from_now=True).verdict is Verdict.UNKNOWN
    orders.run()
    assert orders.audit().verdict is Verdict.HELD
    found = again(orders)
    assert outcomes(found) == [
        (Again.VERIFIED, (0, 2)),
        (Again.NOT_COMPARED, (3, 3)),
        (Again.VERIFIED, (4, 4)),
    ], found
    assert found[1].says == "they were never audited"


def test_rows_of_batches_that_followed_may_lie_among_the_sealed_ones(orders: Orders) -> None:
    """As if each of the batches 2 and 3 had been decided while the audit of the one before it read the sink."""
    one, two, three = orders.seals()
    until = request(orders).sink.scan().position()
    busy = [one, replace(two, sink_read=three.sink_end), replace(three, sink_read=until)]
    assert outcomes(again(orders, 2, seals=busy)) == [(Again.VERIFIED, (2, 2))]
    assert outcomes(again(orders, 1, 1, seals=busy)) == [(Again.VERIFIED, (1, 1))]
    assert outcomes(again(orders, seals=busy)) == [(Again.VERIFIED, (0, 2))]


def test_rows_of_sealed_batches_may_lie_behind_where_the_sink_was_read_on(orders: Orders) -> None:
    """As if batch 0 had been decided while its own audit looked where the sink ended."""
    one, two, three = orders.seals()
    start = {"sink_end": None, "settled": -1, "settled_end": one.start}
    early = [replace(one, **start), replace(two, sink_start=None), three]  # type: ignore[arg-type]
    for how in ({}, {"id": "key"}):  # each batch has the same keys
        assert outcomes(again(orders, 1, 1, seals=early, **how)) == [(Again.VERIFIED, (1, 1))], how
    orders.sql(COPY.format(3))
    assert outcomes(again(orders, 1, 1, seals=early)) == [(Again.VERIFIED, (1, 1))], "it lies behind batch 1"


def test_a_sink_without_positions_shows_the_source_only(orders: Orders) -> None:
    whole = [replace(s, sink_start=None, sink_end=None, sink_read=None) for s in orders.seals()]
    assert outcomes(again(orders, seals=whole)) == [(Again.SOURCE, (0, 2))]


def test_batches_that_were_recomputed_as_one_are_not_compared(orders: Orders) -> None:
    """Their seal has counts, and no fingerprint."""
    recomputed = [replace(s, sums=Sums(s.sums.counts)) for s in orders.seals()]
    assert outcomes(again(orders, seals=recomputed)) == [(Again.NOT_COMPARED, (0, 2))]


def test_records_that_the_source_has_dropped_are_expired(orders: Orders) -> None:
    orders.drop(1)
    found = again(orders)
    assert outcomes(found) == [(Again.EXPIRED, (0, 1)), (Again.VERIFIED, (2, 2))], found
    orders.drop(2)
    assert outcomes(again(orders)) == [(Again.EXPIRED, (0, 2))]


def test_what_cannot_be_read_is_not_compared(orders: Orders, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "log")
    (found,) = again(orders)
    assert found.outcome is Again.NOT_COMPARED
    assert found.says
