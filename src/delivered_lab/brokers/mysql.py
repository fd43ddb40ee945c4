"""MySQL itself, from the packages of Debian's unstable suite: a user `delivered` without a password, a database `dev`.

Debian's releases hold MariaDB alone (`mariadb`). The server is unpacked into the cache with the libraries it was
built for, its C library included, and started by their own loader: nothing is installed, and the release of the
machine's own Debian does not matter.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from delivered import DeliveredError
from delivered.machine import cache_folder
from delivered_lab.brokers.mariadb import DATABASE, MYSQL, USER, answers, configure
from delivered_lab.brokers.servers import (
    Say,
    Server,
    State,
    fetch_packages,
    run_tool,
    version_line,
)

SUITE, PACKAGES = "unstable", ("mysql-server-core",)
_SETTINGS = {
    "mysqlx": "0",  # the X protocol would listen on every address
    "innodb_redo_log_capacity": "64M",
    "local_infile": "1",
}


def fetch(say: Say) -> Path:
    """The folder with the files of its Debian packages, fetched once."""
    return fetch_packages("MySQL", cache_folder() / "mysql" / SUITE, PACKAGES, "60 MB", say, suite=SUITE)


def prepare(folder: Path, state: State, say: Say) -> list[str]:
    """Initialises the data folder if it is new."""
    root, data = fetch(say), folder / "mysql"
    settings, users = configure(folder, state, root, data, _SETTINGS)
    command = [*_program(root), settings]
    if not (folder / ".made").exists():
        shutil.rmtree(data, ignore_errors=True)
        try:
            run_tool([*command, "--initialize-insecure"], "BROKER_START.MYSQL", folder)
        except DeliveredError:
            shutil.rmtree(data, ignore_errors=True)
            raise
        (folder / ".made").touch()
    return [*command, users]


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
