"""RocketMQ over TLS: a proxy with a trusted certificate is used; another one is refused, with the cause.

The server's own TLS needs a native library, so TLS is terminated in front of it, as at a load balancer.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.broker.send_help import rows, writer
from tests.support.front import certificate
from tests.support.servers import Rocketmq

from delivered.connectors.rocketmq import RocketmqOptions
from delivered.connectors.rocketmq.client import Session
from delivered.connectors.rocketmq.queue import RocketmqQueue, RocketmqReceiver
from delivered.model.capability import Guarantee
from delivered.model.errors import Unreachable, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.work import Ok, Promise
from delivered.pipeline.registry import find_sink

parse = RocketmqOptions.parse


def sink(folder: Path, options: dict[str, str]) -> Any:
    return find_sink("rocketmq", {**options, "ledger": str(folder / "l.db")})


def receiver(options: dict[str, str], group: str) -> Any:
    return parse({**options, "group": group, "log": "/x"})


def written(made: Any) -> None:
    task = writer(made)
    try:
        task.stage(rows(100))
        assert task.prepare(Fingerprint()) == Promise()
    finally:
        task.abort()


@contextmanager
def front(target: str, files: dict[str, Path]) -> Iterator[str]:
    """Terminate TLS in front of an address; yields the new address."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files["certificate"], files["key"])
    context.set_alpn_protocols(["h2"])
    host, _, port = target.rpartition(":")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    made = asyncio.run_coroutine_threadsafe(asyncio.start_server(serve, "127.0.0.1", 0, ssl=context), loop).result(10)
    try:
        yield f"127.0.0.1:{made.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def test_the_proxys_certificate_is_checked(rocketmq: Rocketmq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = certificate(tmp_path / "ours"), certificate(tmp_path / "other")
    told = Session._route
    with front(rocketmq.url, ours) as address:

        def route(session: Session) -> Any:
            """The server advertises its own address: the one without TLS."""
            queues = told(session)
            for at in [a for q in queues for a in q.broker.endpoints.addresses]:
                assert f"{at.host}:{at.port}" == rocketmq.url
                at.port = int(address.rpartition(":")[2])
            return queues

        monkeypatch.setattr(Session, "_route", route)
        _checked(rocketmq, tmp_path, address, ours["certificate"], other["certificate"])


def _checked(rocketmq: Rocketmq, tmp_path: Path, address: str, ours: Path, other: Path) -> None:
    topic, group = rocketmq.topic(), rocketmq.group()
    place = {"endpoints": address, "topic": topic, "tls": "true"}
    good = {**place, "tlsTrustCertsFile": str(ours)}
    assert sink(tmp_path, good).preflight(Guarantee.AT_LEAST_ONCE) == []
    written(sink(tmp_path, good))
    assert not [f for f in RocketmqQueue(receiver(good, group)).preflight() if f.refuses]
    made = RocketmqReceiver(receiver(good, group))
    taken: list[bytes] = []
    while len(taken) < 100:
        batch = made.receive(100, 10)
        taken += batch.values
        assert made.acknowledge(batch.handles) == Ok(len(batch.values))
    made.close()
    assert sorted(taken) == sorted(b"row %d" % n for n in range(100))

    named = {**good, "endpoints": address.replace("127.0.0.1", "localhost")}
    bad = {
        "gRPC's built-in ones": place,
        "other/ca.pem": {**place, "tlsTrustCertsFile": str(other)},
        "localhost": named,
    }
    for said, options in bad.items():
        findings = [
            *sink(tmp_path, options).preflight(Guarantee.AT_LEAST_ONCE),
            *RocketmqQueue(receiver(options, group)).preflight(),
        ]
        assert [f.code for f in findings if f.refuses] == ["CERTIFICATE_REFUSED"] * 2, findings
        assert all(said in f.message and "tlsTrustCertsFile" in (f.next_step or "") for f in findings)
        with pytest.raises(UsageError, match="CERTIFICATE_REFUSED"):
            written(sink(tmp_path, options))
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("nothing")
    for file, why in ((str(garbage), "no PEM certificate"), ("/no/such.pem", "no such file")):
        for finding in (
            *sink(tmp_path, {**place, "tlsTrustCertsFile": file}).preflight(Guarantee.AT_LEAST_ONCE),
            *RocketmqQueue(receiver({**place, "tlsTrustCertsFile": file}, group)).preflight(),
        ):
            assert finding.code == "TLS_FILES"
            assert why in finding.message


def test_tls_to_a_proxy_that_speaks_none_is_no_connection(rocketmq: Rocketmq, tmp_path: Path) -> None:
    options = {"endpoints": rocketmq.url, "topic": rocketmq.topic(), "tls": "true"}
    with pytest.raises(Unreachable, match="ROCKETMQ_UNREACHABLE"):
        written(sink(tmp_path, options))
