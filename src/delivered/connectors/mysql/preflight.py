"""Checks whether server, table and user support the guarantee. Changes only the ledger's own tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from delivered.connectors.mysql import MysqlOptions, client, committer, target
from delivered.connectors.mysql.client import migrate, read_only
from delivered.contract.finding import Finding
from delivered.kits.mysql.server import DENIED
from delivered.kits.sql.database import quoted
from delivered.kits.sql.merge import findings, no_unique_index
from delivered.kits.sql.options import Mechanism
from delivered.kits.sql.table import missing_at_server, permission
from delivered.kits.sql.transactions import age_of, check_deletions
from delivered.model.guarantee import Guarantee
from delivered.model.limits import OPEN_TRANSACTION_OLD_S

if TYPE_CHECKING:
    from delivered.connectors.mysql.session import Session


def look(session: Session, options: MysqlOptions, guarantee: Guarantee) -> Iterator[Finding]:
    settings = _settings(session)
    if settings.get("super_read_only") == "ON" or settings.get("tx_read_only") == "ON":
        raise read_only(options)
    yield from _durable(settings, options, guarantee)
    if guarantee is not Guarantee.AT_MOST_ONCE:
        yield from _replicas(session, options)
    if settings.get("log_bin") == "ON" and settings.get("binlog_format") == "STATEMENT":
        yield Finding.build("BINLOG_STATEMENT.START", refuses=True, place=options.place)
    if guarantee is Guarantee.EXACTLY_ONCE and options.mechanism is Mechanism.TWO_PHASE:
        committer.check_allowed(session, options)
        yield from _prepared(session, options)
        yield from check_deletions(options)
    migrate(session, options.ledger_schema)
    yield from _table(session, options)


def _settings(session: Session) -> dict[str, str]:
    names = (
        *("binlog_format", "innodb_flush_log_at_trx_commit", "log_bin", "super_read_only"),
        *("sync_binlog", "transaction_read_only", "tx_read_only"),
    )
    wanted = ", ".join(f"'{n}'" for n in names)
    found = dict(session.execute(f"SHOW VARIABLES WHERE Variable_name IN ({wanted})").fetchall())
    if "transaction_read_only" in found:  # its new name
        found["tx_read_only"] = found["transaction_read_only"]
    return {str(k): str(v) for k, v in found.items()}


def _durable(settings: dict[str, str], options: MysqlOptions, guarantee: Guarantee) -> Iterator[Finding]:
    """Whether committed transactions survive a crash of the server's machine."""
    if guarantee is Guarantee.AT_MOST_ONCE:
        return
    weak = [
        f"{name} = {settings[name]}"
        for name, needed in (("innodb_flush_log_at_trx_commit", True), ("sync_binlog", settings.get("log_bin") == "ON"))
        if needed and settings.get(name, "1") != "1"
    ]
    if weak:
        yield Finding.build(
            "COMMIT_NOT_FLUSHED",
            refuses=False,
            place=options.place,
            weak=" and ".join(weak),
            action="; ".join(f"SET GLOBAL {w.partition(' ')[0]} = 1" for w in weak),
        )


def _replicas(session: Session, options: MysqlOptions) -> Iterator[Finding]:
    """Whether a fail-over can lose a decision. Replicas are shown only to users with the privilege PROCESS."""
    row = session.execute("SELECT count(*) FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'")
    replicas = int(row.fetchone()[0])
    names = (f"'Rpl_semi_sync_{role}_{what}'" for role in ("master", "source") for what in ("status", "clients"))
    found = session.execute(f"SHOW STATUS WHERE Variable_name IN ({', '.join(names)})").fetchall()
    said = {str(name).rpartition("_")[2]: str(value) for name, value in found}
    # It is on until the first commit that waits in vain, also if none of the replicas takes part.
    waits = said.get("status") == "ON" and said.get("clients") != "0"
    if replicas and not waits:
        yield Finding.build("STANDBY_ASYNCHRONOUS.MYSQL", refuses=False, place=options.place, replicas=replicas)


def _prepared(session: Session, options: MysqlOptions) -> Iterator[Finding]:
    """Transactions of any pipeline with its ledger on this server: foreign ids do not contain a start time."""
    oldest_s = max((age_of(ms) for ms in committer.all_started_ms(session)), default=0.0)
    if oldest_s > OPEN_TRANSACTION_OLD_S:
        yield Finding.build("PREPARED_TRANSACTION_OLD.MYSQL", refuses=False, place=options.place, hours=oldest_s / 3600)


def _table(session: Session, options: MysqlOptions) -> Iterator[Finding]:
    found = target.find(session, options)
    if found is None:
        target.check_hidden(session, options)
        if not options.create:
            raise missing_at_server(options)
        base = options.schema or options.database
        there = "SELECT 1 FROM information_schema.schemata WHERE schema_name = %s"
        if session.execute(there, [base]).fetchone() is None:
            yield Finding.build(
                "SCHEMA_MISSING.DATABASE", refuses=True, base=base, table=options.table_text, place=options.place
            )
        return
    target.check_engine(options, found)
    write = options.write
    denied = _denied(session, options, found)
    if denied:
        user = session.execute("SELECT current_user()").fetchone()[0]
        yield permission(options, user, denied, f"{found.base}.{found.name}")
    elif write.upserts and target.unique_index(session, found, write.keys) is None:
        raise no_unique_index(write, options.table_text, options.where)
    else:
        yield from findings(options, target.read_definition(session, options))


def _denied(session: Session, options: MysqlOptions, found: target.Found) -> list[str]:
    """Privileges on the table that this user lacks: the server checks them on EXPLAIN, too."""
    columns = target.table_columns(session, found)  # empty if the user has no privilege on the table
    name, write = found.full, options.write
    one = quoted(next((n for n, c in columns.items() if not c.computed), "x"))
    asked = {"INSERT": f"EXPLAIN INSERT INTO {name} ({one}) VALUES (NULL)"}
    if write.upserts:
        asked["SELECT"] = f"EXPLAIN SELECT {one} FROM {name} WHERE FALSE"
    if write.upserts and not write.insert:
        asked["UPDATE"] = f"EXPLAIN UPDATE {name} SET {one} = NULL WHERE FALSE"
    if write.delete is not None:
        asked["DELETE"] = f"EXPLAIN DELETE FROM {name} WHERE FALSE"
    denied = []
    for right, statement in asked.items():
        try:
            session.execute(statement)
        except Exception as error:
            if client.is_lost(error):
                raise
            if client.error_number(error) in DENIED:
                denied.append(right)
    return denied
