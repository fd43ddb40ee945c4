"""MariaDB from Debian's packages: a user `delivered` without a password, a database `dev`.

It runs as the current user, listens only on 127.0.0.1, and only accepts that user from there.
"""

from __future__ import annotations

import os
import pwd
import shutil
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
PACKAGES = ("mariadb-server-core", "libaio1", "libnuma1", "liburing2")
_SETTINGS = {
    "bind_address": "127.0.0.1",
    "skip_name_resolve": "1",
    "socket": "mysql.sock",  # relative to the data folder: a full path may be too long for a socket
    "pid_file": "mysql.pid",
    "log_warnings": "1",
    "performance_schema": "0",
    "character_set_server": "utf8mb4",
    "innodb_buffer_pool_size": "128M",
    "innodb_log_file_size": "64M",
    "key_buffer_size": "1M",
    "aria_pagecache_buffer_size": "4M",
    "max_connections": "200",
}
_TABLES = ("system_tables", "performance_tables", "system_tables_data")


def fetch(say: Say) -> Path:
    """The folder with the files of its Debian packages, fetched once."""
    return fetch_packages("MariaDB", cache_folder() / "mariadb" / "debian", PACKAGES, "10 MB", say)


def prepare(folder: Path, state: State, say: Say) -> list[str]:
    """Initialises the data folder if it is new."""
    root, data, start = fetch(say), folder / "data", folder / "my.cnf"
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
        **_SETTINGS,
        **state.settings["properties"],
    }
    for name in ("tmp", "files"):
        (folder / name).mkdir(exist_ok=True)
    start.write_text("[mariadbd]\n" + as_lines(settings, " = "), encoding="utf-8")
    command = [*_program(root), f"--defaults-file={start}"]
    if not (data / ".made").exists():
        _create_tables(command, root, data)
    return [*command, f"--init-file={init_file(folder)}"]


def init_file(folder: Path) -> Path:
    """Statements that the server runs when it starts, in `folder`."""
    users = folder / "users.sql"
    # The server reads one statement per line.
    users.write_text(
        f"CREATE USER IF NOT EXISTS '{USER}'@'127.0.0.1';\n"
        f"GRANT ALL ON *.* TO '{USER}'@'127.0.0.1' WITH GRANT OPTION;\n"
        f"CREATE DATABASE IF NOT EXISTS {DATABASE};\n",
        encoding="utf-8",
    )
    return users


def answers(state: State) -> bool:
    """Whether the server greets with protocol version 10, as it does once it accepts logins."""
    with suppress(OSError), connected(state.listeners[MYSQL]) as peer:
        head = peer.makefile("rb").read(5)
        return len(head) == 5 and head[4] == 10
    return False


def _create_tables(command: list[str], root: Path, data: Path) -> None:
    """The server's own tables."""
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


def _program(root: Path) -> list[str]:
    libraries = ":".join(str(root / f) for f in ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu"))
    return ["/usr/bin/env", f"LD_LIBRARY_PATH={libraries}", str(root / "usr/sbin/mariadbd")]


def version() -> str:
    """It names MariaDB, such as "10.11.14-MariaDB-0+deb12u1"."""
    return version_line(_program(fetch(lambda _: None))).split("Ver ")[1].split()[0]


SERVER = Server(
    listeners=lambda _: [MYSQL],
    prepare=prepare,
    answers=answers,
    fetch=fetch,
    url=f"mysql://{USER}@{{}}/{DATABASE}",
    version=version,
    pipeline='{{format: mysql, url: "{url}", dbtable: orders, ifNotExists: true}}',
)
