"""Apache RocketMQ 5: a name server, and a broker with its proxy in one process, which speaks gRPC.

Its proxy and replication listen on every address, which no setting changes, so it runs in a network namespace
(`enclosed.py`) with three forwarded ports of 127.0.0.1. Topics and groups are not created automatically.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from delivered import DeliveredError
from delivered_lab.brokers.enclosed import Enclosed
from delivered_lab.brokers.servers import (
    Say,
    Server,
    State,
    as_lines,
    connected,
    fetch_jars,
    java_command,
    log_level,
    open_packages,
    split_address,
)

VERSION = "5.5.0"
ARTIFACTS = [("org.apache.rocketmq", f"rocketmq-{part}", VERSION) for part in ("namesrv", "proxy", "tools")]
GRPC, NAMESRV, BROKER = "GRPC", "NAMESRV", "BROKER"
KINDS = ("NORMAL", "FIFO", "DELAY", "TRANSACTION")
PROXY = "proxy."
"""Prefix of the proxy's settings."""
DIRECT_MB = 1024
"""Every storing thread keeps a buffer for the largest message (4 MB): 256 MB ran out in a long session."""
_INNER = {"haListenPort": "10912"}
_REMOTING_PORT = 8080
_UPDATE_TOPIC, _CLUSTER_INFO, _UPDATE_GROUP = 17, 106, 200
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_OPENS = (
    *("java.base/java.nio", "java.base/sun.nio.ch", "java.base/java.lang", "java.base/java.util"),
    *("java.base/java.lang.reflect", "java.base/jdk.internal.ref"),
)


def fetch(say: Say) -> Path:
    """The folder with the server's JARs, fetched once."""
    return fetch_jars(f"rocketmq/{VERSION}", ARTIFACTS, say)


def prepare(folder: Path, state: State, say: Say) -> list[str]:
    """Properties are those of broker.conf; with `proxy.` before the name, of rmq-proxy.json.

    Raises:
        DeliveredError: also if no network namespace can be created.
    """
    jars, properties = fetch(say), state.settings["properties"]
    ports = {name: int(split_address(address)[1]) for name, address in state.listeners.items()}
    for name in ("conf", "logs"):
        (folder / name).mkdir(exist_ok=True)
    conf, name_server = folder / "conf", f"127.0.0.1:{ports[NAMESRV]}"
    of_broker = {k: v for k, v in properties.items() if not k.startswith(PROXY)}
    of_proxy = {k.removeprefix(PROXY): _value(v) for k, v in properties.items() if k.startswith(PROXY)}
    files = {
        "namesrv.conf": as_lines({"listenPort": ports[NAMESRV], "bindAddress": "127.0.0.1"}),
        "broker.conf": as_lines({**_broker(folder, ports[BROKER], name_server), **of_broker}),
        "rmq-proxy.json": json.dumps({**_proxy(ports[GRPC], name_server), **of_proxy}),
        "logback.xml": _LOGBACK.replace("{level}", log_level()),
    }
    for name, text in files.items():
        (conf / name).write_text(text, encoding="utf-8")

    def run(heap_mb: int, *arguments: str) -> list[str]:
        return [
            *java_command(
                heap_mb,
                jars,
                "-XX:+UseSerialGC",
                "-XX:MaxMetaspaceSize=192m",
                f"-XX:MaxDirectMemorySize={DIRECT_MB}m",
                f"-Duser.home={folder}",  # contains the logs
                f"-Drocketmq.home.dir={folder}",
                "-Dtls.server.mode=disabled",  # would need a native library
                f"-Drmq.logback.configurationFile={conf}/logback.xml",
                *open_packages(*_OPENS),
            ),
            *arguments,
        ]

    proxy = ("-pm", "LOCAL", "-n", name_server, "-bc", f"{conf}/broker.conf", "-pc", f"{conf}/rmq-proxy.json")
    return Enclosed(
        commands=[
            run(64, "org.apache.rocketmq.namesrv.NamesrvStartup", "-c", f"{conf}/namesrv.conf"),
            run(state.settings["heap_mb"], "org.apache.rocketmq.proxy.ProxyStartup", *proxy),
        ],
        waits=[ports[NAMESRV], None],
        ports=sorted(ports.values()),
        environment={"ROCKETMQ_HOME": str(folder), "RMQ_PROXY_HOME": str(folder)},
    ).command(folder)


def answers(state: State) -> bool:
    """Whether the proxy speaks HTTP/2, and the name server knows the broker."""
    with suppress(OSError, ValueError, DeliveredError):
        with connected(state.listeners[GRPC]) as peer:
            peer.sendall(_PREFACE)
            if peer.makefile("rb").read(4)[3:] != b"\x04":  # SETTINGS
                return False
        return b"brokerAddrs" in ask(state.listeners[NAMESRV], _CLUSTER_INFO, {}, timeout_s=2.0)
    return False


def make_topic(broker: str, name: str, kind: str = "NORMAL", queues: int = 4) -> None:
    """Create or change a topic.

    Args:
        broker: its address, `broker.listeners["BROKER"]`.
        kind: message type, one of `KINDS`.
    """
    fields = {
        "topic": name,
        "defaultTopic": "TBW102",
        "readQueueNums": str(queues),
        "writeQueueNums": str(queues),
        "perm": "6",
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0",
        "order": "false",
        "attributes": f"+message.type={kind}",
    }
    ask(broker, _UPDATE_TOPIC, fields)


def make_group(broker: str, name: str, ordered: bool = False, attempts: int = 16) -> None:
    """Create or change a consumer group.

    Args:
        broker: as for `make_topic`.
        ordered: messages of a message group are delivered in order.
        attempts: deliveries of a message before it is dead-lettered.
    """
    config = {
        "groupName": name,
        "consumeEnable": True,
        "consumeFromMinEnable": True,
        "consumeBroadcastEnable": True,
        "consumeMessageOrderly": ordered,
        "retryQueueNums": 1,
        "retryMaxTimes": attempts,
        "brokerId": 0,
        "whichBrokerWhenConsumeSlowly": 1,
        "notifyConsumerIdsChangedEnable": True,
    }
    ask(broker, _UPDATE_GROUP, {}, json.dumps(config).encode())


def ask(address: str, code: int, fields: Mapping[str, str], body: bytes = b"", timeout_s: float = 10.0) -> bytes:
    """The body of a reply."""
    return answer(address, code, fields, body, timeout_s)[1]


def answer(
    address: str, code: int, fields: Mapping[str, str], body: bytes = b"", timeout_s: float = 10.0
) -> tuple[dict[str, str], bytes]:
    """One request of RocketMQ's remoting protocol; returns fields and body of the reply.

    Raises:
        DeliveredError: the server rejected it.
    """
    header = {"code": code, "language": "JAVA", "version": 399, "opaque": 1, "flag": 0, "extFields": dict(fields)}
    head = json.dumps(header).encode()
    with connected(address, timeout_s) as peer:
        peer.sendall(struct.pack(">ii", 4 + len(head) + len(body), len(head)) + head + body)
        stream = peer.makefile("rb")
        start = stream.read(8)
        if len(start) < 8:
            raise ConnectionError(f"{address} closed the connection")
        size, head_size = struct.unpack(">ii", start)
        frame = stream.read(size - 4)
    head_size &= 0xFFFFFF
    reply = json.loads(frame[:head_size])
    if reply["code"] != 0:
        raise DeliveredError("ROCKETMQ_ERROR.TOOL", address=address, detail=reply.get("remark") or reply["code"])
    return reply.get("extFields") or {}, frame[head_size:]


def _broker(folder: Path, port: int, name_server: str) -> dict[str, str]:
    return {
        "brokerClusterName": "DefaultCluster",
        "brokerName": "delivered",
        "brokerId": "0",
        "brokerRole": "ASYNC_MASTER",
        "brokerIP1": "127.0.0.1",
        "bindAddress": "127.0.0.1",
        "listenPort": str(port),
        **_INNER,
        "namesrvAddr": name_server,
        "storePathRootDir": str(folder / "data"),
        "storePathCommitLog": str(folder / "data" / "commitlog"),
        "flushDiskType": "ASYNC_FLUSH",
        "autoCreateTopicEnable": "false",
        "autoCreateSubscriptionGroup": "false",
        "mappedFileSizeCommitLog": str(64 << 20),
        "mappedFileSizeConsumeQueue": str(20 * 50_000),
        # Disks of development machines are often full; the default would block all senders.
        "diskMaxUsedSpaceRatio": "99",
        "timerWheelEnable": "true",
        # Each flush compares all of the timer wheel (37 MB): every second costs an idle broker a quarter of a core.
        "timerFlushIntervalMs": "10000",
        # Otherwise it loses messages delivered to a receiver at the moment it ended (decision 029).
        "popConsumerKVServiceInit": "true",
        "popConsumerKVServiceEnable": "true",
    }


def _proxy(port: int, name_server: str) -> dict[str, Any]:
    return {
        "rocketMQClusterName": "DefaultCluster",
        "namesrvAddr": name_server,
        "grpcServerPort": port,
        "remotingListenPort": _REMOTING_PORT,
        "grpcShutdownTimeSeconds": 1,
    }


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


_LOGBACK = """<configuration>
  <appender name="console" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%d %-5level %logger{0} %msg%n</pattern></encoder>
  </appender>
  <root level="{level}"><appender-ref ref="console"/></root>
</configuration>
"""


SERVER = Server(
    listeners=lambda _: [GRPC, NAMESRV, BROKER],
    prepare=prepare,
    answers=answers,
    fetch=fetch,
    url="{}",
    version=lambda: VERSION,
    pipeline='{{format: rocketmq, endpoints: "{url}", topic: orders, group: orders, log: orders-log}}',
)
