"""RabbitMQ from Debian's packages, unpacked into the cache folder: nothing is installed, no root is needed.

One node, everything on 127.0.0.1: the listener for clients, Erlang's own port, and a port mapper (epmd) of its own,
which ends with the server.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from delivered.machine import cache_folder, write_launcher
from delivered_lab.brokers.servers import Say, Server, State, as_lines, connected, fetch_packages, split_address

AMQP, EPMD, ERLANG = "AMQP", "EPMD", "ERLANG"
USER = "guest"
_ERLANG_PARTS = (
    *("asn1", "base", "crypto", "eldap", "inets", "mnesia", "os-mon", "parsetools"),
    *("public-key", "runtime-tools", "ssl", "syntax-tools", "tools", "xmerl"),
)
PACKAGES = ("rabbitmq-server", *(f"erlang-{part}" for part in _ERLANG_PARTS), "libsctp1")
_SETTINGS = {
    "loopback_users.guest": "true",
    "log.file": "false",
    "log.console": "true",
    "log.console.level": "warning",
    # Disks of development machines are often full; the default would block all publishers.
    "disk_free_limit.absolute": "50MB",
}


def prepare(folder: Path, state: State, say: Say) -> list[str]:
    """Configuration, and a script that starts the port mapper and the server."""
    root, listeners = fetch(say), state.listeners
    settings = {"listeners.tcp.1": listeners[AMQP], **_SETTINGS, **state.settings["properties"]}
    (folder / "rabbitmq.conf").write_text(as_lines(settings, " = "), encoding="utf-8")
    (folder / "enabled_plugins").write_text("[].\n", encoding="utf-8")
    (folder / "logs").mkdir(exist_ok=True)
    launcher = folder / "start.sh"
    write_launcher(launcher, _script(root, folder, listeners))
    return ["/bin/sh", str(launcher)]


def answers(state: State) -> bool:
    """Whether the server opens an AMQP 0-9-1 connection."""
    with suppress(OSError), connected(state.listeners[AMQP]) as peer:
        peer.sendall(b"AMQP\x00\x00\x09\x01")
        # A method frame (1) on channel 0 whose method is connection.start (10, 10).
        head = peer.makefile("rb").read(11)
        return head[:3] == b"\x01\x00\x00" and head[7:11] == b"\x00\x0a\x00\x0a"
    return False


def _script(root: Path, folder: Path, listeners: Mapping[str, str]) -> str:
    erlang = root / "usr/lib/erlang"
    home = _home(root)
    epmd = split_address(listeners[EPMD])[1]
    variables = {
        "HOME": folder,  # for Erlang's cookie
        "PATH": f"{erlang}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LD_LIBRARY_PATH": root / "usr/lib/x86_64-linux-gnu",
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": epmd,
        "RABBITMQ_NODENAME": "delivered@localhost",
        "RABBITMQ_DIST_PORT": split_address(listeners[ERLANG])[1],
        "RABBITMQ_CONF_ENV_FILE": folder / "none",
        "RABBITMQ_CONFIG_FILE": folder / "rabbitmq.conf",
        "RABBITMQ_ADVANCED_CONFIG_FILE": folder / "none.config",
        "RABBITMQ_ENABLED_PLUGINS_FILE": folder / "enabled_plugins",
        "RABBITMQ_MNESIA_BASE": folder / "data",
        "RABBITMQ_LOG_BASE": folder / "logs",
        "RABBITMQ_PID_FILE": folder / "node.pid",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +sbwt none",
        # The script execs the server instead of supervising it, so there is one process to stop.
        "RUNNING_UNDER_SYSTEMD": "1",
    }
    exports = "".join(f"export {name}='{value}'\n" for name, value in variables.items())
    dies = "setpriv --pdeathsig KILL " if shutil.which("setpriv") else ""
    starts = f"{dies}'{erlang}/bin/epmd' -address 127.0.0.1 -port {epmd} &\nexec '{home}/sbin/rabbitmq-server'\n"
    return f"#!/bin/sh\n{exports}{starts}"


def fetch(say: Say) -> Path:
    """The folder with the files of its Debian packages, fetched once."""

    def fix(unpacked: Path, root: Path) -> None:
        erl = unpacked / "usr/lib/erlang/bin/erl"
        erl.write_text(erl.read_text().replace("ROOTDIR=/usr/lib/erlang", f"ROOTDIR='{root}/usr/lib/erlang'"))

    return fetch_packages("RabbitMQ", cache_folder() / "rabbitmq" / "debian", PACKAGES, "34 MB", say, fix)


def version() -> str:
    return _home(fetch(lambda _: None)).name.partition("-")[2]


def _home(root: Path) -> Path:
    return next((root / "usr/lib/rabbitmq/lib").glob("rabbitmq_server-*"))


SERVER = Server(
    listeners=lambda _: [AMQP, EPMD, ERLANG],
    prepare=prepare,
    answers=answers,
    fetch=fetch,
    url=f"amqp://{USER}:{USER}@{{}}/",
    hidden=frozenset({EPMD, ERLANG}),
    version=version,
    pipeline='{{format: rabbitmq, url: "{url}", queue: orders, log: orders-log}}',
)
