"""MariaDB started by `delivered.brokers`: where it listens, what survives a kill."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from delivered import brokers
from delivered.model.errors import DeliveredError

if TYPE_CHECKING:
    from tests.support.servers import Mysql


def test_listens_on_127_0_0_1_only(mysql: Mysql) -> None:
    server = psutil.Process(mysql.broker.pid)
    listening = {c.laddr for c in server.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert {a.ip for a in listening} == {"127.0.0.1"}
    status = brokers.status(mysql.broker.folder)
    assert (status.running, status.answering, status.pid) == (True, True, mysql.broker.pid)
    assert status.bootstrap == mysql.broker.bootstrap
    assert mysql.execute("SELECT current_user(), database(), @@character_set_server") == [
        ("delivered@127.0.0.1", "dev", "utf8mb4")
    ]


def test_killed_and_restarted_keeps_data_port_and_settings(new_mysql: Callable[..., Mysql]) -> None:
    own = new_mysql(max_connections="77")
    own.execute("CREATE TABLE kept AS SELECT 1 AS n")
    url, pid = own.url, own.broker.pid
    own.broker.kill()
    assert not psutil.pid_exists(pid)
    assert not brokers.status(own.broker.folder).running
    own.broker.restart()
    assert own.url == url
    assert own.broker.pid != pid
    assert own.execute("SELECT n, @@max_connections FROM kept") == [(1, 77)]
    assert brokers.start("mysql", own.broker.folder).pid == own.broker.pid
    client = own.connect()
    began = time.monotonic()
    assert brokers.stop(own.broker.folder), "although a client is connected"
    assert time.monotonic() - began < 15
    client._force_close()
    assert not brokers.stop(own.broker.folder)
    assert not brokers.status(own.broker.folder).answering


def test_a_setting_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(DeliveredError, match="BROKER_START") as caught:
        brokers.start("mysql", tmp_path / "bad", properties={"max_connection_number": "1"})
    assert "max_connection_number" in str(caught.value)
