"""MySQL itself, from the packages of Debian's unstable suite: a user `delivered` without a password, a database `dev`.

Debian's releases hold MariaDB alone (`mariadb`). The server is unpacked into the cache with the libraries it was
built for, its C library included, and started by their own loader: nothing is installed, and the release of the
machine's own Debian does not matter.
"""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path

from delivered import DeliveredError
from delivered.machine import cache_folder
from delivered_lab.brokers.mariadb import DATABASE, MYSQL, USER, answers, init_file
from delivered_lab.brokers.servers import (
    Say,
    Server,
    State,
    as_lines,
    fetch_packages,
    run_tool,
    split_address,
    version_line,
)

SUITE, PACKAGES = "unstable", ("mysql-server-core",)
_SETTINGS = {
    "bind_address": "127.0.0.1",
    "skip_name_resolve": "1",
    "socket": "mysql.sock",  # relative to the data folder: a full path may be too long for a socket
    "pid_file": "mysql.pid",
    "mysqlx": "0",  # the X protocol would listen on every address
    "performance_schema": "0",
    "character_set_server": "utf8mb4",
    "innodb_buffer_pool_size": "128M",
    "innodb_redo_log_capacity": "64M",
    "max_connections": "200",
    "local_infile": "1",
}


def fetch(say: Say) -> Path:
    """The folder with the files of its Debian packages, fetched once."""
    return fetch_packages("MySQL", cache_folder() / "mysql" / SUITE, PACKAGES, "60 MB", say, suite=SUITE)


def prepare(folder: Path, state: State, say: Say) -> list[str]:
    """Initialises the data folder if it is new."""
    root, data, start = fetch(say), folder / "mysql", folder / "mysql.cnf"
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
    (folder / "files").chmod(0o700)
    start.write_text("[mysqld]\n" + as_lines(settings, " = "), encoding="utf-8")
    command = [*_program(root), f"--defaults-file={start}"]
    if not (folder / ".made").exists():
        shutil.rmtree(data, ignore_errors=True)
        try:
            run_tool([*command, "--initialize-insecure"], "BROKER_START.MYSQL", folder)
        except DeliveredError:
            shutil.rmtree(data, ignore_errors=True)
            raise
        (folder / ".made").touch()
    return [*command, f"--init-file={init_file(folder)}"]


def _program(root: Path) -> list[str]:
    (loader,) = root.glob("usr/lib/*-linux-gnu/ld-linux-*.so.*")
    return [str(loader), "--library-path", str(loader.parent), str(root / "usr/sbin/mysqld")]


def version() -> str:
    """As MySQL names itself, such as "9.7.4-2"."""
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
