"""A change stream whose table changes: columns, types, identity, partitions, publication. Only what is null is null."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from tests.broker.outbox_help import Shop, Stream, Table, changed, read
from tests.support.sweeps import sweep

import delivered
from delivered.connectors.outbox import CONNECTOR
from delivered.contract.source import Source
from delivered.model.errors import BadRecord, DeliveredError, InvariantBroken, Refused
from delivered.planner import Plan, Refusal


@pytest.fixture
def orders(postgres_log: Any) -> Table:
    return Table(postgres_log, "id int PRIMARY KEY, name text, old text")


def started(table: Table, **options: str) -> Stream:
    """At the end of a batch that had a row."""
    stream = table.stream(**options)
    stream.batch()
    table.execute("INSERT INTO {} (id, name) VALUES (0, 'zero')")
    assert rows(stream)
    return stream


def rows(stream: Stream) -> list[tuple[Any, ...]]:
    """Of the next batch, by name."""
    found = stream.batch()
    assert found is not None
    assert found.schema.names[-3:] == ["_op", "_deleted", "_lsn"]
    return [tuple(row.values()) for row in found.drop_columns(["_lsn", "_deleted"]).to_pylist()]


def position(error: Any) -> str:
    """That which the error says may be accepted."""
    found = re.search(r'"schemaChange", "([0-9A-F]+/[0-9A-F]+)"', error.value.next_step)
    assert found is not None, error.value.next_step
    return found[1]


def goes_on(table: Table, stream: Stream, code: str, match: str = "") -> Stream:
    """The query stops with this error at every start, until the user accepts it; then nothing was skipped."""
    said = set[str]()
    for again in (stream, table.stream(stream.at), table.stream(stream.at)):
        with pytest.raises(DeliveredError, match=code) as error:
            again.batch()
        assert re.search(match, str(error.value)), str(error.value)
        said.add(position(error))
        again.close()
    (only,) = said
    return table.stream(stream.at, schemaChange=only)


def restarted(table: Table, stream: Stream, match: str, **options: str) -> Stream:
    """It takes the columns of the next rows when it starts again."""
    with pytest.raises(BadRecord, match=f"OUTBOX_COLUMNS.*{match}.*restart"):
        stream.batch()
    stream.close()
    return table.stream(stream.at, **options)


def test_rows_from_before_a_column_was_dropped_arrive_with_it(orders: Table) -> None:
    stream = orders.stream()
    stream.batch()
    orders.execute("INSERT INTO {} VALUES (1, 'a', 'x')")
    orders.execute("ALTER TABLE {} DROP old")
    orders.execute("INSERT INTO {} VALUES (2, 'b')", "UPDATE {} SET name = 'c' WHERE id = 1")
    stream.close()
    again = orders.stream(stream.at)  # planned after the column was dropped
    assert rows(again) == [(1, "a", "x", "insert")], "the shape that the row had, and no other one"
    last = restarted(orders, again, "no column old")
    assert rows(last) == [(2, "b", "insert"), (1, "c", "update")], "left out, not null"
    assert last.batch() is None
    last.close()


@pytest.mark.parametrize(
    ("alter", "said", "then", "after"),
    sweep([
        ("RENAME name TO title", "column name was renamed to title", "(1, 'a', 'x')", (1, "a", "x")),
        ("ALTER name TYPE int USING 7", "column name changed from text to integer", "(1, 8, 'x')", (1, 8, "x")),
        ("REPLICA IDENTITY FULL", "replica identity changed from id to id, name, old", "(1, 'a', 'x')", (1, "a", "x")),
        ("ADD more int DEFAULT 7", "column more was added", "(1, 'a', 'x')", (1, "a", "x", 7)),
        ("DROP old, ADD new int", "column old was dropped; the column new was added", "(1, 'a', 3)", (1, "a", 3)),
    ], lambda alter, *_: alter.startswith(("RENAME", "ADD"))),
)  # fmt: skip
def test_a_changed_table_stops_the_query_until_that_is_accepted(
    orders: Table, alter: str, said: str, then: str, after: tuple[Any, ...]
) -> None:
    stream = started(orders)
    orders.execute("UPDATE {} SET old = 'y'")
    orders.execute(f"ALTER TABLE {{}} {alter}")
    orders.execute(f"INSERT INTO {{}} VALUES {then}")
    assert rows(stream) == [(0, "zero", "y", "update")], "all that was written before is delivered first"
    again = goes_on(orders, stream, "OUTBOX_SCHEMA", said)
    assert rows(again) == [(*after, "insert")]
    orders.execute("ALTER TABLE {} RENAME id TO number")
    orders.execute("DELETE FROM {} WHERE number = 1")
    with pytest.raises(InvariantBroken, match=r"OUTBOX_SCHEMA.*renamed to number"):
        again.batch()  # a later change is not accepted with it
    again.close()
    new = orders.stream(again.at, schemaChange="new")
    assert [(row[0], row[-1]) for row in rows(new)] == [(1, "delete")]
    assert new.batch() is None
    new.close()


def test_a_column_that_was_dropped_and_added_again_is_another_one(orders: Table) -> None:
    """The log has the same shape before and after, and no values of the rows that were there."""
    stream = started(orders)
    orders.execute("ALTER TABLE {} DROP old, ADD old text")
    orders.execute("INSERT INTO {} VALUES (1, 'a', 'x')")
    again = goes_on(orders, stream, "OUTBOX_SCHEMA", "column old was dropped and added again")
    assert rows(again) == [(1, "a", "x", "insert")]
    assert again.batch() is None
    again.close()


def test_rows_of_a_transaction_that_changed_its_table_have_both_shapes(orders: Table) -> None:
    stream = started(orders)
    orders.execute(
        "INSERT INTO {} VALUES (1, 'a', 'x')", "ALTER TABLE {} DROP old", "INSERT INTO {} VALUES (2, 'b')"
    )  # fmt: skip
    again = restarted(orders, stream, "no column old")
    assert rows(again) == [(1, "a", "x", "insert"), (2, "b", None, "insert")]
    again.close()


def test_a_truncated_table_stops_the_query_until_the_sinks_is_too(orders: Table) -> None:
    stream = started(orders)
    orders.execute("INSERT INTO {} VALUES (1, 'a', 'x')")
    orders.execute("INSERT INTO {} VALUES (2, 'b', 'x')", "TRUNCATE {}", "INSERT INTO {} VALUES (3, 'c', 'x')")
    assert rows(stream) == [(1, "a", "x", "insert")]
    again = goes_on(orders, stream, "OUTBOX_TRUNCATED")
    assert rows(again) == [(3, "c", "x", "insert")], "what the transaction truncated is not there"
    orders.execute("TRUNCATE {}")
    with pytest.raises(BadRecord, match="OUTBOX_TRUNCATED"):
        again.batch()
    again.close()


@pytest.fixture
def parts(postgres_log: Any) -> Table:
    table = Table(postgres_log, "id int PRIMARY KEY, name text) PARTITION BY RANGE (id")
    table.execute("CREATE TABLE {0}_p PARTITION OF {0} FOR VALUES FROM (0) TO (10)")
    return table


@pytest.mark.parametrize(
    ("statement", "said"),
    sweep(
        [("ALTER TABLE {0} DETACH PARTITION {0}_p", "_p was detached"), ("DROP TABLE {0}_p", "was dropped")],
        lambda statement, _: "DETACH" in statement,
    ),
)
def test_partitions_that_leave_with_their_rows(parts: Table, statement: str, said: str) -> None:
    stream = started(parts)
    parts.execute("CREATE TABLE {0}_q PARTITION OF {0} FOR VALUES FROM (10) TO (20)")
    parts.execute("INSERT INTO {} VALUES (11, 'a')")
    assert rows(stream) == [(11, "a", "insert")], "an empty partition is no change of rows"
    parts.execute(statement)
    parts.execute("INSERT INTO {} VALUES (12, 'b')")
    again = goes_on(parts, stream, "OUTBOX_PARTITIONS", said)
    assert rows(again) == [(12, "b", "insert")]
    parts.execute("INSERT INTO {} VALUES (13, 'c')")
    assert rows(again) == [(13, "c", "insert")]
    again.close()


@pytest.mark.parametrize("together", sweep([False, True], bool))
def test_a_partition_that_comes_with_rows(parts: Table, together: bool) -> None:
    stream = started(parts)
    statements = ["CREATE TABLE {0}_q (LIKE {0} INCLUDING ALL)", "INSERT INTO {}_q VALUES (11, 'a')",
                  "ALTER TABLE {0} ATTACH PARTITION {0}_q FOR VALUES FROM (10) TO (20)"]  # fmt: skip
    for some in [statements] if together else [[s] for s in statements]:
        parts.execute(*some)
    parts.execute("CREATE TABLE {0}_r PARTITION OF {0} FOR VALUES FROM (20) TO (30)", "INSERT INTO {} VALUES (21, 'b')")
    again = goes_on(parts, stream, "OUTBOX_PARTITIONS", "_q was attached with rows[.]")
    assert rows(again) == [(21, "b", "insert")]
    again.close()


def test_a_truncated_partition_is_stated_and_replicas_sessions_are_carried(parts: Table) -> None:
    source = parts.source()
    assert any("truncated by its own name" in text for text in source.capability().assumes)
    stream = started(parts)
    parts.execute("SET session_replication_role = replica", "INSERT INTO {} VALUES (2, 'b')")
    assert rows(stream) == [(2, "b", "insert")]
    stream.close()


@pytest.mark.parametrize(
    ("columns", "statements", "said"),
    sweep([
        ("id int, name text) PARTITION BY RANGE (id",
         ["CREATE TABLE {0}_p PARTITION OF {0} (PRIMARY KEY (id)) FOR VALUES FROM (0) TO (9)",
          "CREATE TABLE {0}_q PARTITION OF {0} (PRIMARY KEY (name)) FOR VALUES FROM (10) TO (99)"],
         "_q .*primary key .name., where another one has .id."),
        ("id int PRIMARY KEY, name text) PARTITION BY RANGE (id",
         ["CREATE TABLE {0}_p PARTITION OF {0} FOR VALUES FROM (0) TO (9)",
          "ALTER TABLE {0}_p REPLICA IDENTITY NOTHING"], "_p .*IDENTITY NOTHING"),
        ("id int PRIMARY KEY, name text) PARTITION BY RANGE (id",
         ["CREATE UNLOGGED TABLE {0}_p PARTITION OF {0} FOR VALUES FROM (0) TO (9)"], "_p .*is not logged"),
        ("id int PRIMARY KEY, name text NOT NULL",
         ["CREATE UNIQUE INDEX {0}_i ON {0} (name) INCLUDE (id)",
          "ALTER TABLE {0} REPLICA IDENTITY USING INDEX {0}_i"], "lacks columns of the primary key"),
    ], lambda _, __, said: "another one" in said),
)  # fmt: skip
def test_the_sinks_key_is_checked_against_each_identity(
    postgres_log: Any, columns: str, statements: list[str], said: str
) -> None:
    table = Table(postgres_log, columns)
    table.execute(*statements)
    (finding,) = [f for f in table.source().preflight() if f.refuses]
    assert finding.code == "OUTBOX_IDENTITY"
    assert re.search(said, finding.message), finding.message


@pytest.mark.parametrize(
    ("columns", "then"),
    sweep([
        ("id int PRIMARY KEY, name text", "ALTER TABLE {} REPLICA IDENTITY FULL"),
        ("id int, name text, PRIMARY KEY (id) INCLUDE (name)", "ALTER TABLE {} REPLICA IDENTITY FULL"),
        ("id int PRIMARY KEY, name text UNIQUE NOT NULL",
         "CREATE UNIQUE INDEX {0}_i ON {0} (name, id); ALTER TABLE {0} REPLICA IDENTITY USING INDEX {0}_i"),
        ("id int, name text) PARTITION BY RANGE (id",
         "CREATE TABLE {0}_p PARTITION OF {0} (PRIMARY KEY (id)) FOR VALUES FROM (0) TO (9)"),
        ("id int PRIMARY KEY, name text) PARTITION BY RANGE (id",
         "CREATE TABLE {0}_p PARTITION OF {0} FOR VALUES FROM (0) TO (9); "
         "ALTER TABLE {0} REPLICA IDENTITY NOTHING"),
    ], lambda columns, then: "INCLUDE" in columns or "NOTHING" in then),
)  # fmt: skip
def test_a_changed_key_leaves_no_row_behind_and_only_that_is_a_delete(
    postgres_log: Any, columns: str, then: str
) -> None:
    table = Table(postgres_log, columns)
    table.execute(*then.split("; "))
    stream = started(table)
    table.execute("UPDATE {} SET name = 'b'")
    table.execute("UPDATE {} SET id = 5")
    found = stream.batch()
    assert found is not None
    by_key = [(row[0], row[2]) for row in changed(found)]
    assert by_key == [(0, "update"), (0, "delete"), (5, "update")]
    stream.close()


def test_a_key_or_an_identity_that_is_lost_later_is_a_problem_of_the_status_and_a_stop(orders: Table) -> None:
    stream = started(orders)
    source = orders.source()
    source.recheck()
    orders.execute("ALTER TABLE {0} DROP CONSTRAINT {0}_pkey")
    with pytest.raises(Refused, match=r"OUTBOX_IDENTITY.*no primary key.*continues where it stood"):
        source.recheck()
    orders.execute("INSERT INTO {} VALUES (1, 'a', 'x')")
    with pytest.raises(Refused, match="OUTBOX_IDENTITY"):
        stream.batch()
    orders.execute("ALTER TABLE {} ADD PRIMARY KEY (id)")
    source.recheck()
    again = goes_on(orders, stream, "OUTBOX_SCHEMA", "identity changed from id to nothing")
    assert rows(again) == [(1, "a", "x", "insert")]
    again.close()


def test_a_plan_compares_the_sinks_key_and_a_status_tells_what_was_lost(orders: Table, tmp_path: Path) -> None:
    def pipeline(key: str, **more: Any) -> Any:
        copy = delivered.sqlite(str(tmp_path / "a.db"), "copy", mode="upsert", keyColumns=key, ifNotExists=True)
        source = delivered.endpoint("outbox", url=orders.server.url, table=orders.name)
        return delivered.Pipeline(
            name="copy", guarantee="exactly_once", checkpoint=tmp_path / "c", source=source, sinks=[copy], **more
        )

    refused = pipeline("name").plan()
    assert isinstance(refused, Refusal)
    assert refused.error.code == "DELIVERED_CHANGE_KEY"
    assert 'keyColumns to "id"' in str(refused.way_out)
    assert isinstance(pipeline("id").plan(), Plan)
    by_sql = pipeline("name", transform="SELECT id AS name, _lsn, _deleted FROM source").plan()
    assert isinstance(by_sql, Plan)
    assert any("would leave rows behind" in text for text in by_sql.warnings)

    assert "OUTBOX_IDENTITY" not in str(pipeline("id").status().problems)
    orders.execute("ALTER TABLE {0} DROP CONSTRAINT {0}_pkey")
    (problem,) = [p for p in pipeline("id").status().problems if p.code == "DELIVERED_OUTBOX_IDENTITY"]
    assert "no primary key" in problem.text
    assert problem.next_step


def test_a_delete_whose_row_the_log_does_not_name_is_not_taken_for_one_of_null(orders: Table) -> None:
    """The identity was another one for a while, and no batch ran meanwhile."""
    stream = started(orders)
    orders.execute("ALTER TABLE {} ALTER name SET NOT NULL, ADD UNIQUE (name)")
    orders.execute("ALTER TABLE {0} REPLICA IDENTITY USING INDEX {0}_name_key", "DELETE FROM {}")
    orders.execute("ALTER TABLE {} REPLICA IDENTITY DEFAULT")
    orders.execute("INSERT INTO {} VALUES (1, 'a', 'x')")
    stream.close()
    again = orders.stream(stream.at, schemaChange="new")
    with pytest.raises(BadRecord, match=r"OUTBOX_IDENTITY.*key column id") as error:
        again.batch()
    again.close()
    last = orders.stream(again.at, schemaChange=position(error))
    assert rows(last) == []
    end = goes_on(orders, last, "OUTBOX_SCHEMA", "identity changed from name to id")
    assert rows(end) == [(1, "a", "x", "insert")]
    end.close()


def test_columns_that_a_publication_does_not_list_are_left_out_and_said(orders: Table) -> None:
    slot = f"delivered_{orders.name}"
    orders.execute(f"CREATE PUBLICATION {slot} FOR TABLE {{}} (id, name)")
    source = orders.source()
    assert [(f.code, "old" in f.message, f.refuses) for f in source.preflight()] == [("OUTBOX_COLUMNS", True, False)]
    stream = started(orders)
    orders.execute("INSERT INTO {} VALUES (1, 'a', 'x')")
    assert rows(stream) == [(1, "a", "insert")]
    orders.execute(f"ALTER PUBLICATION {slot} SET TABLE {{}} (id, old)")
    orders.execute("INSERT INTO {} VALUES (2, 'b', 'y')")
    again = goes_on(orders, stream, "OUTBOX_SCHEMA", "name was renamed to old")
    assert rows(again) == [(2, "y", "insert")]
    again.close()
    orders.execute(f"ALTER PUBLICATION {slot} SET TABLE {{}} (name)")
    (finding,) = [f for f in orders.source().preflight() if f.refuses]
    assert (finding.code, "column id" in finding.message) == ("OUTBOX_PUBLICATION", True)


def test_a_column_that_the_log_never_has_is_refused_for_an_outbox(postgres_log: Any) -> None:
    box = Shop("postgres", postgres_log.url, postgres_log.url, "log")
    box.execute(
        f"DROP TABLE {box.table}",
        f"CREATE TABLE {box.table} (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, n int, "
        "payload text GENERATED ALWAYS AS (n::text) STORED)",
    )
    (finding,) = [f for f in box.source().preflight() if f.refuses]
    assert (finding.code, "payload" in finding.message, "generated" in finding.message) == (
        "OUTBOX_PUBLICATION",
        True,
        True,
    )
    assert [f for f in box.source(method="poll").preflight() if f.refuses] == []
    box.execute(f"CREATE PUBLICATION delivered_{box.table} FOR TABLE {box.table} (id, n)")
    (finding,) = [f for f in box.source(columns="payload=n").preflight() if f.refuses]
    assert "aggregatetype" in finding.message


@pytest.mark.parametrize("changes", sweep([True, False], bool))
def test_partitions_that_are_published_as_tables_of_their_own(postgres_log: Any, changes: bool) -> None:
    """The advice names what is wrong; what was logged meanwhile is not lost."""
    table = Table(
        postgres_log,
        "id int PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text) PARTITION BY RANGE (id",
    )
    table.execute("CREATE TABLE {0}_p PARTITION OF {0} FOR VALUES FROM (0) TO (10)")
    slot = f"delivered_{table.name}"
    table.execute(f"CREATE PUBLICATION {slot} FOR TABLE {{}}")
    name = "table" if changes else "dbtable"

    def source() -> Source:

        return CONNECTOR.source({"url": postgres_log.url, name: table.name}).planned()

    (finding,) = [f for f in source().preflight() if f.refuses]
    assert finding.code == "OUTBOX_PUBLICATION"
    advice = str(finding.next_step)
    assert "publish_via_partition_root = true" in advice
    table.execute(advice)
    stream = Stream(source())
    stream.batch()
    table.execute("INSERT INTO {} (id) VALUES (1)")
    table.execute(f"ALTER PUBLICATION {slot} SET (publish_via_partition_root = false)")
    table.execute("INSERT INTO {} (id) VALUES (2)")
    with pytest.raises(Refused, match=r"OUTBOX_PUBLICATION.*publish_via_partition_root"):
        stream.batch()
    table.execute(advice)
    table.execute("INSERT INTO {} (id) VALUES (3)")
    found = stream.batch()
    assert found is not None
    assert found.num_rows == 3
    stream.close()


def test_a_last_row_that_was_logged_as_a_partition_is_found_again(
    postgres_log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that stands before it, after a crash of the server, is read from there again."""
    from delivered.connectors.outbox import slot as peek

    table = Table(
        postgres_log,
        "id int PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text) PARTITION BY RANGE (id",
    )
    table.execute("CREATE TABLE {0}_p PARTITION OF {0} FOR VALUES FROM (0) TO (10)")
    source = CONNECTOR.source({"url": postgres_log.url, "dbtable": table.name})
    stream = Stream(source)
    stream.batch()
    change = f"ALTER PUBLICATION delivered_{table.name} SET (publish_via_partition_root = {{}})".format
    table.execute(change("false"))
    table.execute("INSERT INTO {} (id) VALUES (1)")
    table.execute(change("true"))
    end = stream.driver.latest(stream.at, None)

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(peek, "advance", dies)
    with pytest.raises(KeyboardInterrupt):
        stream.driver.acknowledge(end)
    stopped: Any = stream.driver
    known = stopped.landmarks(end)
    assert known
    stream.close()
    again: Any = source.driver()
    with contextlib.closing(again):
        again.check_landmarks(end, known)


def test_a_batch_is_read_although_a_plan_looks_at_the_slot(orders: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    import psycopg

    from delivered.connectors.outbox import slot as peek

    stream = started(orders)
    orders.execute("INSERT INTO {} (id) VALUES (1)")
    end, slot = stream.driver.latest(stream.at, None), f"delivered_{orders.name}"
    look = f"START_REPLICATION SLOT {slot} LOGICAL 0/0 (proto_version '1', publication_names '{slot}')"
    with contextlib.closing(psycopg.connect(orders.server.url, replication="database")) as other:
        assert other.pgconn.exec_(look.encode()).status == psycopg.pq.ExecStatus.COPY_BOTH

        class Met(peek.SlotInUse):
            def __init__(self, *given: str, **more: str) -> None:
                other.close()
                super().__init__(*given, **more)

        monkeypatch.setattr(peek, "SlotInUse", Met)
        assert [r[0] for r in changed(read(stream.source, stream.at, end))] == [1]
        assert other.closed
    stream.close()
