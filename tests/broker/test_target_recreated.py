"""A topic or table that is dropped and recreated while the pipeline is stopped, on real servers."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.kafka_tools import make_topic_anew
from tests.support.sinks import Rig

from delivered.connectors.kafka import CONNECTOR as KAFKA
from delivered.connectors.sqlite import CONNECTOR as SQLITE
from delivered.contract.sink import Sink
from delivered.model.errors import TargetChanged
from delivered.model.work import Tolerance

Anew = Callable[[], None]


def _kafka(request: pytest.FixtureRequest) -> tuple[Sink, Anew]:
    kafka: Any = request.getfixturevalue("kafka")
    topic = kafka.topic(2)
    return KAFKA.sink({"kafka.bootstrap.servers": kafka.bootstrap, "topic": topic}), lambda: make_topic_anew(
        kafka, topic, 2
    )


def _sqlite(request: pytest.FixtureRequest) -> tuple[Sink, Anew]:
    path = request.getfixturevalue("tmp_path") / "sink.db"

    def anew() -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("DROP TABLE orders")

    return SQLITE.sink({"path": str(path), "table": "orders"}), anew


def _server(request: pytest.FixtureRequest, system: str) -> tuple[Sink, Anew]:
    server: Any = request.getfixturevalue(system)
    table = server.table(None)
    return server.sink(table, ifNotExists="true"), lambda: server.execute(f"DROP TABLE {table}")


MADE: dict[str, Callable[[pytest.FixtureRequest], tuple[Sink, Anew]]] = {
    "kafka": _kafka,
    "sqlite": _sqlite,
    "postgres": lambda request: _server(request, "postgres"),
    "mysql": lambda request: _server(request, "mysql"),
}


@pytest.mark.parametrize("system", MADE)
def test_the_next_start_says_so_and_writes_nothing(request: pytest.FixtureRequest, system: str) -> None:
    sink, make_anew = MADE[system](request)
    rig = Rig(sink)
    for batch in range(2):
        made = rig.run(batch)
        assert made is not None
        assert made.targets
    make_anew()
    with pytest.raises(TargetChanged, match=r"batch 1 was written to .* 200 records") as caught:
        rig.plan(rig.context("second"), 2)
    assert made.targets[rig.scope.sink] in caught.value.message
    with pytest.raises(TargetChanged):  # nor does it continue after another restart
        rig.plan(rig.context("third"), 2)
    accepted = replace(rig.context("fourth"), tolerance=Tolerance(new_target=True))
    rig.run(2, accepted)
    rig.run(3, rig.context("fifth"))
    deadline = time.monotonic() + 60
    while rig.visible() != rig.expected(2, 3):  # a coordinator may not know the new topic yet
        assert time.monotonic() < deadline, (rig.visible(), rig.expected(2, 3))


REBUILT = {
    "sqlite": ("CREATE TABLE other (key BLOB, value BLOB)", "INSERT INTO other SELECT * FROM orders",
               "DROP TABLE orders", "ALTER TABLE other RENAME TO orders"),
    "mysql": ("ALTER TABLE {} COMMENT = 'rows of the shop'",),
}  # fmt: skip


@pytest.mark.parametrize("system", REBUILT)
def test_a_table_whose_id_a_migration_removed_is_not_called_dropped(
    request: pytest.FixtureRequest, system: str, tmp_path: Path
) -> None:
    sink, _ = MADE[system](request)
    rig: Any = Rig(sink)
    rig.run(0)
    if system == "sqlite":
        with closing(sqlite3.connect(tmp_path / "sink.db")) as connection:
            for statement in REBUILT[system]:
                connection.execute(statement)
            connection.commit()
    else:
        request.getfixturevalue(system).execute(REBUILT[system][0].format(rig.sink.options.table))
    with pytest.raises(TargetChanged, match=r"a comment in its definition, which a migration may have removed"):
        rig.plan(rig.context("second"), 1)
    rig.run(1, replace(rig.context("third"), tolerance=Tolerance(new_target=True)))
    rig.run(2, rig.context("fourth"))
    assert rig.visible() == rig.expected(0, 1, 2)


SPELLINGS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "sqlite": ({"path": "{}/real/s.db", "table": "t"}, {"path": "{}/link/s.db", "table": "T"}),
    "files": ({"path": "{}/real/rows"}, {"path": "{}/link/rows"}),
    "delta": ({"path": "{}/real/rows"}, {"path": "{}/link/rows"}),
    "postgres": ({"dbtable": "public.spelt"}, {"dbtable": "spelt", "url": "{url}?options=-csearch_path%3Dpublic"}),
    "mysql": ({"dbtable": "spelt"}, {"dbtable": "dev.spelt"}),
}


@pytest.mark.parametrize("system", SPELLINGS)
def test_another_spelling_is_the_same_target(request: pytest.FixtureRequest, system: str, tmp_path: Path) -> None:
    """With an external ledger, as in a group, so that only the target's spelling differs."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    server = {}
    if system in ("postgres", "mysql"):
        server = {"url": request.getfixturevalue(system).url, "ifNotExists": "true"}
    connector = import_module(f"delivered.connectors.{system}").CONNECTOR
    one, other = (
        connector.sink(
            {**server, **{name: value.format(tmp_path, url=server.get("url")) for name, value in options.items()}}
        )
        for options in SPELLINGS[system]
    )
    rig = Rig(one)
    assert rig.run(0) is not None
    known, spelt = (sink.committer(rig.scope).targets()[rig.scope.sink] for sink in (one, other))
    assert known.id == spelt.id
    assert known.name != spelt.name


def test_a_copy_of_a_table_made_by_like_is_another_one(mysql: Any) -> None:
    """The copy has the comment with the id, but none of the rows."""
    table, copy = mysql.table(None), mysql.table(None)
    sink = mysql.sink(table, ifNotExists="true")
    rig = Rig(sink)
    rig.run(0)
    mysql.execute(f"CREATE TABLE {copy} LIKE {table}")
    (known,), (of_copy,) = (s.committer(rig.scope).targets().values() for s in (sink, mysql.sink(copy)))
    assert known.id != of_copy.id


def test_a_table_that_others_make_anew_without_our_mark_is_noticed(mysql: Any) -> None:
    table = mysql.table(None)
    rig = Rig(mysql.sink(table, ifNotExists="true"))
    rig.run(0)
    mysql.execute(f"ALTER TABLE {table} ADD COLUMN more int, FORCE")  # rewrites every row, but stays the same table
    rig.run(1)
    mysql.execute(f"DROP TABLE {table}")
    mysql.execute(f"CREATE TABLE {table} (`key` longblob, value longblob)")
    with pytest.raises(TargetChanged, match="none with that id is there now"):
        rig.plan(rig.context("second"), 2)


def test_a_sqlite_table_that_was_altered_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "sink.db"
    rig = Rig(SQLITE.sink({"path": str(path), "table": "orders"}))
    rig.run(0)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE orders ADD COLUMN more")
        connection.execute("ALTER TABLE orders RENAME COLUMN more TO other")
        connection.execute("VACUUM")
    made = rig.run(1)
    assert made is not None
    assert made.targets
