"""An outbox, an at_least_once pipeline to Kafka and a consumer with an inbox: each effect once, whoever is killed."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.broker.outbox_help import shop
from tests.broker.outbox_process import run_process
from tests.kafka_tools import read_committed
from tests.support.zygote import Zygote

from delivered.inbox import ddl

MESSAGES = 30
POINTS = ["write.flush:after@batch=1", "commit.record:before@batch=3", "log:before@batch=5", "log:after@batch=7"]
"""Of the relay. Killed between the flush and the record, it sends the batch again."""
KILLS = [("before", 4), ("in", 9), ("in_late", 14), ("after", 19)]
"""Of the consumer, at a message."""


@pytest.mark.parametrize("variant", ["", "no_inbox"])
def test_an_at_least_once_pipeline_and_an_inbox_give_each_effect_once(
    variant: str, request: pytest.FixtureRequest, kafka: Any, tmp_path: Path, zygote: Zygote
) -> None:
    """The checker finds a consumer without an inbox."""
    box = shop(request, tmp_path, "sqlite-poll")
    effects = f"effects_{box.table}"
    box.execute(ddl("sqlite"), f"CREATE TABLE {effects} (n INTEGER, message VARCHAR(64))")
    sent, topic = box.send(*range(MESSAGES)), kafka.topic(1)
    zygote.load("outbox", "kafka")
    relay = {
        "outbox": {"url": box.url, "dbtable": box.table},
        "kafka": {"kafka.bootstrap.servers": kafka.bootstrap, "topic": topic},
        "checkpoint": str(tmp_path / "checkpoint"), "guarantee": "at_least_once", "rows_per_batch": 3,
    }  # fmt: skip
    kills, code = 0, -9
    while code:
        crash = ",".join(f"{p}!kill" for p in POINTS)
        code, error = zygote.run({**relay, "owner": f"owner-{kills}"}, tmp_path, crash)
        assert code in (0, -signal.SIGKILL), error
        kills += code != 0
    in_topic = Counter(dict(m.headers())["id"].decode() for m in read_committed(kafka.bootstrap, topic))
    assert set(in_topic) == set(sent)
    repeats = in_topic.total() - MESSAGES
    assert (kills, repeats > 0) == (len(POINTS), True), f"{kills} kills, {repeats} repeats: this shows nothing"

    consumer = {
        "role": "kafka_consumer", "dialect": box.dialect, "url": box.address, "inbox": "inbox", "effects": effects,
        "kafka": kafka.bootstrap, "topic": topic, "variant": variant,
    }  # fmt: skip
    for point, n in KILLS:
        assert run_process({**consumer, "point": point, "n": n})[0] == -9
    assert run_process({**consumer, "point": "", "n": -1})[0] == 0
    found = Counter(m for (m,) in box.execute(f"SELECT message FROM {effects}"))
    doubled = sum(n - 1 for n in found.values())
    assert set(found) == set(sent)
    assert bool(doubled) is bool(variant), f"{doubled} effects doubled"
