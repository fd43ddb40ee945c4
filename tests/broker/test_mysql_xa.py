"""mechanism two_phase of the MySQL sink: prepared transactions, their owners, and the ambiguous error 1397."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import Any

import pytest
from tests.support.servers import Mysql
from tests.support.sinks import SCHEMA, Rig, alone, offsets, rows

from delivered.connectors.mysql import store as transactions
from delivered.connectors.mysql.writer import LoadWriter
from delivered.engine.decide import commit_batch
from delivered.engine.shard import write_shard
from delivered.model.capability import Guarantee
from delivered.model.errors import UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.rows import Rows
from delivered.model.work import Account, Decision, Failed, Ok, Prepared, Unknown

EXACT = Guarantee.EXACTLY_ONCE
MARIADB = Mysql.system == "mariadb"
"""In MySQL, a prepared transaction belongs to no session (xa_detach_on_prepare): any other may end it at once."""


@pytest.fixture
def rig(mysql: Mysql) -> Rig:
    return Rig(mysql.sink(mechanism="two_phase", lockTimeout="3"))


def prepared_ids(mysql: Mysql) -> list[str]:
    found = [data for _, _, _, data in mysql.execute("XA RECOVER" if MARIADB else "XA RECOVER CONVERT XID")]
    return [(d if MARIADB else bytes.fromhex(d.removeprefix("0x"))).decode("ascii", "replace") for d in found]


class Hanging(LoadWriter):
    """A task that is paused right after its XA PREPARE: its session stays open."""

    def hang(self) -> Prepared:
        kept: list[Any] = []
        self._server = _KeepsOpen(self._server.options, kept)  # type: ignore[attr-defined]
        self.stage(rows(self._work.batch, self._work.shard))
        promise = self.prepare(Fingerprint(rows(0, 0).num_rows))
        self.session = kept[0]
        return Prepared.of(self._work, Fingerprint(), promise)


def _KeepsOpen(options: Any, kept: list[Any]) -> Any:  # noqa: N802
    from delivered.connectors.mysql.store import MysqlDatabase

    class KeepsOpen(MysqlDatabase):
        def discard(self, connection: Any) -> None:
            kept.append(connection)

    return KeepsOpen(options)


def hanging(rig: Rig, batch: int = 0, shard: int = 0) -> tuple[Hanging, Prepared]:
    rig.plan(rig.context(), batch)
    writer = Hanging(rig.sink.options, Work(rig.scope, batch, shard), EXACT, SCHEMA)  # type: ignore[attr-defined]
    return writer, writer.hang()


@pytest.mark.parametrize("commit", [True, False])
def test_a_preparer_that_hangs_is_ended(mysql: Mysql, rig: Rig, commit: bool) -> None:
    """F7: while its session lives, no other can end its transaction: the session is killed."""
    writer, prepared = hanging(rig)
    committer = rig.context().committers
    began = time.monotonic()
    if commit:
        assert committer.commit(Work(rig.scope, 0, 0), prepared) == Ok(None)
        assert committer.commit(Work(rig.scope, 0, 0), prepared) == Ok(None), "P16: again, and it is done"
    else:
        assert committer.abort_orphans(()) == Ok(1)
    assert time.monotonic() - began < 60
    assert rig.visible().count == 50 * commit
    if MARIADB:
        with pytest.raises(Exception, match=r"2013|2006|1927|4031"):
            writer.session.execute("SELECT 1")


def test_a_commit_that_is_acknowledged_and_lost_is_not_taken_for_done(
    mysql: Mysql, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As MariaDB 10.11 did right after the session that prepared was killed."""
    context, end = rig.context(), transactions.end
    (message, *_) = rig.write(rig.plan(context, 0))
    monkeypatch.setattr(transactions, "end", lambda session, gid, commit: end(session, gid, False))
    committer = rig.sink.committer(rig.scope)
    outcome = committer.commit(Work(rig.scope, 0, message.shard), message.participants[0])
    committer.close()
    assert isinstance(outcome, Failed) and "lost it" in outcome.reason


@pytest.mark.skipif(not MARIADB, reason="the session that prepared holds nothing up")
def test_1397_of_a_preparer_that_cannot_be_ended_is_neither_done_nor_lost(
    mysql: Mysql, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For instance another user's session. The outcome is Unknown until the session ends; then it is committed."""
    monkeypatch.setattr(transactions, "CLOSES_S", 0.1)
    monkeypatch.setattr(transactions, "KILLED_S", 0.1)
    monkeypatch.setattr("delivered.connectors.mysql.client.end_session", lambda session, nonce: None)
    writer, prepared = hanging(rig)
    committer, work = rig.context().committers, Work(rig.scope, 0, 0)
    outcome = committer.commit(work, prepared)
    assert isinstance(outcome, Unknown)
    assert "1397" in outcome.reason
    assert isinstance(committer.abort(prepared), Unknown)
    assert isinstance(committer.abort_orphans(()), Unknown)
    assert not committer.was_committed(work, prepared)
    writer.session.close()
    assert committer.commit(work, prepared) == Ok(None)
    assert committer.was_committed(work, prepared)
    assert rig.visible().count == 50


def test_1397_of_one_that_was_rolled_back_is_lost_and_of_one_that_is_in_is_done(mysql: Mysql, rig: Rig) -> None:
    """The marker, which lies with the rows, tells them apart. P5, P7."""
    context = rig.context()
    prepared = [m.prepared for m in rig.write(rig.plan(context, 0)) if m.prepared is not None]
    for p, verb in zip(prepared, ("ROLLBACK", "COMMIT"), strict=True):
        mysql.execute(f"XA {verb} {transactions.xid(p.handle['gid'])}")
    lost, done = prepared
    assert isinstance(context.committers.commit(Work(rig.scope, 0, lost.shard), lost), Failed)
    assert context.committers.commit(Work(rig.scope, 0, done.shard), done) == Ok(None)
    assert not context.committers.was_committed(Work(rig.scope, 0, lost.shard), lost)
    assert context.committers.was_committed(Work(rig.scope, 0, done.shard), done)


def test_p5_rolled_back_by_hand_is_written_again_alone(mysql: Mysql, rig: Rig) -> None:
    context = rig.context("dies")
    plan = rig.plan(context, 0)
    prepared = tuple(m.prepared for m in rig.write(plan) if m.prepared is not None)
    total = sum((p.fingerprint for p in prepared), Fingerprint())
    decision = Decision(rig.scope, "dies", EXACT, 0, plan.offsets, prepared, {rig.scope.sink: Account(total)}, 1)
    assert context.ledger.decide(decision) == Ok(None)
    mysql.execute(f"XA ROLLBACK {transactions.xid(prepared[1].handle['gid'])}")
    again = rig.context("second")
    plan = rig.plan(again, 0)
    assert set(plan.rewrite) == {1}
    repaired = commit_batch(again, 0, offsets(0), rig.write(plan))
    assert repaired is not None
    assert repaired.revision == 1
    assert rig.visible() == rig.expected(0)


def test_p13_p20_abort_orphans_touches_only_its_own_and_shows_their_age(
    mysql: Mysql, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P20: prepared transactions never expire. P13: names that begin alike, or are no names at all, are left alone."""
    table = rig.sink.options.table  # type: ignore[attr-defined]
    prefix = transactions.id_prefix(rig.scope, "delivered")
    others = [
        "'somebody-else'", "X'00ff80','b\\'q'", f"'{prefix}5.0'", f"'{prefix}x','0123456789a.0123456789abcdef.p.s'",
        "'delivered.0123456789abcdef.5.0','0123456789a.0123456789abcdef.p.s'",
    ]  # fmt: skip
    for xid in others:
        client = mysql.connect()
        with client.cursor() as cursor:
            for statement in (
                f"XA START {xid}",
                f"INSERT INTO {table} VALUES ('x', 'x')",
                f"XA END {xid}",
                f"XA PREPARE {xid}",
            ):
                cursor.execute(statement)
        client.close()
    rig.write(rig.plan(rig.context("dead"), 0))
    committer = rig.context("next").committers
    listed = committer.open_transactions()
    prefix = transactions.id_prefix(rig.scope, rig.sink.options.ledger_schema)
    shards = [t.transactional_id.removeprefix(prefix).partition(":")[0] for t in listed]
    assert [*zip(shards, (t.state for t in listed), strict=True)] == [("0.0", "Prepared"), ("0.1", "Prepared")]
    assert all(0 <= t.age_s() < 60 for t in listed)
    monkeypatch.setattr("delivered.connectors.mysql.read.OPEN_TRANSACTION_OLD_S", 0.0)
    assert ("PREPARED_TRANSACTION_OLD", False) in [(f.code, f.refuses) for f in rig.sink.preflight(EXACT)]
    before = len(prepared_ids(mysql))
    assert committer.abort_orphans(()) == Ok(2)
    assert len(prepared_ids(mysql)) == before - 2
    foreign = "delivered.0123456789abcdef.5.0:0123456789a.0123456789abcdef.p.s"
    with pytest.raises(UsageError, match="TRANSACTION_FOREIGN"):
        alone(committer).end_by_id(foreign, commit=False)
    with pytest.raises(UsageError, match="TRANSACTION_NOT_OPEN"):
        alone(committer).end_by_id(listed[0].transactional_id, commit=False)
    for xid in others:
        mysql.execute(f"XA ROLLBACK {xid}")  # each still exists
    assert rig.visible() == Fingerprint()


def test_longest_names_fit_a_transaction_id() -> None:
    work = Work(Scope("p" * 64, "s" * 64, "i" * 64), 10**18, 9_999)
    first, _, second = transactions.new_id(work, "delivered").partition(":")
    assert len(first) <= transactions.PART_BYTES_MAX
    assert len(second) == transactions.PART_BYTES_MAX
    assert transactions.is_ours(work.scope, "delivered", f"{first}:{second}")
    assert transactions.new_id(work, "delivered") != transactions.new_id(work, "delivered")
    one, two = Scope("a", "b.c", "i"), Scope("a.b", "c", "i")
    assert not transactions.is_ours(one, "delivered", transactions.new_id(Work(two, 0, 0), "delivered"))
    assert not transactions.is_ours(one, "delivered", transactions.new_id(Work(one, 0, 0), "another_ledger"))
    staging = transactions.build_names(work.scope, "delivered").staging(work, "0" * 16)
    assert len(staging) <= 64


def test_what_a_zombie_left_prepared_holds_up_no_decision(mysql: Mysql) -> None:
    """Its marker is a locked row. Later decisions delete markers around it."""
    rig = Rig(mysql.sink(mechanism="two_phase", lockTimeout="90"))
    context = rig.context()
    plan = rig.plan(context, 0)
    zombie = write_shard(rig.sinks, plan, 0, 0, iter([Rows(rows(0, 0))]), SCHEMA).prepared
    assert zombie is not None
    messages = [write_shard(rig.sinks, plan, s, 0, iter([Rows(rows(0, s))]), SCHEMA) for s in (0, 1)]
    assert commit_batch(context, 0, offsets(0), messages) is not None
    other = Rig(mysql.sink(mechanism="two_phase"))  # its ledger rows are adjacent, and open too
    left_open = other.write(other.plan(other.context(), 0))
    began = time.monotonic()
    for batch in (1, 2):
        messages = rig.write(rig.plan(context, batch, first=False))
        assert commit_batch(context, batch, offsets(batch), messages) is not None
    rig.context("second").ledger.claim(rig.context("second").owner)
    assert time.monotonic() - began < 60, "nothing waited for a lock"
    assert rig.visible() == rig.expected(0, 1, 2)
    marked = "SELECT DISTINCT batch FROM delivered.marker WHERE pipeline = %s"
    assert mysql.execute(marked, rig.pipeline) == [(2,)]
    assert context.committers.abort(zombie) == Ok(None)
    assert commit_batch(other.context(), 0, offsets(0), left_open) is not None


@pytest.mark.parametrize("options", [{}, {"mechanism": "two_phase", "mode": "upsert", "keyColumns": "key"}])
def test_a_task_that_hangs_with_its_staging_table_open_holds_up_no_start(mysql: Mysql, options: dict[str, str]) -> None:
    """F7: paused before prepare, it locks the table that recovery drops. It is killed, and can no longer prepare."""
    table = mysql.table("`key` varbinary(40), value longblob, UNIQUE (`key`)")
    rig = Rig(mysql.sink(table, lockTimeout="90", **options))
    rig.plan(rig.context(), 0)
    full = rows(0, 0).filter(rows(0, 0).column("key").is_valid())
    paused = rig.sink.writer(Work(rig.scope, 0, 0), EXACT, SCHEMA)
    paused.stage(full)
    began = time.monotonic()
    assert rig.context("later").committers.abort_orphans(()) == Ok(1)
    assert time.monotonic() - began < 60
    with pytest.raises(Exception, match="MYSQL_UNREACHABLE"):
        paused.prepare(Fingerprint(full.num_rows))
    paused.abort()
    assert mysql.execute(f"SELECT count(*) FROM {table}") == [(0,)]


def test_a_claim_ends_a_session_that_holds_the_owners_row(mysql: Mysql, rig: Rig) -> None:
    """F7: a driver paused in mid-decision. This user's session is killed; another user's is reported."""
    rig.run(0)
    paused = rig.context("first").ledger
    paused.claim(rig.context("first").owner)
    store: Any = paused._store._deciding  # type: ignore[attr-defined]
    session = store._open()
    store._database.begin(session)
    store._signed(session)
    began = time.monotonic()
    later = rig.context("later")
    owner = later.ledger.claim(later.owner).owner
    assert owner is not None
    assert owner.id == "later"
    assert 0.9 < time.monotonic() - began < 60
    with pytest.raises(Exception, match=r"2013|2006|1927|4031"):
        session.execute("COMMIT")


def test_a_foreign_lock_on_the_ledger_is_told(mysql: Mysql, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from delivered.kits.sql import ledger as ledgers

    monkeypatch.setattr(ledgers, "CONNECT_TIMEOUT_S", 1.5)
    rig.run(0)
    with closing(mysql.connect(autocommit=False)) as foreign:
        foreign.cursor().execute("SELECT * FROM delivered.owner WHERE pipeline = %s FOR UPDATE", [rig.pipeline])
        context = rig.context("later")
        with pytest.raises(Exception, match="LEDGER_LOCKED") as caught:
            context.ledger.claim(context.owner)
        assert "innodb_trx" in str(caught.value)
        assert foreign.open
        foreign.cursor().execute("SELECT 1")


def test_shards_of_one_batch_upsert_side_by_side(mysql: Mysql) -> None:
    """Neighbours in the index, prepared concurrently: no gap locks, and no locks taken by a scan."""
    import pyarrow as pa

    table = mysql.table("id bigint PRIMARY KEY, other varchar(20), v bigint, UNIQUE (other)")
    mysql.execute(f"INSERT INTO {table} VALUES " + ", ".join(f"({n}, 'o{n}', 0)" for n in range(20)))
    rig = Rig(
        mysql.sink(table, mechanism="two_phase", lockTimeout="2", mode="upsert", keyColumns="id", versionColumn="v")
    )
    context = rig.context()
    plan = rig.plan(context, 0)
    said: list[Any] = [None] * 3

    def run(shard: int) -> None:
        ids = [i for i in range(30) if i % 3 == shard]
        batch = pa.record_batch({"id": ids, "other": [f"o{i}" for i in ids], "v": [1] * len(ids)})
        said[shard] = write_shard(rig.sinks, plan, shard, 0, iter([Rows(batch)]), batch.schema)

    tasks = [threading.Thread(target=run, args=(s,)) for s in range(3)]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join(60)
    assert commit_batch(context, 0, offsets(0), said) is not None
    assert mysql.execute(f"SELECT count(*), min(v), max(v) FROM {table}") == [(30, 1, 1)]
