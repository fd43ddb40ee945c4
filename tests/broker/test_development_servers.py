"""What a user who reaches the port of a development server can do: nothing beyond the server."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.support.servers import Mysql, Postgres

from delivered.model.errors import DeliveredError
from delivered_lab.brokers import postgres, servers


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A file that only this user can read."""
    file = tmp_path / "private"
    file.write_text("root's own\n", encoding="utf-8")
    file.chmod(0o600)
    return file


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts it as another user")
def test_postgres_started_by_root_reads_no_file_of_roots(new_postgres: Callable[..., Postgres], private: Path) -> None:
    import psycopg

    with psycopg.connect(new_postgres().url, autocommit=True) as connection:
        for statement in (
            f"SELECT pg_read_file('{private}')",
            "SELECT pg_read_file('/etc/shadow')",
            f"COPY (SELECT 1) TO '{private.parent}/written'",
            f"COPY (SELECT 1) TO PROGRAM 'cat > {private.parent}/written'",
        ):
            with pytest.raises(psycopg.Error, match=r"ermission denied|failed"):
                connection.execute(statement)
        row = connection.execute("SELECT pg_read_file('/proc/self/status')").fetchone()
        assert row is not None
        capabilities = [line for line in row[0].splitlines() if line.startswith(("CapEff", "CapAmb", "CapInh"))]
        assert [line.split()[1] for line in capabilities] == ["0" * 16] * 3
    assert not (private.parent / "written").exists()


def test_mysql_reads_and_writes_no_file_of_this_users(new_mysql: Callable[..., Mysql], private: Path) -> None:
    import pymysql

    parts = urlsplit(new_mysql().url)
    connection = pymysql.connect(host=parts.hostname, port=parts.port or 0, user=parts.username)
    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT LOAD_FILE(%s)", (str(private),))
        assert cursor.fetchone() == (None,)
        with pytest.raises(pymysql.err.OperationalError, match="secure-file-priv"):
            cursor.execute("SELECT 1 INTO OUTFILE %s", (str(private.parent / "written"),))
        cursor.execute("CREATE TABLE dev.lines (line TEXT)")
        with pytest.raises(pymysql.err.OperationalError, match="secure-file-priv"):
            cursor.execute("LOAD DATA INFILE %s INTO TABLE dev.lines", (str(private),))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root copies the programs")
def test_programs_in_a_folder_of_another_user_are_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it appears while they are being copied."""
    package = tmp_path / "site" / "pgserver" / "pginstall" / "bin"
    package.mkdir(parents=True)
    (package / "postgres").touch()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    real = Path.rename

    def late(self: Path, target: Path) -> Path:
        evil = target / "pgserver" / "pginstall" / "bin"
        evil.mkdir(parents=True)
        os.chown(target, 65534, 65534)
        return real(self, target)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(DeliveredError, match="POSTGRES_COPY"):
        postgres._reachable(package)


def test_a_download_that_was_changed_at_the_registry_is_not_used(tmp_path: Path) -> None:
    lines = servers.HASHES.read_text(encoding="utf-8").splitlines()
    for system in (
        "kafka/4.3.0/",
        "flink-kafka/5.0.0-2.2/",
        "rocketmq/",
        "artemis/",
        "pulsar/",
        "apicurio/",
        "spark-kafka/",
    ):
        assert any(system in line for line in lines), system
    name = "spark-kafka/4.2.0"
    with pytest.raises(DeliveredError, match="DOWNLOAD_CHANGED"):
        (tmp_path / "commons-pool2-2.12.0.jar").write_bytes(b"another")
        servers.check_hashes(name, tmp_path)
    kept = servers.cache_folder() / name / "lib"
    if kept.is_dir():
        servers.check_hashes(name, kept)
