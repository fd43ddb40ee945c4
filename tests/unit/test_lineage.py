"""OpenLineage events: names of datasets, and a server that does not answer."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import delivered
from delivered.operate import lineage
from delivered.operate.lineage import Lineage
from delivered.pipeline.endpoint import Endpoint, datasets

TRANSPORT = "OPENLINEAGE__TRANSPORT"


@pytest.fixture(autouse=True)
def _configured_anew() -> Iterator[None]:
    lineage.configured.cache_clear()
    yield
    lineage.configured.cache_clear()


@pytest.mark.parametrize(
    ("system", "options", "expected"),
    [
        ("kafka", {"kafka.bootstrap.servers": "a:9092,b:9092", "subscribe": "x, y"},
         [("kafka://a:9092", "x"), ("kafka://a:9092", "y")]),
        ("kafka", {"kafka.bootstrap.servers": "a:9092", "assign": '{"x": [0, 1]}'}, [("kafka://a:9092", "x")]),
        ("spark:kafka", {"kafka.bootstrap.servers": "a:9092", "subscribe": "x"}, [("kafka://a:9092", "x")]),
        ("postgres", {"url": "jdbc:postgresql://ann@db/shop?sslmode=require", "dbtable": '"sales".orders'},
         [("postgres://db:5432", "shop.sales.orders")]),
        ("postgres", {"url": "postgresql://db:5433/shop", "dbtable": "orders"},
         [("postgres://db:5433", "shop.public.orders")]),
        ("mysql", {"url": "mysql://db/shop", "dbtable": "orders"}, [("mysql://db:3306", "shop.orders")]),
        ("sqlite", {"path": "/data/a.db", "table": "orders"}, [("file", "/data/a.db/orders")]),
        ("delta", {"path": "s3://bucket/lake/orders"}, [("s3://bucket", "lake/orders")]),
        ("iceberg", {"catalog.uri": "http://rest:8181", "table": "db.orders"}, [("http://rest:8181", "db.orders")]),
        ("iceberg", {"catalog.uri": "postgresql+psycopg://ann@db/lake?connect_timeout=3", "table": "db.orders"},
         [("postgresql+psycopg://db/lake", "db.orders")]),
        ("rabbitmq", {"url": "amqp://guest@mq/shop", "queue": "orders"}, [("rabbitmq://mq", "orders")]),
        ("pulsar", {"url": "pulsar://p:6651", "topics": "orders"}, [("pulsar://p:6651", "orders")]),
        ("rocketmq", {"endpoints": "r1:8081;r2:8081", "topic": "orders"}, [("rocketmq://r1:8081", "orders")]),
    ],
)  # fmt: skip
def test_datasets_are_named_as_openlineage_says(
    system: str, options: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    assert list(datasets(Endpoint(system, options))) == expected


def pipeline(folder: Path) -> delivered.Pipeline:
    return delivered.Pipeline(
        name="orders", guarantee="exactly_once", checkpoint=folder / "checkpoint", lineage=True,
        source=delivered.log(str(folder / "in")), sinks=[delivered.sqlite(str(folder / "out.db"), table="orders")],
    )  # fmt: skip


def test_a_failed_run_and_a_broken_audit_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = tmp_path / "events.jsonl"
    monkeypatch.setenv(TRANSPORT, json.dumps({"type": "file", "log_file_path": str(events), "append": True}))
    run = Lineage(pipeline(tmp_path), lineage.new_run())
    run.ended({"main": 7}, "the disk is full")
    counts = {"sent": 9, "delivered": 7, "lost": 2, "duplicated": 0, "altered": 0}
    run.audited({"sink": "orders", "verdict": "broken", "counts": counts})
    lineage._sender().submit(int).result()  # after the two
    failed, audited = map(json.loads, events.read_text().splitlines())
    assert failed["eventType"] == "FAIL"
    assert failed["run"]["facets"]["errorMessage"]["message"] == "the disk is full"
    assert {t["key"]: t["value"] for t in failed["job"]["facets"]["tags"]["tags"]} == {
        "delivery.guarantee": "exactly_once"
    }
    (sink,) = (i for i in audited["inputs"] if i["inputFacets"])
    assertions = {a["assertion"]: a["success"] for a in sink["inputFacets"]["dataQualityAssertions"]["assertions"]}
    assert assertions == {
        "delivery.guarantee": False, "delivery.lost": False, "delivery.duplicated": True, "delivery.altered": True
    }  # fmt: skip


def test_a_server_that_does_not_answer_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transport = {"type": "http", "url": "http://127.0.0.1:1", "timeout": 1, "retry": {"total": 0}}
    monkeypatch.setenv(TRANSPORT, json.dumps(transport))
    caplog.set_level(logging.WARNING, "delivered")
    Lineage(pipeline(tmp_path), lineage.new_run()).started()
    lineage._sender().submit(int).result()
    assert "a lineage event was not sent; the pipeline goes on" in caplog.text
