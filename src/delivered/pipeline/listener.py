"""What listens at an address, for a pipeline that was given another system's host and port, or the wrong protocol.

Looked at only when a plan failed because a server did not answer as it should. Each probe is a connection that sends
what a client of one system sends first, and looks at the first bytes of the answer.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

from delivered.model.errors import Refused
from delivered.pipeline.endpoint import Endpoint

_TIMEOUT_S = 1.0
_ANSWER_BYTES_MAX = 64
_AWAY = re.compile(r"(DELIVERED_)?(\w+_(UNREACHABLE|NO_ANSWER|CREDENTIALS)|CREDENTIALS_REFUSED)")
_PLACE = re.compile(r"(?<![\w.])(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][\w.-]*):(\d{1,5})\b")
_WANTS_TLS = re.compile(r"(SASL_)?SSL|[a-z+]*ssl://.*|(amqps|https)://.*", re.IGNORECASE)

KAFKA, POSTGRES, MYSQL, RABBITMQ = "Kafka", "PostgreSQL", "MySQL or MariaDB", "RabbitMQ (AMQP 0-9-1)"
PULSAR, STOMP, HTTP, GRPC = "Pulsar", "ActiveMQ (STOMP)", "an HTTP server", "a gRPC server"
_EXPECTED = {
    "kafka": KAFKA,
    "postgres": POSTGRES,
    "outbox": POSTGRES,
    "mysql": MYSQL,
    "rabbitmq": RABBITMQ,
    "pulsar": PULSAR,
    "activemq": STOMP,
    "rocketmq": GRPC,
}
_SWITCH = {
    "kafka": "kafka.security.protocol",
    "rabbitmq": "the url's scheme, amqp:// or amqps://",
    "pulsar": "the url's scheme, pulsar:// or pulsar+ssl://",
    "activemq": "the url's scheme, stomp:// or stomp+ssl://",
}
"""What turns TLS on and off, by system; the others negotiate it on one port."""


def _is_mysql(answer: bytes) -> bool:
    return answer[4:5] in (b"\x0a", b"\xff") and int.from_bytes(answer[:3], "little") < 512


_CORRELATION = b"\x7e\x11\xf0\x0d"
PROBES: tuple[tuple[str, bytes, Callable[[bytes], bool]], ...] = (
    (MYSQL, b"", _is_mysql),  # the server speaks first
    (POSTGRES, bytes.fromhex("0000000804d2162f"), lambda answer: answer in (b"S", b"N")),  # SSLRequest
    (RABBITMQ, b"AMQP\x00\x00\x00\x00", lambda answer: answer == b"AMQP\x00\x00\x09\x01"),  # no such version
    (
        KAFKA,  # ApiVersions, version 0
        bytes.fromhex("0000001300120000") + _CORRELATION + b"\x00\x09delivered",
        lambda answer: answer[4:8] == _CORRELATION,
    ),
    (
        PULSAR,  # CONNECT of protocol version 19; CONNECTED or ERROR
        bytes.fromhex("0000000d00000009080212050a01782013"),
        lambda answer: answer[8:10] in (b"\x08\x03", b"\x08\x09"),
    ),
    (
        STOMP,
        b"CONNECT\naccept-version:1.2\nhost:delivered\n\n\x00",
        lambda answer: answer.lstrip().startswith((b"CONNECTED", b"ERROR")),
    ),
    (HTTP, b"GET / HTTP/1.1\r\nHost: delivered\r\nConnection: close\r\n\r\n", lambda answer: answer[:5] == b"HTTP/"),
    (
        GRPC,  # the preface and empty settings; settings
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5),
        lambda answer: answer[3:5] == b"\x04\x00",
    ),
)


@cache
def identify(host: str, port: int) -> tuple[str | None, bool]:
    """What listens there, None: nothing known; and whether it was asked over TLS. Takes a second.

    Each address is asked once: a start that waits for its server must not knock at another one's door all the time.
    """
    with ThreadPoolExecutor(1 + len(PROBES)) as pool:
        speaks_tls = pool.submit(_speaks_tls, host, port)  # beside the others: silence costs its second once
        for tls in (False, True):
            if tls and not speaks_tls.result():
                break
            answers = list(pool.map(partial(_ask, host, port, tls), (question for _, question, _ in PROBES)))
            found = (name for (name, _, fits), answer in zip(PROBES, answers, strict=True) if answer and fits(answer))
            if name := next(found, None):
                return name, tls
    return None, False


def _speaks_tls(host: str, port: int) -> bool:
    try:
        with _connect(host, port, tls=True):
            return True
    except (OSError, ValueError):
        return False


def _ask(host: str, port: int, tls: bool, question: bytes) -> bytes:
    """The first bytes of the answer; empty: none in time."""
    try:
        with _connect(host, port, tls=tls) as connection:
            connection.sendall(question)
            return connection.recv(_ANSWER_BYTES_MAX)
    except (OSError, ValueError):
        return b""


def _connect(host: str, port: int, *, tls: bool) -> socket.socket:
    """With TLS: with whoever it is, for nothing is sent that must not be read. Raises OSError, ValueError."""
    plain = socket.create_connection((host, port), _TIMEOUT_S)
    if not tls:
        return plain
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with plain:  # wrapped, the connection is no longer this object's
        return context.wrap_socket(plain, server_hostname=host)


def find_another(endpoint: Endpoint, code: str, text: str) -> Refused | None:
    """The refusal, if what an endpoint's options name is another server than it needs.

    Args:
        code, text: of the error with which the server was not reached. Others are not looked into.
    """
    if endpoint.system not in _EXPECTED or not _AWAY.fullmatch(code):
        return None
    for host, port in _PLACE.findall(text):
        given = next((v for v in endpoint.options.values() if f"{host}:{port}" in v), None)
        if given is not None:
            return _mismatch(endpoint, given, host, int(port))
    return None


def _mismatch(endpoint: Endpoint, given: str, host: str, port: int) -> Refused | None:
    place, system = f"{host}:{port}", "mysql" if given.startswith("mysql:") else endpoint.system  # of an outbox
    expected = HTTP if given.startswith("http") else _EXPECTED[system]
    found, tls = identify(host.strip("[]"), port)
    if found is None:
        return None
    if found != expected:
        return Refused("ANOTHER_SERVER.PROTOCOL", place=place, found=found, expected=expected)
    switch = _SWITCH.get(endpoint.system)
    if switch is None or tls == any(_WANTS_TLS.fullmatch(v) for v in endpoint.options.values()):
        return None
    condition = "ANOTHER_SERVER.TLS_ALONE" if tls else "ANOTHER_SERVER.NO_TLS"
    return Refused(condition, place=place, expected=expected, switch=switch)
