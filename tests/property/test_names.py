"""Names and ids that are made of others: two different ones never give the same (P33)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivered.connectors.delta.store import Names as DeltaNames
from delivered.connectors.iceberg.store import Names as IcebergNames
from delivered.connectors.kafka import SinkOptions
from delivered.connectors.kafka import topics as kafka
from delivered.connectors.kafka.topics import Keys
from delivered.connectors.mysql import store as mysql
from delivered.connectors.postgres import store as postgres
from delivered.connectors.rocketmq.publish import producer_group
from delivered.kits.options import queue_sink_name
from delivered.kits.queue import SendingWriter
from delivered.kits.sql.sink import Names
from delivered.kits.table.shard import sink_folder
from delivered.model.errors import UsageError
from delivered.model.identity import Scope, Work, checked_name, derived_name, fitted_name
from delivered.patterns.caller import NAME_LENGTHS_MAX, quoted
from delivered.pipeline.spec import _pipeline_name

NAME = st.text("ab.-_%", min_size=1, max_size=4).filter(lambda n: "%" not in n)
SCOPE = st.builds(Scope, NAME, NAME, st.just("i"))


class Writer(SendingWriter[Any, Any]):
    def _connect(self) -> Any:
        raise AssertionError

    def _messages(self, rows: Any) -> list[Any]:
        raise AssertionError(rows)


def message_id(scope: Scope) -> str:
    return Writer(SimpleNamespace(message_id_columns=()), Work(scope, 0, 0), gives_up=False)._next_id()


OF_A_SCOPE: dict[str, Callable[[Scope], Any]] = {
    "kafka transactional id": kafka.id_prefix,
    "kafka ledger key": lambda s: Keys(s).key("owner"),
    "postgres gid": lambda s: postgres.id_prefix(s, "delivered"),
    "mysql xid": lambda s: mysql.id_prefix(s, "delivered"),
    "staging table": lambda s: Names(s, "delivered").staging_prefix,
    "rocketmq group": producer_group,
    "message id": message_id,
    "staged files": sink_folder,
    "delta application id": lambda s: DeltaNames(s).owner,
    "iceberg property": lambda s: IcebergNames(s).owner,
}


@pytest.mark.parametrize("what", OF_A_SCOPE)
@given(st.lists(SCOPE, min_size=2, max_size=30, unique=True))
def test_p33_scopes_give_different_ids(what: str, scopes: list[Scope]) -> None:
    found = [OF_A_SCOPE[what](scope) for scope in scopes]
    assert len({*found}) == len(found)
    if what not in ("kafka ledger key", "staged files", "message id", "delta application id", "iceberg property"):
        assert not any(a != b and a.startswith(b) for a in found for b in found), "looked up by prefix"


@pytest.mark.parametrize("what", ["staging table", "rocketmq group", "mysql xid"])
def test_p33_names_that_are_cut_or_hashed_differ(what: str) -> None:
    scopes = (Scope("p" * 64, f"{'s' * 55}{n}", "i") for n in range(200_000))
    assert len({OF_A_SCOPE[what](s) for s in scopes}) == 200_000


TEXT = st.text("ab./ é-0f", min_size=1, max_size=90) | st.text("a", min_size=60, max_size=70)


@given(st.lists(TEXT, min_size=2, max_size=20, unique=True))
def test_p33_texts_give_different_names(texts: list[str]) -> None:
    texts += [fitted_name(t) for t in texts]
    distinct = {*texts}
    for made in (fitted_name, queue_sink_name, lambda t: _pipeline_name({"queryName": t})):
        found = [made(t) for t in distinct]
        assert len({*found}) == len(found)
        assert all(checked_name("sink", n) for n in found)
    for suffix in (".replay-0123abcd", ".x"):
        assert len({derived_name(t, suffix) for t in distinct}) == len(distinct)


def test_a_short_name_stays_readable() -> None:
    assert (fitted_name("orders-eu.1"), derived_name("orders", ".x")) == ("orders-eu.1", "orders.x")
    topic = "t" * 51 + "-" + "0" * 16
    long = SinkOptions.parse({"kafka.bootstrap.servers": "h:1", "topic": topic}).default_name
    assert long != topic


@pytest.mark.parametrize(("dialect", "longest"), [("postgres", "é" * 31 + "x"), ("mysql", "é" * 64)])
def test_p33_a_table_whose_name_the_database_would_cut_is_refused(dialect: str, longest: str) -> None:
    """PostgreSQL took <dbtable>_positions of a table with 63 bytes for the table itself, and its rows for numbers."""
    assert longest in quoted(dialect, f"shop.{longest}")
    for name in (longest + "x", f"{longest}_positions", f"{longest}x.t"):
        with pytest.raises(UsageError, match=rf"allows {NAME_LENGTHS_MAX[dialect]}"):
            quoted(dialect, name)
