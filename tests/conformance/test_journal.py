"""A receiver's log in an object store."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.journal import messages, race

from delivered.connectors.log import CONNECTOR
from delivered.connectors.log.produce import LogJournal
from delivered.contract.source import Entered
from delivered.model.work import Ok


def test_a_log_in_an_object_store(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same: append, race, restart, upkeep."""
    path = "s3://lake/receivers/log"
    storage = {k.removeprefix("storage."): v for k, v in s3.items()}

    def open_there(**options: Any) -> LogJournal:
        return LogJournal(path, storage, 5, **options)

    journal = open_there()
    for n in range(3):
        assert journal.append(messages(*(f"{n}{i}" for i in range(5)))) == Ok(Entered(5, 0))
    other = open_there()
    race(monkeypatch, lambda: other.append(messages("20", "a", "b")))
    assert journal.append(messages("24", "a", "c")) == Ok(Entered(1, 2, tries=2))
    kept = open_there(readers=("orders",), keep_s=0)
    assert kept.maintain() == 0
    source = CONNECTOR.source({"path": path, "reader": "orders", **s3})
    driver = source.driver()
    driver.acknowledge(driver.newest() or {})
    assert kept.maintain() == 10
    pieces = driver.slices(*driver.batch())
    found = [v for p in pieces for b in source.read(p) for v in b.column("value").to_pylist()]
    assert found == [f"value of {i}".encode() for i in ("20", "21", "22", "23", "24", "a", "b", "c")]
    assert open_there().append(messages("23", "a", "c", "24")) == Ok(Entered(0, 4))
