"""MySQL and MariaDB from Debian's packages: a user `delivered` without a password, a database `dev`.

They run as the current user, listen only on 127.0.0.1, and only accept that user from there.

Debian's releases hold MariaDB alone. MySQL is of the unstable suite: it is unpacked into the cache with the libraries
it was built for, its C library included, and started by their own loader. Nothing is installed, and the release of the
machine's own Debian does not matter.
"""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from delivered import DeliveredError
from delivered.machine import cache_folder
from delivered_lab.brokers.servers import (
    Say,
    Server,
    State,
    as_lines,
    connected,
    fetch_packages,
    run_tool,
    split_address,
    version_line,
)

MYSQL = "MYSQL"
USER, DATABASE = "delivered", "dev"
MARIADB_PACKAGES = ("mariadb-server-core", "libaio1", "libnuma1", "liburing2")
MYSQL_SUITE, MYSQL_PACKAGES = "unstable", ("mysql-server-core",)
_COMMON = {
    "bind_address": "127.0.0.1",
    "skip_name_resolve": "1",
    "socket": "mysql.sock",  # relative to the data folder: a full path may be too long for a socket
    "pid_file": "mysql.pid",
    "performance_schema": "0",
    "character_set_server": "utf8mb4",
    "innodb_buffer_pool_size": "128M",
    "max_connections": "200",
}
_MARIADB_SETTINGS = {
    "log_warnings": "1",
    "innodb_log_file_size": "64M",
    "key_buffer_size": "1M",
    "aria_pagecache_buffer_size": "4M",
}
_MYSQL_SETTINGS = {
    "mysqlx": "0",  # the X protocol would listen on every address
    "innodb_redo_log_capacity": "64M",
    "local_infile": "1",
}
_TABLES = ("system_tables", "performance_tables", "system_tables_data")


def configure(folder: Path, state: State, root: Path, data: Path, own: Mapping[str, str]) -> tuple[str, str]:
    """The options that name the server's settings and the statements that it runs when it starts, as files in `folder`.

    Args:
        own: settings of this kind of server.
    """
    start, users = folder / "my.cnf", folder / "users.sql"
    settings = {
        "datadir": data,
        "basedir": root / "usr",
        "plugin_dir": root / "usr/lib/mysql/plugin",
        "lc_messages_dir": root / "usr/share/mysql",
        "character_sets_dir": root / "usr/share/mysql/charsets",
        "port": split_address(state.listeners[MYSQL])[1],
        "tmpdir": folder / "tmp",
        # It does not start as root without this option; other users cannot set it.
        "user": pwd.getpwuid(os.geteuid()).pw_name,
        # Users need no password, so none may read or write the files of the user who runs the server.
        "secure_file_priv": folder / "files",
        **_COMMON,
        **own,
        **state.settings["properties"],
    }
    for name in ("tmp", "files"):
        (folder / name).mkdir(mode=0o700, exist_ok=True)
    start.write_text("[mysqld]\n" + as_lines(settings, " = "), encoding="utf-8")
    # The server reads one statement per line.
    users.write_text(
        f"CREATE USER IF NOT EXISTS '{USER}'@'127.0.0.1';\n"
        f"GRANT ALL ON *.* TO '{USER}'@'127.0.0.1' WITH GRANT OPTION;\n"
        f"CREATE DATABASE IF NOT EXISTS {DATABASE};\n",
        encoding="utf-8",
    )
    return f"--defaults-file={start}", f"--init-file={users}"


def answers(state: State) -> bool:
    """Whether the server greets with protocol version 10, as it does once it accepts logins."""
    with suppress(OSError), connected(state.listeners[MYSQL]) as peer:
        head = peer.makefile("rb").read(5)
        return len(head) == 5 and head[4] == 10
    return False


def build_server(
    fetch: Callable[[Say], Path], prepare: Callable[[Path, State, Say], list[str]], program: Callable[[Path], list[str]]
) -> Server:
    """Args: program: the command of a server that was fetched into this folder."""
    return Server(
        listeners=lambda _: [MYSQL],
        prepare=prepare,
        answers=answers,
        fetch=fetch,
        url=f"mysql://{USER}@{{}}/{DATABASE}",
        version=lambda: version_line(program(fetch(lambda _: None))).split("Ver ")[1].split()[0],
        pipeline='{{format: mysql, url: "{url}", dbtable: orders, ifNotExists: true}}',
    )


def fetch_mysql(say: Say) -> Path:
    """The folder with the files of its Debian packages, fetched once."""
    folder = cache_folder() / "mysql" / MYSQL_SUITE
    return fetch_packages("MySQL", folder, MYSQL_PACKAGES, "60 MB", say, suite=MYSQL_SUITE)


def prepare_mysql(folder: Path, state: State, say: Say) -> list[str]:
    """Initialises the data folder if it is new."""
    root, data = fetch_mysql(say), folder / "mysql"
    settings, users = configure(folder, state, root, data, _MYSQL_SETTINGS)
    command = [*_mysql(root), settings]
    if not (folder / ".made").exists():
        shutil.rmtree(data, ignore_errors=True)
        try:
            run_tool([*command, "--initialize-insecure"], "BROKER_START.MYSQL", folder)
        except DeliveredError:
            shutil.rmtree(data, ignore_errors=True)
            raise
        (folder / ".made").touch()
    return [*command, users]


def _mysql(root: Path) -> list[str]:
    (loader,) = root.glob("usr/lib/*-linux-gnu/ld-linux-*.so.*")
    return [str(loader), "--library-path", str(loader.parent), str(root / "usr/sbin/mysqld")]


SERVER = build_server(fetch_mysql, prepare_mysql, _mysql)


def fetch_mariadb(say: Say) -> Path:
    """The folder with the files of its Debian packages, fetched once."""
    return fetch_packages("MariaDB", cache_folder() / "mariadb" / "debian", MARIADB_PACKAGES, "10 MB", say)


def prepare_mariadb(folder: Path, state: State, say: Say) -> list[str]:
    """Initialises the data folder if it is new."""
    root, data = fetch_mariadb(say), folder / "data"
    settings, users = configure(folder, state, root, data, _MARIADB_SETTINGS)
    command = [*_mariadb(root), settings]
    if not (data / ".made").exists():
        _create_tables(command, root, data)
    return [*command, users]


def _create_tables(command: list[str], root: Path, data: Path) -> None:
    """The tables of MariaDB itself."""
    shutil.rmtree(data, ignore_errors=True)
    (data / "mysql").mkdir(parents=True)
    share = root / "usr/share/mysql"
    script = "CREATE DATABASE IF NOT EXISTS mysql;\nUSE mysql;\n"
    for name in _TABLES:
        script += next(share.glob(f"*_{name}.sql")).read_text(encoding="utf-8")
    options = ("--bootstrap", "--log-warnings=0", "--max-allowed-packet=8M", "--net-buffer-length=16K")
    try:
        run_tool([*command, *options], "BROKER_START.MARIADB", data, input=script)
    except DeliveredError:
        shutil.rmtree(data, ignore_errors=True)
        raise
    (data / ".made").touch()


def _mariadb(root: Path) -> list[str]:
    libraries = ":".join(str(root / f) for f in ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu"))
    return ["/usr/bin/env", f"LD_LIBRARY_PATH={libraries}", str(root / "usr/sbin/mariadbd")]


MARIADB = build_server(fetch_mariadb, prepare_mariadb, _mariadb)
