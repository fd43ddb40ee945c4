"""RocketMQ with access control (ACL 2.0): valid credentials work everywhere, others give a clear error."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.scans import scanned

from delivered.connectors.rocketmq import RocketmqOptions, RocketmqSinkOptions
from delivered.connectors.rocketmq.queue import RocketmqQueue, RocketmqReceiver
from delivered.connectors.rocketmq.remoting import Answer, Peer
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, Refused
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.work import Ok, Prepared, Promise
from delivered.pipeline.registry import find_sink
from delivered_lab import brokers
from delivered_lab.brokers import rocketmq as server

parse = RocketmqOptions.parse
parse_sink = RocketmqSinkOptions.parse

SCHEMA = pa.schema([("value", pa.binary())])
ROWS = pa.record_batch([[b"a", b"b"]], schema=SCHEMA)
WORK = Work(Scope("p", "s", "i"), 0, 0)
_LIBRARY = "org.apache.rocketmq."
_INNER = json.dumps({"accessKey": "admin", "secretKey": "right"})


def settings(folder: Path) -> dict[str, str]:
    """Settings of a server with one user."""
    both = {
        "authenticationEnabled": "true",
        "authenticationProvider": f"{_LIBRARY}auth.authentication.provider.DefaultAuthenticationProvider",
        "authorizationEnabled": "true",
        "authorizationProvider": f"{_LIBRARY}auth.authorization.provider.DefaultAuthorizationProvider",
        "innerClientAuthenticationCredentials": _INNER,
    }
    of_proxy = {
        **both,
        "authenticationMetadataProvider": f"{_LIBRARY}proxy.auth.ProxyAuthenticationMetadataProvider",
        "authorizationMetadataProvider": f"{_LIBRARY}proxy.auth.ProxyAuthorizationMetadataProvider",
        "minInvisibleTimeMillsForRecv": "1000",
    }
    return {
        **both,
        "authConfigPath": str(folder / "auth"),
        "authenticationMetadataProvider": (
            f"{_LIBRARY}auth.authentication.provider.LocalAuthenticationMetadataProvider"
        ),
        "authorizationMetadataProvider": f"{_LIBRARY}auth.authorization.provider.LocalAuthorizationMetadataProvider",
        "initAuthenticationUser": json.dumps({"username": "admin", "password": "right"}),
        **{f"{server.PROXY}{name}": value for name, value in of_proxy.items()},
    }


def codes(findings: Any) -> list[str]:
    return [f.code for f in findings if f.refuses]


@pytest.mark.matrix
def test_good_credentials_work_and_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIGHT", "right")
    monkeypatch.setenv("WRONG", "wrong")
    folder = tmp_path / "server"
    broker = brokers.start("rocketmq", folder, dies_with_parent=True, properties=settings(folder))
    transactions = {
        "endpoints": broker.url, "topic": "t", "ledger": str(tmp_path / "l.db"), "messageType": "transaction",
        "nameServers": broker.listeners["NAMESRV"],
    }  # fmt: skip
    plain = {"endpoints": broker.url, "topic": "n", "ledger": str(tmp_path / "l.db")}
    received = {"endpoints": broker.url, "topic": "n", "group": "g", "log": "/x"}
    good = {"accessKey": "admin", "secretKey": "env:RIGHT"}
    others = ({}, {"accessKey": "admin", "secretKey": "env:WRONG"}, {"accessKey": "who", "secretKey": "env:RIGHT"})
    try:
        make(Peer(broker.listeners["BROKER"], parse_sink({**transactions, **good})))
        with pytest.raises(DeliveredError, match="username cannot be null"):
            server.make_topic(broker.listeners["BROKER"], "x")
        for given in (transactions, plain):
            assert codes(find_sink("rocketmq", {**given, **good}).preflight(Guarantee.AT_LEAST_ONCE)) == []
        assert codes(RocketmqQueue(parse({**received, **good})).preflight()) == []
        for who in others:
            for given in (transactions, plain):
                sink = find_sink("rocketmq", {**given, **who})
                assert codes(sink.preflight(Guarantee.AT_LEAST_ONCE)) == ["ROCKETMQ_CREDENTIALS"]
                with pytest.raises(Refused, match="rejected the credentials"):
                    written(sink, Guarantee.AT_LEAST_ONCE)
            assert codes(RocketmqQueue(parse({**received, **who})).preflight()) == ["ROCKETMQ_CREDENTIALS"]
        sink = find_sink("rocketmq", {**transactions, **good})
        prepared = Prepared.of(WORK, Fingerprint(2), written(sink, Guarantee.EXACTLY_ONCE))
        assert sink.committer(WORK.scope).commit(WORK, prepared) == Ok(None)
        rows = [r for b in scanned(sink) for r in b.to_pylist()]
        assert sorted(r["value"] for r in rows) == [b"a", b"b"]
        written(find_sink("rocketmq", {**plain, **good}), Guarantee.AT_LEAST_ONCE)
        receiver = RocketmqReceiver(parse({**received, **good}))
        batch = receiver.receive(10, 10)
        assert sorted(batch.values) == [b"a", b"b"]
        assert receiver.acknowledge(batch.handles) == Ok(2)
        receiver.close()
    finally:
        broker.kill()


def written(sink: Any, guarantee: Guarantee) -> Promise:
    writer = sink.writer(WORK, guarantee, SCHEMA)
    try:
        writer.stage(ROWS)
        promise: Promise = writer.prepare(Fingerprint(2))
    finally:
        writer.abort()
    return promise


def make(peer: Peer) -> None:
    """Create two topics and a group, by a signed request."""
    topic = {
        "defaultTopic": "TBW102", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6, "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0, "order": False,
    }  # fmt: skip
    for name, kind in (("t", "TRANSACTION"), ("n", "NORMAL")):
        assert peer.ask(17, {**topic, "topic": name, "attributes": f"+message.type={kind}"}).code == 0
    group = {
        "groupName": "g", "consumeEnable": True, "consumeFromMinEnable": True, "consumeBroadcastEnable": True,
        "consumeMessageOrderly": False, "retryQueueNums": 1, "retryMaxTimes": 16, "brokerId": 0,
        "whichBrokerWhenConsumeSlowly": 1, "notifyConsumerIdsChangedEnable": True,
    }  # fmt: skip
    answer: Future[Answer | None] = Future()
    peer.post(200, {}, json.dumps(group).encode(), answer.set_result)
    found = answer.result(120)
    assert found is not None
    assert found.code == 0
    peer.close()
