"""Pulsar as a source, against a real broker: repeated reads, limits, batches, chunks, retention, kills."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.broker.replayed_help import values_over_a_kill
from tests.support.pulsar import CHUNK, FULL, batches, read, read_all, rows, source, values
from tests.support.servers import Pulsar
from tests.support.sweeps import sweep

from delivered.connectors.pulsar import SourceOptions, from_json
from delivered.connectors.pulsar.client import Admin
from delivered.connectors.pulsar.client import pulsar as client_library
from delivered.model.errors import InvariantBroken, Unreachable, UsageError

parse = SourceOptions.parse


def test_columns_are_kafkas_and_native(pulsar: Pulsar) -> None:
    topic, began = pulsar.topic(), time.time()
    told = {"content": b"v", "partition_key": "k", "properties": {"a": "b"}, "event_timestamp": 1_700_000_000_123}
    pulsar.send(topic, [told, b"bare"])
    src = source(pulsar, topic, includeHeaders="true")
    assert src.preflight() == []
    first, second = read_all(src).to_pylist()
    assert first.pop("timestamp").timestamp() == pytest.approx(began, abs=60)
    native = first.pop("native")
    assert native.pop("producer_name")
    ledger, entry = native["ledger_id"], native["entry_id"]
    assert native == {
        "ledger_id": ledger,
        "entry_id": 0,
        "batch_index": -1,
        "event_time": datetime.fromtimestamp(1_700_000_000.123, UTC),
    }
    headers = [{"key": "a", "value": b"b"}]
    assert first == {
        "key": b"k", "value": b"v", "topic": FULL + topic, "partition": 0, "offset": (ledger << 28) + entry,
        "timestampType": 0, "headers": headers,
    }  # fmt: skip
    assert (second["key"], second["value"], second["headers"]) == (None, b"bare", None)
    assert second["native"]["event_time"] is None
    assert second["offset"] == first["offset"] + 1


@pytest.mark.parametrize(
    ("batch", "partitions"),
    sweep(itertools.product([0, 40], [0, 3]), lambda batch, partitions: (batch, partitions) != (0, 3)),
    ids=["single-0", "single-3", "batched-0", "batched-3"],
)
def test_the_same_range_gives_the_same_rows_and_the_limit_cuts_it(pulsar: Pulsar, partitions: int, batch: int) -> None:
    topic = pulsar.topic(partitions)
    for n in range(max(1, partitions)):
        pulsar.send(f"{topic}-partition-{n}" if partitions else topic, rows(1_000, 1_000 * n), batch=batch)
    total = 1_000 * max(1, partitions)
    src = source(pulsar, topic, startingOffsets="earliest")
    whole = read(src, *batches(src, None)[0])
    assert sorted(values(whole)) == sorted(rows(total))
    for _, part in itertools.groupby(whole.to_pylist(), lambda row: row["partition"]):
        placed = [tuple(row["native"].values())[:3] for row in part]
        assert placed == sorted(placed)
        assert len(set(placed)) == 1_000

    cuts = batches(src, 300)
    pieces = [read(src, *cut) for cut in cuts]
    sizes = [len(p) for p in pieces]
    assert sum(sizes) == total
    assert max(sizes) <= 300 + batch * max(1, partitions)
    assert len(sizes) <= total / 300 * 1.5 + 1
    again = source(pulsar, topic)  # another process, later, with other start options
    for cut, piece in zip(cuts, pieces, strict=True):
        kept = json.loads(json.dumps(cut))
        assert src.driver().slices(*kept) == again.driver().slices(*cut)
        assert read(again, *kept).equals(piece)
    assert sorted(values(pa.concat_tables(pieces))) == sorted(rows(total))
    end = cuts[-1][1]
    assert src.driver().slices(end, end) == []  # P17


@pytest.mark.parametrize("behind", [[], [b"clear"]], ids=["last", "in the middle"])
def test_an_encrypted_message_is_named(pulsar: Pulsar, tmp_path: Path, behind: list[bytes]) -> None:
    """The client drops it, and says so in its log alone."""
    private = rsa.generate_private_key(65537, 2048)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    keys = tmp_path / "public.pem", tmp_path / "private.pem"
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    keys[0].write_bytes(private.public_key().public_bytes(pem, form))
    keys[1].write_bytes(private.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    reader = client_library().CryptoKeyReader(*map(str, keys))
    topic = pulsar.topic()
    pulsar.send(topic, [b"clear"])
    pulsar.send(topic, [b"secret"], encryption_key="mine", crypto_key_reader=reader)
    pulsar.send(topic, behind)
    with pytest.raises(UsageError, match=rf"MESSAGE_ENCRYPTED.*entry \d+:1 of {topic} "):
        read_all(source(pulsar, topic))


def test_a_stream_starts_where_it_is_told(pulsar: Pulsar) -> None:
    topic = pulsar.topic()
    pulsar.send(topic, rows(10))
    found = read_all(source(pulsar, topic))
    assert values(found) == rows(10)
    times = found.column("timestamp").cast(pa.int64()).to_pylist()
    time.sleep(0.01)
    pulsar.send(topic, rows(20, 10), batch=20)

    def stream(**options: Any) -> list[bytes | None]:
        src = source(pulsar, topic, **options)
        cuts = batches(src, None)
        return values(read(src, *cuts[0])) if cuts else []

    native = found.column("native").to_pylist()[4]
    place = f"{native['ledger_id']}:{native['entry_id']}"
    assert stream(startingOffsets="latest") == []
    assert stream(startingOffsets="earliest") == rows(30)
    assert stream(startingOffsets=json.dumps({topic: {"-1": place}})) == rows(25, 5)
    assert stream(startingTimestamp=times[9] // 1000 + 1) == rows(20, 10)
    assert stream(startingTimestamp=times[0] // 1000) == rows(30)
    assert stream(startingTimestamp=int(time.time() * 1000) + 60_000) == []

    # A message id in the middle of a batch, as serialized by a client.
    import pulsar as library

    reader = pulsar.client().create_reader(topic, library.MessageId.earliest)
    seen = [reader.read_next(10_000).message_id() for _ in range(17)]
    reader.close()
    text = base64.b64encode(seen[-1].serialize()).decode()
    assert stream(startingOffsets=json.dumps({topic: {"-1": text}})) == rows(13, 17)

    # The result of `initial` does not depend on later messages.
    first = json.dumps(source(pulsar, topic).driver().initial())
    pulsar.send(topic, [b"new"])
    assert stream(startingOffsets=first) == [b"new"]
    assert stream(startingOffsets=first, startingTimestamp=0) == [b"new"]

    frozen = source(pulsar, topic, startingOffsets="earliest").driver()
    frozen.freeze()
    pulsar.send(topic, [b"after"])
    assert frozen.latest(frozen.initial(), None) != frozen.newest()


def test_bad_options_are_errors_at_once(pulsar: Pulsar) -> None:
    topic = pulsar.topic(2)
    for options, said in (
        ({"startingOffsets": "first"}, "earliest"),
        ({"startingOffsets": json.dumps({topic: {"0": "12:34"}})}, f"does not name {topic}-partition-1"),
        ({"startingOffsets": json.dumps({topic: {"0": "9:9", "1": "9:9", "2": "1:1"}})}, "names .*-partition-2"),
        ({"startingOffsets": json.dumps({topic: {"0": "999999:9", "1": "earliest"}})}, "OFFSET_OUT_OF_RANGE"),
        ({"startingOffsets": json.dumps({topic: {"0": "AAA=", "1": "earliest"}})}, "OPTION_VALUE"),
        ({"startingTimestamp": "yesterday"}, "milliseconds"),
        ({"endingOffsets": "latest"}, "OPTION_CONFLICT"),
        ({"startingoffset": "latest"}, "startingOffsets"),
        ({"topics": "t-partition-0"}, "without -partition-N"),
        ({"url": "http://somewhere"}, "pulsar://"),
    ):
        with pytest.raises(UsageError, match=said):
            source(pulsar, topic, **options).driver().initial()
    with pytest.raises(UsageError, match="latest for a batch"):
        source(pulsar, topic, startingOffsets="latest").driver().batch()


def test_a_missing_topic_is_an_error_and_is_not_made(pulsar: Pulsar) -> None:
    (finding,) = source(pulsar, "nowhere").preflight()
    assert (finding.code, finding.refuses) == ("TOPIC_MISSING", True)
    with pytest.raises(UsageError, match="TOPIC_MISSING"):
        source(pulsar, "nowhere").driver().initial()
    assert not [t for t in pulsar.admin("GET", "persistent/public/default") if "nowhere" in t]


def test_a_broker_that_is_not_there_is_one_clear_error(pulsar: Pulsar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delivered.connectors.pulsar.client.CONNECT_TIMEOUT_S", 3)
    for wrong in ({"adminUrl": "http://127.0.0.1:1"}, {"url": "pulsar://127.0.0.1:1"}):
        began = time.monotonic()
        (finding,) = source(pulsar, pulsar.topic(), **wrong).preflight()
        assert (finding.code, finding.refuses) == ("PULSAR_UNREACHABLE", True)
        assert time.monotonic() - began < 8


def _chunks(pulsar: Pulsar, topic: str, messages: list[bytes]) -> None:
    pulsar.send(topic, messages, chunking_enabled=True)


def test_messages_in_chunks_come_whole_wherever_a_batch_ends(pulsar: Pulsar) -> None:
    """A batch may end between two chunks, and plain messages may be interleaved."""
    topic = pulsar.topic()
    big = [bytes([n]) * (CHUNK * 2 + 100) for n in (1, 2)]
    pulsar.send(topic, rows(3))
    plain = pulsar.client().create_producer(topic)
    stop = threading.Event()

    def between() -> None:
        while not stop.is_set():
            plain.send(b"between")

    other = threading.Thread(target=between)
    other.start()
    _chunks(pulsar, topic, big)
    stop.set()
    other.join()
    plain.close()
    pulsar.send(topic, rows(3, 3))
    src = source(pulsar, topic, startingOffsets="earliest")
    whole = read(src, *batches(src, None)[0])
    told = [v for v in values(whole) if v != b"between"]
    assert told == [*rows(3), *big, *rows(3, 3)]
    places = [tuple(x.values())[:2] for x in whole.column("native").to_pylist()]
    assert places == sorted(places)
    entries = pulsar.admin("GET", f"persistent/public/default/{topic}/internalStats")["currentLedgerEntries"]
    assert entries >= len(whole) + 4, "the big messages were not cut into chunks"

    cuts = batches(src, 1)  # every entry a batch of its own
    assert len(cuts) == entries
    one_by_one = [read(src, *cut) for cut in cuts]
    assert [len(t) for t in one_by_one].count(0) >= 4
    joined = pa.concat_tables(one_by_one)
    assert values(joined) == values(whole)
    assert joined.column("native").equals(whole.column("native"))


def test_what_is_gone_is_an_error(pulsar: Pulsar) -> None:
    forgets = {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}
    # Deduplication snapshots would retain ledgers.
    topic = pulsar.topic(namespace=pulsar.namespace(retention=forgets, deduplication=False))
    path = topic.replace("://", "/")
    pulsar.admin("PUT", f"{path}/subscription/holds", {"ledgerId": -1, "entryId": -1})
    for n in range(5):
        pulsar.send(topic, rows(10, 10 * n))
        pulsar.admin("PUT", f"{path}/unload")  # the next message begins another ledger
    src = source(pulsar, topic, startingOffsets="earliest")
    (_, first), second = batches(src, 15)[:2]
    assert values(read(src, *second)) == rows(15, 15)
    pulsar.admin("POST", f"{path}/subscription/holds/skip_all")
    oldest = next(iter(from_json(first).values())).ledger
    deadline = time.monotonic() + 120
    while (ledgers := [x["ledgerId"] for x in pulsar.admin("GET", f"{path}/internalStats")["ledgers"]])[0] <= oldest:
        assert time.monotonic() < deadline, ledgers
        pulsar.admin("POST", f"{path}/trim", {})
        time.sleep(0.2)
    assert Admin(parse({**pulsar.options, "topics": topic})).entry(topic, oldest, 0) is None
    with pytest.raises(InvariantBroken, match="DATA_LOST"):
        src.driver().latest(first, 15)
    with pytest.raises(InvariantBroken, match="DATA_LOST"):
        read(src, *second)
    careless = source(pulsar, topic, startingOffsets="earliest", failOnDataLoss="false")
    assert careless.driver().latest(first, None)
    assert values(read(careless, *second)) == []


def test_a_topic_made_again_that_grew_past_the_position_is_an_error(pulsar: Pulsar) -> None:
    """P29: the ledgers of another topic have other ids."""
    topic = pulsar.topic()
    pulsar.send(topic, rows(50))
    src = source(pulsar, topic, startingOffsets="earliest")
    start, end = src.driver().batch()
    known = src.driver().landmarks(end)
    assert len(known) == 1
    src.driver().check_landmarks(end, known)
    pulsar.admin("DELETE", f"persistent/public/default/{topic}?force=true")
    pulsar.admin("PUT", f"persistent/public/default/{topic}", {})
    pulsar.send(topic, rows(200))
    for planned in (start, end):
        with pytest.raises(InvariantBroken, match="DATA_LOST"):
            src.driver().latest(end, None) if planned is end else read(src, start, end)


@pytest.mark.matrix
def test_a_restored_server_that_grew_past_the_position_is_an_error(
    new_pulsar: Callable[[], Pulsar], tmp_path: Path
) -> None:
    """P29: it gives the ids of ledgers again. The entry at the position is another one."""
    pulsar = new_pulsar()
    topic = pulsar.topic()
    pulsar.send(topic, rows(70))
    pulsar.close()
    pulsar.broker.stop()
    shutil.copytree(pulsar.broker.folder, tmp_path / "copy")
    pulsar.broker.restart()
    pulsar.send(topic, rows(30, 70))
    src = source(pulsar, topic, startingOffsets="earliest")
    _, end = src.driver().batch()
    known = src.driver().landmarks(end)
    pulsar.close()
    pulsar.broker.stop()
    for part in [p for p in (tmp_path / "copy").iterdir() if p.is_dir()]:
        shutil.rmtree(pulsar.broker.folder / part.name)
        shutil.copytree(part, pulsar.broker.folder / part.name)
    pulsar.broker.restart()
    pulsar.send(topic, rows(100, 1_000))
    driver = src.driver()
    assert from_json(driver.latest(end, None)) != from_json(end), "positions alone show nothing"
    with pytest.raises(InvariantBroken, match=r"DATA_LOST.*older copy"):
        driver.check_landmarks(end, known)


def test_a_subscription_keeps_what_was_not_read_and_moves_after_the_batch(pulsar: Pulsar) -> None:
    """P23: a subscription that nobody acknowledges grows for ever; one that moves too early loses what it kept."""
    topic = pulsar.topic(2)
    pulsar.send(f"{topic}-partition-0", rows(20))
    src = source(pulsar, topic, startingOffsets="earliest", subscription="spark")
    assert src.preflight() == []

    def behind() -> int:
        stats = pulsar.admin("GET", f"persistent/public/default/{topic}/partitioned-stats")
        return int(stats["subscriptions"]["spark"]["msgBacklog"])

    driver = src.driver()
    start = driver.initial()
    assert behind() == 20
    end = driver.latest(start, 8)
    assert behind() == 20
    driver.acknowledge(end)
    assert behind() == 20 - len(read(src, start, end))
    driver.acknowledge(start)  # late: never moves backwards
    src.driver().acknowledge(start)
    assert behind() == 20 - len(read(src, start, end))
    driver.acknowledge(driver.latest(end, None))
    assert behind() == 0

    consumer = pulsar.client().subscribe(topic, "spark")
    (finding,) = src.preflight()
    consumer.close()
    assert (finding.code, finding.refuses) == ("SUBSCRIPTION_IN_USE", True)


@pytest.mark.matrix
def test_a_broker_killed_while_a_slice_is_read(new_pulsar: Callable[..., Pulsar]) -> None:
    pulsar = new_pulsar()
    topic = pulsar.topic()
    pulsar.send(topic, rows(30_000), batch=50)
    src = source(pulsar, topic, startingOffsets="earliest")
    start, end = batches(src, None)[0]
    (piece,) = src.driver().slices(start, end)
    reading = src.read(piece)
    found = [next(reading)]
    pulsar.close()
    pulsar.broker.kill()
    again = threading.Timer(1, pulsar.broker.restart)
    again.start()
    try:
        found += reading
    finally:
        again.join()
    assert values(pa.Table.from_batches(found)) == rows(30_000)
    assert values(read(src, start, end)) == rows(30_000)
    driver = src.driver()
    after = driver.latest(end, None)  # includes the ledger that the restart began
    assert driver.slices(end, after) == []
    assert driver.latest(after, None) == after
    pulsar.send(topic, [b"more"])
    assert values(read(src, after, driver.latest(after, None))) == [b"more"]
    pulsar.close()
    pulsar.broker.kill()
    with pytest.raises(Unreachable):
        src.driver().newest()


@pytest.mark.parametrize(
    "point",
    [
        "commit.decide:before",
        pytest.param("commit.decide:after", marks=pytest.mark.matrix),
        pytest.param("log:before", marks=pytest.mark.matrix),
    ],
)
def test_a_pipeline_killed_and_started_again_has_every_message_once(pulsar: Pulsar, tmp_path: Path, point: str) -> None:
    """F6: Pulsar to SQLite, exactly_once, two partitions, producer batches split by the limit."""
    topic = pulsar.topic(2)
    for n in range(2):
        pulsar.send(f"{topic}-partition-{n}", rows(2_000, 2_000 * n), batch=30)
    found = values_over_a_kill(tmp_path, {"format": "pulsar", **pulsar.options, "topics": topic}, point)
    assert found == Counter(rows(4_000))
