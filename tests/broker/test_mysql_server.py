"""MariaDB started by `delivered_lab.brokers`: where it listens, what survives a kill."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.support.servers import Mysql

from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError
from delivered_lab import brokers


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
    assert brokers.start(own.system, own.broker.folder).pid == own.broker.pid
    client = own.connect()
    began = time.monotonic()
    assert brokers.stop(own.broker.folder), "although a client is connected"
    assert time.monotonic() - began < 15
    client._force_close()
    assert not brokers.stop(own.broker.folder)
    assert not brokers.status(own.broker.folder).answering


def test_a_setting_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(DeliveredError, match="BROKER_START") as caught:
        brokers.start(Mysql.system, tmp_path / "bad", properties={"max_connection_number": "1"})
    assert "max_connection_number" in str(caught.value)


@pytest.mark.matrix
def test_a_fail_over_to_an_asynchronous_replica_can_lose_a_decision(new_mysql: Callable[..., Mysql]) -> None:
    primary = new_mysql(log_bin="log", server_id="1", binlog_format="ROW")
    replica = new_mysql(server_id="2")
    sink = primary.sink()

    def findings(guarantee: Guarantee = Guarantee.EXACTLY_ONCE) -> list[str]:
        return [f.code for f in sink.preflight(guarantee) if "STANDBY" in f.code]

    def until_it_reads(count: int) -> None:
        """The primary shows `count` replicas that read its log."""
        reads = "SELECT count(*) FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'"
        while primary.execute(reads) != [(count,)]:
            primary.execute("FLUSH BINARY LOGS")  # whoever has left is noticed when an event is sent
            time.sleep(0.05)

    def connect() -> None:
        replica.execute("START SLAVE")
        until_it_reads(1)

    assert findings() == []
    host, _, port = primary.broker.bootstrap.rpartition(":")
    log, position = primary.execute("SHOW MASTER STATUS")[0][:2]
    replica.execute(
        f"CHANGE MASTER TO MASTER_HOST = '{host}', MASTER_PORT = {port}, MASTER_USER = 'delivered', "
        f"MASTER_LOG_FILE = '{log}', MASTER_LOG_POS = {position}"
    )
    connect()
    assert findings() == ["STANDBY_ASYNCHRONOUS"]
    assert findings(Guarantee.AT_MOST_ONCE) == []
    primary.execute("SET GLOBAL rpl_semi_sync_master_enabled = ON")
    assert findings() == ["STANDBY_ASYNCHRONOUS"], "the replica does not take part"
    replica.execute("STOP SLAVE")
    replica.execute("SET GLOBAL rpl_semi_sync_slave_enabled = ON")
    until_it_reads(0)
    connect()
    while primary.execute("SHOW STATUS LIKE 'Rpl_semi_sync_master_clients'")[0][1] != "1":
        time.sleep(0.05)
    assert findings() == []
