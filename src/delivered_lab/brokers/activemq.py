"""ActiveMQ Artemis: one process, one listener that speaks STOMP, AMQP, OpenWire and its own protocol.

Anonymous clients may do everything; clients with a user need the password (`delivered` and `delivered`).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from xml.sax.saxutils import escape

from delivered_lab.brokers.servers import (
    Say,
    Server,
    State,
    as_lines,
    connected,
    fetch_archive,
    java_command,
    open_packages,
)

VERSION = "2.40.0"
ARTIFACT = ("org.apache.activemq", "apache-artemis", VERSION)
STOMP = "STOMP"
USER = PASSWORD = "delivered"  # noqa: S105 - a development server on the loopback
_ROLE = "dev"
_PERMISSIONS = (
    *("createAddress", "deleteAddress", "createDurableQueue", "deleteDurableQueue"),
    *("createNonDurableQueue", "deleteNonDurableQueue", "send", "consume", "browse", "manage"),
)


def fetch(say: Say) -> Path:
    """The server's folder, fetched once."""
    return fetch_archive(f"artemis/{VERSION}", ARTIFACT, ("lib",), "47 MB", say)


def prepare(folder: Path, state: State, say: Say) -> list[str]:
    """Properties are those of Artemis's broker.properties, for instance {"journalDatasync": "false"}."""
    home = fetch(say)
    etc = folder / "etc"
    etc.mkdir(exist_ok=True)
    files = {
        "broker.xml": _broker(folder, state.listeners[STOMP]),
        "bootstrap.xml": _bootstrap(etc),
        "management.xml": '<management-context xmlns="http://activemq.apache.org/schema"/>\n',
        "login.config": _LOGIN,
        "users.properties": f"{USER} = {PASSWORD}\n",
        "roles.properties": f"{_ROLE} = {USER}\n",
        "broker.properties": as_lines(state.settings["properties"]),
        "log4j2.properties": _LOG,
    }
    for name, text in files.items():
        (etc / name).write_text(text, encoding="utf-8")
    return [
        *java_command(
            state.settings["heap_mb"],
            home / "lib",
            "-XX:+UseSerialGC",
            "-XX:MaxMetaspaceSize=128m",
            f"-Djava.security.auth.login.config={etc / 'login.config'}",
            f"-Dartemis.home={home}",
            f"-Dartemis.instance={folder}",
            f"-Dartemis.instance.etc={etc}",
            f"-Dlog4j2.configurationFile={etc / 'log4j2.properties'}",
            "-Dlog4j2.disableJmx=true",
            *open_packages("java.base/jdk.internal.misc"),
        ),
        *("org.apache.activemq.artemis.cli.Artemis", "run", "--properties", str(etc / "broker.properties")),
    ]


def answers(state: State) -> bool:
    """Whether the server opens a STOMP connection."""
    with suppress(OSError), connected(state.listeners[STOMP]) as peer:
        peer.sendall(b"CONNECT\naccept-version:1.2\nhost:localhost\n\n\0")
        answered = peer.makefile("rb").read(9) == b"CONNECTED"
        peer.sendall(b"DISCONNECT\n\n\0")  # else the server logs a lost connection
        return answered
    return False


def _broker(folder: Path, address: str) -> str:
    data = escape(str(folder / "data"))
    permissions = "".join(f'<permission type="{p}" roles="{_ROLE}"/>' for p in _PERMISSIONS)
    queues = "".join(f'<address name="{q}"><anycast><queue name="{q}"/></anycast></address>' for q in _KEPT)
    return f"""<?xml version="1.0"?>
<configuration xmlns="urn:activemq"><core xmlns="urn:activemq:core">
  <name>delivered</name>
  <persistence-enabled>true</persistence-enabled>
  <journal-type>NIO</journal-type>
  <journal-directory>{data}/journal</journal-directory>
  <bindings-directory>{data}/bindings</bindings-directory>
  <large-messages-directory>{data}/large</large-messages-directory>
  <paging-directory>{data}/paging</paging-directory>
  <journal-file-size>10M</journal-file-size>
  <journal-pool-files>10</journal-pool-files>
  <!-- A development machine is seldom empty; the default would stop all senders. -->
  <max-disk-usage>-1</max-disk-usage>
  <acceptors>
    <acceptor name="all">tcp://{address}?protocols=STOMP,AMQP,OPENWIRE,CORE</acceptor>
  </acceptors>
  <security-settings><security-setting match="#">{permissions}</security-setting></security-settings>
  <address-settings><address-setting match="#">
    <dead-letter-address>DLQ</dead-letter-address>
    <expiry-address>ExpiryQueue</expiry-address>
    <default-address-routing-type>ANYCAST</default-address-routing-type>
    <default-queue-routing-type>ANYCAST</default-queue-routing-type>
    <auto-delete-queues>false</auto-delete-queues>
  </address-setting></address-settings>
  <addresses>{queues}</addresses>
</core></configuration>
"""


_KEPT = ("DLQ", "ExpiryQueue")


def _bootstrap(etc: Path) -> str:
    return (
        '<broker xmlns="http://activemq.apache.org/schema"><jaas-security domain="delivered"/>'
        f'<server configuration="{escape((etc / "broker.xml").as_uri())}"/></broker>\n'
    )


_MODULES = "org.apache.activemq.artemis.spi.core.security.jaas"
_LOGIN = f"""delivered {{
  {_MODULES}.GuestLoginModule sufficient
    credentialsInvalidate=true
    org.apache.activemq.jaas.guest.user="guest"
    org.apache.activemq.jaas.guest.role="{_ROLE}";
  {_MODULES}.PropertiesLoginModule required
    org.apache.activemq.jaas.properties.user="users.properties"
    org.apache.activemq.jaas.properties.role="roles.properties";
}};
"""
_LOG = """rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d %-5level [%logger] %msg%n
"""


SERVER = Server(
    listeners=lambda _: [STOMP],
    prepare=prepare,
    answers=answers,
    fetch=fetch,
    url="stomp://{}",
    version=lambda: VERSION,
    pipeline='{{format: activemq, url: "{url}", queue: orders, log: orders-log}}',
)
