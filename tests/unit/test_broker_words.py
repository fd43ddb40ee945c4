"""The output of `brokers start` and `status` can be pasted as is."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from delivered.cli.main import app
from delivered.pipeline.endpoint import Endpoint, as_text
from delivered_lab import brokers
from delivered_lab.brokers.servers import SERVERS, State


def stopped(kind: str, folder: Path) -> str:
    State(
        kind,
        {n: f"127.0.0.1:{9000 + i}" for i, n in enumerate(SERVERS[kind].listeners({"tls": False, "scram": {}}))},
        {},
    ).save(folder)
    return str(brokers.status(folder).url)


@pytest.mark.parametrize("kind", brokers.KINDS)
def test_the_line_for_a_pipeline_file_is_one(kind: str, tmp_path: Path) -> None:
    url = stopped(kind, tmp_path)
    given = yaml.safe_load(str(brokers.status(tmp_path).pipeline))
    assert url in given.values(), "the whole address"
    made = Endpoint(given.pop("format"), {k: as_text(k, v) for k, v in given.items()})
    assert made.sink() if kind in ("postgres", "mysql", "mariadb") else made.source()


def test_a_server_moves_to_the_port_that_is_asked_for() -> None:
    kafka = State("kafka", {"PLAINTEXT": "127.0.0.1:20000", "CONTROLLER": "127.0.0.1:20001"}, {})
    assert brokers._at(kafka, None) is kafka
    moved = brokers._at(kafka, 9092).listeners
    assert moved == {"PLAINTEXT": "127.0.0.1:9092", "CONTROLLER": "127.0.0.1:20001"}


def test_what_postgres_is_reached_by_is_a_url(tmp_path: Path) -> None:
    assert stopped("postgres", tmp_path) == "postgresql://delivered@127.0.0.1:9000/delivered"
    said = CliRunner().invoke(app, ["brokers", "status", "postgres", "--folder", str(tmp_path)]).output
    assert "postgresql://delivered@127.0.0.1:9000/delivered" in said
