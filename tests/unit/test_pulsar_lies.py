"""Bytes that are no commands of Pulsar, and brokers that answer what nobody asked: an error in words, no wait."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest

from delivered.clients.pulsar.connection import (
    MESSAGE,
    Cluster,
    Connection,
    Error,
    NoAnswer,
    Rejected,
    Settings,
    Unreadable,
    decode,
    encode,
    encode_send,
    frame_size,
)
from delivered.clients.pulsar.producer import Flow, Message, Producer, Resend
from delivered.clients.pulsar.transactions import Coordinators, TransactionId
from delivered.model.limits import PULSAR_COMMAND_BYTES_MAX
from delivered.model.work import Failed, Unknown

ANSWERS = [
    encode("connected", server_version=b"x", protocol_version=21, max_message_size=1 << 20),
    encode("lookup_response", request_id=1, url="pulsar://127.0.0.1:1", response=1),
    encode("new_txn_response", request_id=2, txnid_most_bits=1, txnid_least_bits=7),
    encode("send_receipt", producer_id=1, sequence_id=0, message_id=MESSAGE["MessageId"](ledger=3, entry=4)),
    encode("error", request_id=3, error=24, message=b"\xff not text"),
    encode("auth_challenge", challenge=MESSAGE["AuthData"](auth_method_name="token", auth_data=b"x")),
    encode("producer_success", request_id=4, producer_name="p", producer_ready=True),
    encode("ping"),
]


def mutated(dice: random.Random, seed: bytes) -> bytes:
    found = bytearray(seed)
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(found) + 1)
        found[at : at + dice.randrange(3)] = bytes(dice.randrange(256) for _ in range(dice.randrange(4)))
    return bytes(found)


def test_mutated_frames_are_commands_or_unreadable() -> None:
    dice, kinds = random.Random(36), set()
    for _ in range(3_000):
        frame = mutated(dice, dice.choice(ANSWERS)).ljust(8, b"\0")
        try:
            assert frame_size(frame[:4]) <= PULSAR_COMMAND_BYTES_MAX
            name, _ = decode(frame[4:])
        except Unreadable as error:
            assert str(error).isprintable()
            kinds.add("unreadable")
        else:
            kinds.add(name)
    assert {"unreadable", "", "connected", "ping"} <= kinds


def test_sizes_without_end_are_refused() -> None:
    for size in (0, 4, PULSAR_COMMAND_BYTES_MAX + 1, 0xFFFFFFFF):
        with pytest.raises(Unreadable, match="not a Pulsar broker"):
            frame_size(struct.pack(">I", size))


def test_a_frame_has_the_checksum_of_what_follows_it() -> None:
    """CRC-32C of "123456789" is e3069283."""
    from delivered.clients.kafka.record_batch import library

    head = MESSAGE["MessageMetadata"](producer_name="p", sequence_id=1, publish_time=2)
    frame = encode_send(head, b"payload", producer_id=1, sequence_id=1)
    total, size = struct.unpack_from(">II", frame)
    assert total == len(frame) - 4
    rest = frame[8 + size :]
    if (loaded := library()) is not None:
        assert loaded.rb_crc32c(b"123456789", 9, 0) == 0xE3069283
        magic, checksum = struct.unpack_from(">HI", rest)
        assert (magic, checksum) == (0x0E01, loaded.rb_crc32c(rest[6:], len(rest) - 6, 0))
        rest = rest[6:]
    [length] = struct.unpack_from(">I", rest)
    assert rest[4 : 4 + length] == head.SerializeToString()
    assert rest[4 + length :] == b"payload"


@contextmanager
def broker(answer: Callable[[str, Any, int], bytes], answers: int = 1_000) -> Iterator[tuple[str, int]]:
    """A server that answers each command with these bytes, empty: not at all; and closes after so many."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]

    def serve(peer: socket.socket) -> None:
        stream = peer.makefile("rb")
        with suppress(OSError, Unreadable, struct.error), peer, stream:
            for _ in range(answers):
                head = stream.read(4)
                peer.sendall(answer(*decode(stream.read(frame_size(head))), port))

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=[listening.accept()[0]], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield "127.0.0.1", port
    finally:
        listening.close()


def soon() -> float:
    return time.monotonic() + 10


def good(name: str, command: Any, port: int) -> bytes:
    """What a broker answers that serves everything."""
    match name:
        case "connect":
            return ANSWERS[0]
        case "partitions":
            return encode("partitions_response", request_id=command.request_id, partitions=2, response=0)
        case "lookup":
            url = f"pulsar://127.0.0.1:{port}"
            return encode("lookup_response", request_id=command.request_id, url=url, response=1)
        case "producer":
            return encode("producer_success", request_id=command.request_id, producer_name=command.producer_name)
        case "new_txn" | "add_partitions" | "end_txn" | "join_coordinator":
            return encode(f"{name}_response", request_id=command.request_id)
    return b""


@pytest.mark.parametrize("seed", range(12))
def test_bytes_instead_of_answers_end_the_connection(seed: int) -> None:
    """Whatever arrives, the one who asked gets an error in words at once, and never somebody else's answer."""
    dice = random.Random(seed)

    def lies(name: str, command: Any, port: int) -> bytes:
        if name == "connect":
            return ANSWERS[0]
        return mutated(dice, dice.choice(ANSWERS))

    with broker(lies, answers=2) as address:
        connection = Connection(address, Settings([address]), 10)
        with pytest.raises((NoAnswer, Rejected)) as raised:
            connection.ask("add_partitions", soon(), partitions=["t"], txnid_most_bits=0, txnid_least_bits=0)
        assert str(raised.value).isprintable()


def test_a_broker_that_names_no_broker() -> None:
    def nowhere(name: str, command: Any, port: int) -> bytes:
        if name == "lookup":
            return encode("lookup_response", request_id=command.request_id, url="http://[::", response=1)
        return good(name, command, port)

    with broker(nowhere) as address, pytest.raises(NoAnswer, match="names 'http"):
        Cluster(Settings([address])).serving("persistent://a/b/c", soon())


def test_redirects_that_do_not_end() -> None:
    def around(name: str, command: Any, port: int) -> bytes:
        if name == "lookup":
            url = f"pulsar://127.0.0.1:{port}"
            return encode("lookup_response", request_id=command.request_id, url=url, response=0, authoritative=True)
        return good(name, command, port)

    with broker(around) as address, pytest.raises(NoAnswer, match="20 redirects"):
        Cluster(Settings([address])).serving("persistent://a/b/c", soon())


def test_a_proxy_is_connected_to_instead_of_the_broker() -> None:
    seen = []

    def proxy(name: str, command: Any, port: int) -> bytes:
        if name == "connect":
            seen.append(command.proxy_to_broker_url)
        if name == "lookup":
            return encode(
                "lookup_response", request_id=command.request_id, url="pulsar://inside:6650", response=1,
                proxy_through_service_url=True,
            )  # fmt: skip
        return good(name, command, port)

    with broker(proxy) as address:
        assert Cluster(Settings([address])).serving("persistent://a/b/c", soon()).name == "inside:6650"
    assert seen == ["", "inside:6650"]


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (Error.TXN_NOT_FOUND, Failed),
        (Error.INVALID_TXN_STATUS, Failed),
        (Error.COORDINATOR_NOT_FOUND, Unknown),
        (Error.SERVICE_NOT_READY, Unknown),
        (0, Unknown),
        (99, Unknown),
        (None, Unknown),
    ],
)
def test_outcomes_of_an_end(code: int | None, outcome: type) -> None:
    """None: the connection breaks."""

    def ends(name: str, command: Any, port: int) -> bytes:
        if name != "end_txn":
            return good(name, command, port)
        if code is None:
            return b"\xff" * 8
        return encode("end_txn_response", request_id=command.request_id, error=code, message=b"why")

    with broker(ends) as address:
        ended = Coordinators(Cluster(Settings([address]))).end(TransactionId(1, 5), commit=True, deadline=soon())
    assert isinstance(ended, outcome)


def producer(address: tuple[str, int], flow: Flow, **settings: Any) -> Producer:
    return Producer(Cluster(Settings([address])), "persistent://a/b/c", flow, soon(), **settings)


def test_a_message_is_lost_with_its_connection() -> None:
    """It is not sent again: nobody knows whether it is stored."""
    sends = []

    def breaks(name: str, command: Any, port: int) -> bytes:
        if name == "send":
            sends.append(command.sequence_id)
            return b"\xff" * 8
        return good(name, command, port)

    with broker(breaks) as address:
        flow = Flow()
        made = producer(address, flow)
        made.send(Message(b"x"), soon())
        with pytest.raises(NoAnswer):
            made.end_batch(soon())
            flow.drain(soon())
        with pytest.raises(NoAnswer):
            flow.check()
    assert sends == [0]


def test_what_is_in_flight_is_bounded() -> None:
    """Without acknowledgements, sending stops at the bound."""
    seen: list[int] = []

    def silent(name: str, command: Any, port: int) -> bytes:
        if name == "send":
            seen.append(command.num_messages)
        return good(name, command, port)

    with broker(silent) as address:
        flow = Flow(bytes_max=100_000)
        made = producer(address, flow)
        with pytest.raises(NoAnswer, match="not acknowledged"):
            for _ in range(100):
                made.send(Message(bytes(30_000)), time.monotonic() + 0.2)
                made.end_batch(time.monotonic() + 0.2)
    assert len(seen) == 3


def test_a_message_that_is_dropped_as_a_repeat_is_an_error() -> None:
    """A broker acknowledges a repeat with the message id -1."""

    def drops(name: str, command: Any, port: int) -> bytes:
        if name == "send":
            nowhere = MESSAGE["MessageId"](ledger=(1 << 64) - 1, entry=(1 << 64) - 1)
            return encode(
                "send_receipt", producer_id=command.producer_id, sequence_id=command.sequence_id, message_id=nowhere
            )
        return good(name, command, port)

    with broker(drops) as address:
        flow = Flow()
        made = producer(address, flow)
        made.send(Message(b"x"), soon())
        made.end_batch(soon())
        with pytest.raises(NoAnswer, match="dropped as a repeat"):
            flow.drain(soon())


@pytest.mark.parametrize("how", ["connection breaks", "broker closes the producer", "broker could not store it"])
@pytest.mark.parametrize("resend", [Resend.ALWAYS, Resend.WHERE_DROPPED])
@pytest.mark.parametrize("knows", [True, False])
def test_what_was_not_acknowledged_is_sent_again(resend: Resend, knows: bool, how: str) -> None:
    """By the same producer, under the same sequence ids; where repeats must not be stored, only to a broker that knows
    the producer."""
    sends: list[tuple[str, int]] = []
    names: dict[int, str] = {}

    def breaks(name: str, command: Any, port: int) -> bytes:
        if name == "producer":
            names[command.producer_id] = command.producer_name
            return encode(
                "producer_success", request_id=command.request_id, producer_name=command.producer_name,
                last_sequence_id=0 if knows and len(set(sends)) else -1,
            )  # fmt: skip
        if name != "send":
            return good(name, command, port)
        numbers = {"producer_id": command.producer_id, "sequence_id": command.sequence_id}
        sends.append((names[command.producer_id], command.sequence_id))
        if sends.count(sends[-1]) > 1 or command.sequence_id != 1:
            return encode("send_receipt", **numbers, message_id=MESSAGE["MessageId"](ledger=1, entry=len(sends)))
        match how:
            case "connection breaks":
                return b"\xff" * 8
            case "broker closes the producer":
                return encode("close_producer", producer_id=command.producer_id, request_id=1)
        return encode("send_error", **numbers, error=2, message=b"no bookie")

    with broker(breaks) as address:
        flow = Flow()
        made = producer(address, flow, resend=resend)
        for text in (b"x", b"y", b"z"):
            made.send(Message(text), soon())
            made.end_batch(soon())
            flow.drain(soon())
    assert {name for name, _ in sends} == {made._name}
    again = knows or resend is Resend.ALWAYS
    assert [number for _, number in sends] == ([0, 1, 1, 2] if again else [0, 1, 2])
    assert flow.acknowledged == 2 + again


@pytest.mark.parametrize("knows", [True, False])
def test_a_chunk_is_sent_again_only_to_a_broker_that_drops_it(knows: bool) -> None:
    """Readers drop a message of which a chunk comes twice."""
    sends: list[int] = []

    def breaks(name: str, command: Any, port: int) -> bytes:
        if name == "producer":
            last = 1 if knows and sends else -1
            return encode("producer_success", request_id=command.request_id, producer_name="p", last_sequence_id=last)
        if name != "send":
            return good(name, command, port)
        sends.append(command.sequence_id)
        if sends.count(1) == 1 and command.sequence_id == 1:
            return b"\xff" * 8
        return encode(
            "send_receipt", producer_id=command.producer_id, sequence_id=command.sequence_id,
            message_id=MESSAGE["MessageId"](ledger=1, entry=len(sends)),
        )  # fmt: skip

    with broker(breaks) as address:
        flow = Flow()
        made = producer(address, flow, resend=Resend.ALWAYS, chunks=True)
        with nullcontext() if knows else pytest.raises(NoAnswer, match="between chunks"):
            made.send(Message(bytes(range(256)) * (3 << 12)), soon())
            flow.drain(soon())
    assert not knows or set(sends) == {0, 1, 2, 3}
    assert flow.acknowledged == knows
