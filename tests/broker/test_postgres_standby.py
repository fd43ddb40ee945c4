"""Standbys of PostgreSQL: synchronous ones that are down, asynchronous ones that lack the last decisions."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from tests.broker.running import Running, judge, sink_of_pair
from tests.support.servers import paused

from delivered.connectors.postgres import CONNECTOR
from delivered.connectors.postgres.client import PostgresDatabase
from delivered.engine import decide
from delivered.model import patience
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, LedgerBehind, OutcomeUnknown
from delivered.model.work import Tolerance

if TYPE_CHECKING:
    from tests.support.servers import Postgres, PostgresPair

EXACT = Guarantee.EXACTLY_ONCE
WAITS = "a commit has waited"


@pytest.fixture(autouse=True)
def _in_query(_outside_of_a_query: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_in_query", True)


def until(fact: Callable[[], object], what: str, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_decision_waits_for_a_standby_that_stands_still_and_names_it(
    new_postgres_pair: Callable[..., PostgresPair], caplog: pytest.LogCaptureFixture
) -> None:
    pair = new_postgres_pair(synchronous=True)
    sink, table = sink_of_pair(pair, "one_transaction")
    assert [f for f in sink.preflight(EXACT) if f.code.startswith("STANDBY")] == []
    running = Running(sink)
    running.go_on()
    with caplog.at_level(logging.WARNING, "delivered.outage"), paused(pair.standby):
        until(lambda: WAITS in caplog.text, "the wait is reported")
        assert "synchronous_standby_names = 'standby1'; connected: standby1 (streaming, sync)" in caplog.text
        assert running.error is None
    running.go_on()
    judge(pair.primary, table, running.stop())


@pytest.mark.matrix
def test_a_wait_for_a_dead_standby_ends_unknown_and_the_next_start_finishes_the_batch(
    new_postgres_pair: Callable[..., PostgresPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled wait would commit at the primary alone: never cancelled, so what waits stays invisible."""
    pair = new_postgres_pair(synchronous=True)
    sink, table = sink_of_pair(pair, "one_transaction")
    running = Running(sink, batches=2)
    running.finish()
    plan = running.plan()
    shards = running.write(plan)
    monkeypatch.setattr(patience, "OUTAGE_PATIENCE_S", 8.0)
    monkeypatch.setattr(decide, "OUTAGE_PATIENCE_S", 8.0)
    pair.standby.broker.kill()
    with pytest.raises(OutcomeUnknown, match="DECISION_UNKNOWN") as caught:
        running.decide(plan, shards)
    assert re.search(r"a commit waited \d+ s for .*standby1.*then .*waits for a synchronous", str(caught.value))
    # Nobody cancelled a wait: no row is visible of a batch that the standby does not have.
    judge(pair.primary, table, running.position)
    assert "STANDBY_MISSING" in [f.code for f in sink.preflight(EXACT)]
    pair.standby.broker.restart()
    again = Running(sink, like=running)
    again.go_on()
    judge(pair.primary, table, again.stop())


@pytest.mark.parametrize(("default", "pinned"), [("off", "on"), ("local", "on"), ("remote_apply", "remote_apply")])
def test_sessions_pin_synchronous_commit_and_the_form_of_values(postgres: Postgres, default: str, pinned: str) -> None:
    hostile = {
        "synchronous_commit": default,
        "bytea_output": "escape",
        "extra_float_digits": "0",
        "datestyle": "German",
    }
    options = "%20".join(f"-c%20{k}%3D{v}" for k, v in hostile.items())
    sink = CONNECTOR.sink({"url": f"{postgres.url}?options={options}", "dbtable": postgres.table()})
    connection = PostgresDatabase(sink.options).connect("test")
    shown = "SELECT {}".format(", ".join(f"current_setting('{k}')" for k in hostile))
    with connection:
        assert connection.execute(shown).fetchone() == (pinned, "hex", "3", "ISO, YMD")


@pytest.mark.parametrize("mechanism", ["one_transaction"])
def test_after_a_lossy_fail_over_the_printed_way_loses_and_doubles_nothing(
    new_postgres_pair: Callable[..., PostgresPair], mechanism: str
) -> None:
    pair = new_postgres_pair(synchronous=False)
    sink, table = sink_of_pair(pair, mechanism)
    assert "STANDBY_ASYNCHRONOUS" in [f.code for f in sink.preflight(EXACT)]
    running = Running(sink, batches=3)
    running.finish()
    pair.catch_up()
    pair.standby.broker.stop()
    for _ in range(2):
        running.commit(running.plan())
    planned = running.plan()  # a batch that is running when the primary dies
    pair.primary.broker.kill()
    pair.standby.broker.restart()
    pair.fail_over()
    judge(pair.standby, table, 3 * running.SHARDS * running.ROWS)

    # It goes on at the new primary, and must not be decided over the gap.
    with pytest.raises(DeliveredError, match=r"LEDGER_BEHIND.*has lost it"):
        running.commit(planned)
    judge(pair.standby, table, 3 * running.SHARDS * running.ROWS)

    # The next start says how to go on.
    with pytest.raises(LedgerBehind) as caught:
        Running(sink, like=running).raised()
    said = str(caught.value.next_step)
    assert '.option("newCheckpoint", "accept")' in said
    found = re.search(r"""\.option\("startingOffsets", '([^']*)'\)""", said)
    assert found is not None, said
    followed = Running(
        sink, incarnation="i1", start=json.loads(found[1])["0"], tolerance=Tolerance(new_checkpoint=True), batches=4,
        rig=running.rig,
    )  # fmt: skip
    followed.finish()
    judge(pair.standby, table, followed.position)
    assert followed.position > running.position, "beyond what was lost"
    with suppress(Exception):
        running.context.close()
