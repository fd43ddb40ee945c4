"""Seals beside tables: maintenance leaves them, and what an audit that lost or died wrote never counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from tests.support.iceberg import before_commit, sink_at, theirs  # noqa: F401 - a fixture
from tests.support.sinks import SCHEMA, Rig
from tests.support.tables import SCOPE, decision

from delivered.connectors.delta import CONNECTOR as DELTA
from delivered.contract.sink import Sink
from delivered.engine.context import open_ledger
from delivered.kits.table import store
from delivered.ledger import Ledger
from delivered.model.errors import InvariantBroken
from delivered.model.work import Failed, Ok, Outcome, Owner, Unknown


def text(number: int, what: str = "held") -> str:
    return f'{{"number":{number},"verdict":"{what}"}}'


def opened(sink: Sink) -> Ledger:
    sink.ready_target(SCHEMA)
    return open_ledger(sink, SCOPE)


def delta_at(path: Path) -> Sink:
    sink: Sink = DELTA.sink({"path": str(path / "orders")})
    return sink


def sealed(path: Path) -> list[str]:
    return sorted(p.name for p in path.rglob("_delivered/**/seals/**/*.json"))


@pytest.fixture
def in_commit(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Callable[[], Any]], Any]], None]:
    """`in_commit(do)`: what happens at the moment when the next commit is asked for; `do(ask)` may ask itself."""
    real = DeltaTable.create_write_transaction

    def at_next(do: Callable[[Callable[[], Any]], Any]) -> None:
        def instead(self: DeltaTable, *given: Any, **more: Any) -> Any:
            monkeypatch.setattr(DeltaTable, "create_write_transaction", real)
            return do(lambda: real(self, *given, **more))

        monkeypatch.setattr(DeltaTable, "create_write_transaction", instead)

    return at_next


def test_maintenance_of_a_delta_table_keeps_seals(tmp_path: Path) -> None:
    rig = Rig(delta_at(tmp_path))
    ledger = open_ledger(rig.sink, rig.scope)
    wanted = []
    for batch in range(3):
        rig.run(batch)
        wanted.append(text(batch))
        assert ledger.add_seal("sink", batch, wanted[-1]) == Ok(None)
    table = DeltaTable(tmp_path / "orders")
    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 0 days"})
    table.optimize.compact()
    table.restore(table.version() - 1)
    table.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    table.create_checkpoint()
    table.cleanup_metadata()
    assert list(open_ledger(rig.sink, rig.scope).seals("sink")) == wanted
    assert ledger.add_seal("sink", 3, text(3)) == Ok(None)
    rig.run(3)
    assert rig.visible() == rig.expected(0, 1, 2, 3)


def test_maintenance_of_an_iceberg_table_keeps_seals(tmp_path: Path) -> None:
    rig = Rig(sink_at(tmp_path))
    ledger = open_ledger(rig.sink, rig.scope)
    wanted = []
    for batch in range(3):
        rig.run(batch)
        wanted.append(text(batch))
        assert ledger.add_seal("sink", batch, wanted[-1]) == Ok(None)
    table = theirs(tmp_path)
    assert len([s for s in table.snapshots() if "delivered.seal" in s.summary.additional_properties]) == 1
    expiring = table.maintenance.expire_snapshots()
    now = max(s.timestamp_ms for s in table.snapshots()) + 1
    from datetime import UTC, datetime

    expiring.older_than(datetime.fromtimestamp(now / 1000, UTC).replace(tzinfo=None)).commit()
    lists = [p.name for p in tmp_path.rglob("metadata/delivered/**/seals/*")]
    assert len(lists) == 1, "of the newest seal alone"
    assert list(open_ledger(rig.sink, rig.scope).seals("sink")) == wanted
    assert ledger.add_seal("sink", 3, text(3)) == Ok(None)
    rig.run(3)
    assert rig.visible() == rig.expected(0, 1, 2, 3)


def test_a_delta_seal_meets_claims_and_decisions_of_an_upsert(tmp_path: Path, in_commit: Any) -> None:
    """A commit that is valid for one version alone is made again; nobody is fenced."""
    sink: Sink = DELTA.sink({"path": str(tmp_path / "orders"), "mode": "upsert", "keyColumns": "key"})
    sink.ready_target(SCHEMA)
    owner, audit = open_ledger(sink, SCOPE), open_ledger(sink, SCOPE)
    owner.claim(Owner("a", "host", 1, 2))
    done: list[Outcome[None]] = []

    def sealing(ask: Callable[[], Any]) -> Any:
        done.append(audit.add_seal("sink", 0, text(0)))
        return ask()

    in_commit(sealing)
    assert owner.decide(decision(0)) == Ok(None)
    assert done == [Ok(None)]
    in_commit(lambda ask: (owner.claim(Owner("a", "host", 1, 2)), ask())[1])
    assert audit.add_seal("sink", 1, text(1)) == Ok(None)


@pytest.mark.parametrize("system", ["delta", "iceberg"])
def test_a_seal_whose_reply_was_lost_is_there(
    system: str,
    tmp_path: Path,
    in_commit: Any,
    before_commit: Any,  # noqa: F811
) -> None:
    ledger = opened(delta_at(tmp_path) if system == "delta" else sink_at(tmp_path))
    at_next = in_commit if system == "delta" else before_commit

    def lost(ask: Callable[[], Any]) -> Any:
        ask()
        raise OSError("the connection was lost")

    at_next(lost)
    assert ledger.add_seal("sink", 0, text(0)) == Ok(None)

    def not_sent(_: Callable[[], Any]) -> Any:
        raise OSError("the connection was lost")

    at_next(not_sent)
    assert isinstance(ledger.add_seal("sink", 1, text(1)), Unknown)
    assert list(ledger.seals("sink")) == [text(0)], "a file alone does not count"
    assert ledger.add_seal("sink", 1, text(1, "another")) == Ok(None)
    assert isinstance(ledger.add_seal("sink", 1, text(1)), Failed)
    assert list(ledger.seals("sink")) == [text(0), text(1, "another")]


@pytest.mark.parametrize("system", ["delta", "iceberg"])
def test_an_audit_that_another_overtook_has_failed(
    system: str,
    tmp_path: Path,
    in_commit: Any,
    before_commit: Any,  # noqa: F811
) -> None:
    sink = delta_at(tmp_path) if system == "delta" else sink_at(tmp_path)
    ledger, other = opened(sink), open_ledger(sink, SCOPE)
    at_next = in_commit if system == "delta" else before_commit

    def overtaken(ask: Callable[[], Any]) -> Any:
        assert other.add_seal("sink", 0, text(0, "first")) == Ok(None)
        assert other.add_seal("sink", 1, text(1, "first")) == Ok(None)
        return ask()

    at_next(overtaken)
    outcome = ledger.add_seal("sink", 0, text(0, "second"))
    assert isinstance(outcome, Failed)
    assert "another audit has sealed meanwhile" in outcome.reason
    assert list(ledger.seals("sink")) == [text(0, "first"), text(1, "first")]
    assert len(sealed(tmp_path)) == 2, "the file of the one that lost is deleted"


@pytest.mark.parametrize("system", ["delta", "iceberg"])
def test_a_missing_seal_is_a_gap_and_a_changed_one_an_error(system: str, tmp_path: Path) -> None:
    ledger = opened(delta_at(tmp_path) if system == "delta" else sink_at(tmp_path))
    for number in range(4):
        assert ledger.add_seal("sink", number, text(number)) == Ok(None)
    _, second, third, fourth = sorted(tmp_path.rglob("_delivered/**/seals/**/*.json"))
    second.unlink()
    assert list(ledger.seals("sink")) == [text(0), text(2), text(3)], "whoever checks the chain sees the gap"
    fourth.write_text(text(3, "changed"))
    with pytest.raises(InvariantBroken, match=r"SEAL_FILE_CHANGED.*of seal 3,"):
        ledger.last_seal("sink")
    fourth.unlink()
    assert ledger.last_seal("sink") == text(2), "as after the loss of a row in a database"
    assert ledger.add_seal("sink", 3, text(3, "again")) == Ok(None)
    assert list(ledger.seals("sink")) == [text(0), text(2), text(3, "again")]
    assert third.exists()


def test_long_chains_lie_in_several_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_SEALS_PER_FOLDER", 3)
    ledger = opened(delta_at(tmp_path))
    for number in range(8):
        assert ledger.add_seal("sink", number, text(number)) == Ok(None)
        assert ledger.last_seal("sink") == text(number)
    assert list(ledger.seals("sink")) == [text(n) for n in range(8)]
    assert list(ledger.seals("sink", 4)) == [text(n) for n in range(4, 8)]
    assert ledger.add_seal("sink", 2, text(2)) == Ok(None)
