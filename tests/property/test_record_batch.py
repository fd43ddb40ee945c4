"""Record batches from and to Arrow: encode -> decode, encode -> kafka-python, kafka-python -> decode; bytes that lie.

Real clients and brokers: tests/broker/test_record_batch.py.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from ast import literal_eval
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.memory_records import MemoryRecords

from delivered.clients.kafka import record_batch as rb
from delivered.clients.kafka.record_batch import COMPRESSIONS, FAULTS, scratch
from delivered.model.errors import BadRecord, UsageError
from delivered.source import HEADERS, micros

BIG = 1 << 20
WHERE = ("orders", 3)
ROOT = Path(__file__).parents[2]


class Row(NamedTuple):
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    ms: int


data = st.one_of(
    st.none(), st.binary(max_size=20), st.integers(60, 70).map(bytes), st.integers(8180, 8200).map(lambda n: b"xy" * n)
)
headers = st.lists(st.tuples(st.text(max_size=70), st.one_of(st.none(), st.binary(max_size=70))), max_size=3)
times = st.one_of(st.integers(-1, 2**41), st.sampled_from([-(2**61), 2**61, 2**53]))
rows = st.lists(st.builds(Row, data, data, headers, times), max_size=20)
compressions = st.sampled_from(COMPRESSIONS)


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if not rb.available():
        compiler = os.environ.get("CC", "cc")
        assert shutil.which(compiler) is None, f"there is {compiler}, but no {rb.LIBRARY}: run `make setup`"
        pytest.skip("no compiler here")


def arrays(given_rows: Sequence[Row], wide: bool = False, pad: int = 0) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Key, value and headers; with `pad` rows before and after that are sliced off."""
    kind = pa.large_binary() if wide else pa.binary()
    fence = [Row(b"fence", None, [("fence", b"")], 0)] * pad
    padded = [*fence, *given_rows, *fence]
    listed: list[Any] = [[{"key": k, "value": v} for k, v in r.headers] or None for r in padded]
    item = HEADERS.type.value_type
    found = (
        pa.array([r.key for r in padded], kind),
        pa.array([r.value for r in padded], kind),
        pa.array(listed, pa.large_list(item) if wide else pa.list_(item)),
    )
    key, value, of_headers = (a.slice(pad, len(given_rows)) for a in found)
    return key, value, of_headers


def encoded(given_rows: Sequence[Row], wide: bool = False, pad: int = 0, **options: Any) -> list[rb.Encoded]:
    key, value, of_headers = arrays(given_rows, wide, pad)
    timestamps = np.array([r.ms for r in given_rows], np.int64)
    return list(rb.encode(key, value, of_headers, timestamps=timestamps, **({"bytes_max": BIG} | options)))


def at_offset(batch: bytes | memoryview, base: int) -> bytes:
    return struct.pack(">q", base) + bytes(batch[8:])


def log(batches: Sequence[rb.Encoded], base: int = 0) -> bytes:
    """As a broker stores them: with offsets."""
    return b"".join(at_offset(b.data, base + b.first) for b in batches)


def decoded(buffer: Any, start: int = 0, end: int = 2**63 - 1, **options: Any) -> list[tuple[int, Row]]:
    found = rb.decode(buffer, WHERE, start, end, **({"aborted": None, "headers": True} | options))
    return [pair for batch in found for pair in as_rows(batch)]


def as_rows(batch: pa.RecordBatch) -> Iterator[tuple[int, Row]]:
    batch.validate(full=True)
    us = np.asarray(batch["timestamp"].cast(pa.int64()))
    for row, at in zip(_plain(batch), us.tolist(), strict=True):
        listed = [(h["key"], h["value"]) for h in row["headers"] or ()]
        yield row["offset"], Row(row["key"], row["value"], listed, at)


def _plain(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    return batch.drop_columns(["timestamp"]).to_pylist()  # datetime does not hold all of them


def expected(given_rows: Sequence[Row], base: int = 0) -> list[tuple[int, Row]]:
    return [(base + i, r._replace(ms=micros(r.ms, 1000))) for i, r in enumerate(given_rows)]


@given(rows, compressions, st.booleans(), st.integers(0, 3), st.sampled_from([100, 300, 20_000]))
def test_what_is_encoded_is_decoded(some: list[Row], how: str, wide: bool, pad: int, target: int) -> None:
    batches = encoded(some, wide, pad, compression=how, target_bytes=target)
    assert [b.first for b in batches] == [sum(b.count for b in batches[:i]) for i in range(len(batches))]
    assert all(len(b.data) <= target or b.count == 1 for b in batches)
    buffer = log(batches, base=7)
    assert decoded(buffer) == expected(some, 7)
    assert decoded(buffer, chunk_bytes=1) == expected(some, 7)
    assert rb.decode(buffer, WHERE, 0, aborted=()).position == (7 + len(some) if some else 0)


@given(rows, st.sampled_from(["none", "gzip"]), st.booleans(), st.sampled_from([100, 20_000]))
def test_kafka_python_reads_what_is_encoded(some: list[Row], how: str, transactional: bool, target: int) -> None:
    identity = {"producer_id": 2**40, "producer_epoch": 7, "sequence": 2**31 - 3, "transactional": transactional}
    found, sequence = [], 2**31 - 3
    for batch in encoded(some, compression=how, target_bytes=target, **identity):
        (read,) = list(MemoryRecords(bytes(batch.data)))
        assert read.validate_crc()
        assert (read.producer_id, read.producer_epoch, read.is_transactional) == (2**40, 7, transactional)
        assert read.base_sequence == batch.sequence == sequence
        sequence = (sequence + batch.count) % 2**31
        ours = list(read)
        assert read.records_count == len(ours) == batch.count == read.last_offset_delta + 1
        assert read.max_timestamp == max(r.timestamp for r in ours)
        assert [r.offset for r in ours] == list(range(batch.count))
        found += [Row(r.key, r.value, r.headers, r.timestamp) for r in ours]
    assert found == some


@given(rows, st.integers(0, 1), st.lists(st.integers(1, 3), min_size=20, max_size=20), st.integers(0, 2**40))
def test_what_kafka_python_wrote_is_decoded(some: list[Row], codec: int, gaps: list[int], base: int) -> None:
    """With gaps between offsets, as compaction leaves them."""
    builder = DefaultRecordBatchBuilder(2, codec, False, -1, -1, -1, BIG)
    offset, wanted = -1, []
    for row, gap in zip(some, gaps, strict=False):
        offset += gap
        assert builder.append(offset, row.ms, row.key, row.value, row.headers) is not None
        wanted.append((base + offset, row._replace(ms=micros(row.ms, 1000))))
    buffer = at_offset(bytes(builder.build()), base)
    if some:
        assert decoded(buffer) == wanted
        assert decoded(buffer, base + offset) == wanted[-1:]
        assert decoded(buffer, 0, base + offset) == wanted[:-1]
        assert rb.decode(buffer, WHERE, 0, base + offset, aborted=None).position == base + offset


@given(rows.filter(bool), st.data())
def test_gathered_rows(some: list[Row], draw: st.DataObject) -> None:
    chosen = draw.draw(st.lists(st.integers(0, len(some) - 1)))
    index = np.array(chosen, draw.draw(st.sampled_from([np.int32, np.int64])))
    batches = encoded(some, rows=index, target_bytes=400)
    assert decoded(log(batches)) == expected([some[i] for i in chosen])


@given(st.lists(st.one_of(st.none(), st.binary(max_size=30))), st.integers(1, 50))
def test_partitions_of_keys_are_those_of_the_java_client(keys: list[bytes | None], n: int) -> None:
    found = rb.partition_of(pa.array(keys, pa.binary()), n)
    assert found.tolist() == [-1 if k is None else (murmur2(k) & 0x7FFFFFFF) % n for k in keys]
    if None not in keys:
        order, bounds = rb.group(found, n)
        for p in range(n):
            assert order[bounds[p] : bounds[p + 1]].tolist() == [i for i, q in enumerate(found) if q == p]


@given(st.binary(max_size=70_000), st.integers(0, 9))
def test_crc(some: bytes, skip: int) -> None:
    """By the processor's instruction and by table, from any address on."""
    from kafka.record.util import calc_crc32c

    buffer = np.frombuffer(bytes(skip) + some, np.uint8)
    library, at = rb.functions(), buffer.ctypes.data + skip
    assert {library.rb_crc32c(at, len(some), by_table) for by_table in (0, 1)} == {calc_crc32c(some)}


# -- what a Fetch response holds --------------------------------------------------------------------------------------

PLAIN = [Row(b"k%d" % i, b"v%d" % i, [], 1000 + i) for i in range(4)]


def part(base: int, producer: int = -1, attributes: int = 0, n: int = 4) -> bytes:
    """A batch of `n` plain records at `base`."""
    (batch,) = encoded(PLAIN[:n], producer_id=producer)
    return sealed(bytearray(at_offset(batch.data, base)), attributes)


def control(base: int, producer: int, commit: bool) -> bytes:
    key = struct.pack(">hh", 0, 1 if commit else 0)
    (batch,) = encoded([Row(key, bytes(6), [], 5)], producer_id=producer)
    return sealed(bytearray(at_offset(batch.data, base)), 0x30)


def sealed(batch: bytearray, attributes: int | None = None) -> bytes:
    """With a CRC that fits."""
    if attributes is not None:
        struct.pack_into(">h", batch, 21, attributes)
    tail = np.frombuffer(batch[21:], np.uint8)
    struct.pack_into(">I", batch, 17, rb.functions().rb_crc32c(tail.ctypes.data, len(tail), 1))
    return bytes(batch)


def offsets(buffer: bytes, start: int = 0, end: int = 2**63 - 1, **options: Any) -> tuple[list[int], int]:
    found = rb.decode(buffer, WHERE, start, end, **({"aborted": ()} | options))
    return [o for batch in found for o in batch["offset"].to_pylist()], found.position


def test_aborted_transactions_are_left_out() -> None:
    buffer = (
        part(0, 1, 16)  # aborted
        + part(4, 2, 16)  # committed
        + part(8)  # outside of transactions
        + control(12, 1, commit=False)
        + part(13, 1, 16)  # the same producer's next transaction, committed
        + control(17, 2, commit=True)
        + control(18, 1, commit=True)
        + part(19, 1, 16)  # aborted, its marker in another response
        + part(23, 1, 0)  # idempotent, in no transaction
    )
    everything = [*range(12), *range(13, 17), *range(19, 27)]
    assert offsets(buffer, aborted=None) == (everything, 27)
    committed = [*range(4, 12), *range(13, 17), *range(23, 27)]
    assert offsets(buffer, aborted=[(1, 19), (1, 0)]) == (committed, 27)
    assert offsets(buffer, 5, aborted=[(1, 0), (1, 19)]) == (committed[1:], 27)


def test_a_truncated_batch_at_the_end() -> None:
    buffer = part(0) + part(4)
    size = len(part(4))
    for cut in range(1, size + 1):
        found = rb.decode(buffer[:-cut], WHERE, 0, aborted=())
        assert [len(b) for b in found] == [4]
        assert found.position == 4
        assert found.partial == (size if size - cut >= 17 else 0)


def test_an_empty_buffer_and_an_empty_batch() -> None:
    assert offsets(b"", 5) == ([], 5)
    empty = bytearray(part(4)[:61])
    struct.pack_into(">i", empty, 8, 49)
    struct.pack_into(">i", empty, 57, 0)
    assert offsets(part(0) + sealed(empty)) == ([0, 1, 2, 3], 8)  # compaction keeps it for its sequence


def test_the_end_is_respected() -> None:
    buffer = part(0) + part(4) + part(20)
    assert offsets(buffer, 2, 6) == ([2, 3, 4, 5], 6)
    assert offsets(buffer, 2, 15) == ([2, 3, 4, 5, 6, 7], 15)
    assert offsets(buffer, 9, 15) == ([], 15)
    assert offsets(buffer, 9, 20) == ([], 20)


def test_append_time() -> None:
    buffer = part(0, attributes=8)
    (batch,) = rb.decode(buffer, WHERE, 0, aborted=())
    assert set(batch["timestamp"].cast(pa.int64()).to_pylist()) == {1_003_000}
    assert set(batch["timestampType"].to_pylist()) == {1}


def test_old_formats_name_the_place_and_the_way_out() -> None:
    for magic in (0, 1):
        old = bytearray(part(9))
        old[16] = magic
        with pytest.raises(
            UsageError, match=rf"orders-3 holds records of message format {magic} at offset 9.*librdkafka"
        ):
            rb.decode(bytes(old), WHERE, 0, aborted=())


def test_a_header_that_is_not_utf8_keeps_its_bytes() -> None:
    builder = DefaultRecordBatchBuilder(2, 0, False, -1, -1, -1, BIG)
    builder.append(0, 1, None, b"", [("\xff", b""), ("b'\\xff\\xfe'", b"text"), ("plain", b"")])
    raw = bytearray(builder.build()).replace("\xff".encode(), b"\xff\xfe")
    names = [name for name, _ in decoded(sealed(raw))[0][1].headers]
    assert names == ["b'\\xff\\xfe'", "b\"b'\\\\xff\\\\xfe'\"", "plain"]
    assert [literal_eval(name) for name in names[:2]] == [b"\xff\xfe", b"b'\\xff\\xfe'"]


def test_snappy_as_java_frames_it() -> None:
    (batch,) = encoded(PLAIN)
    records = bytes(batch.data[61:])
    codec = pa.Codec("snappy")
    blocks = [codec.compress(x, asbytes=True) for x in (records[:10], records[10:11], records[11:])]
    framed = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1) + b"".join(struct.pack(">i", len(b)) + b for b in blocks)
    for payload in (framed, codec.compress(records, asbytes=True)):
        whole = bytearray(bytes(batch.data[:61]) + payload)
        struct.pack_into(">i", whole, 8, len(whole) - 12)
        assert decoded(sealed(whole, 2)) == expected(PLAIN)


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_a_record_that_is_too_large() -> None:
    noise = np.random.default_rng(1).bytes(5000)
    for value in (noise, bytes(5000)):
        with pytest.raises(BadRecord, match=r"Row 1 needs a batch of 5\d\d\d bytes; the limit is 4000"):
            encoded([PLAIN[0], Row(None, value, [], 1)], bytes_max=4000)
    with pytest.raises(BadRecord, match="Row 0 needs a batch of"):
        encoded([Row(None, noise, [], 1)], bytes_max=4000, compression="lz4")
    # As the broker sees it: compressed.
    (batch,) = encoded([Row(None, bytes(5000), [], 1)], bytes_max=4000, compression="lz4")
    assert decoded(batch.data) == expected([Row(None, bytes(5000), [], 1)])


@pytest.mark.parametrize("how", COMPRESSIONS)
def test_a_batch_that_compression_makes_larger_is_sent_as_it_is(how: str) -> None:
    some = [Row(None, np.random.default_rng(i).bytes(100), [], 1) for i in range(300)]
    batches = encoded(some, compression=how, bytes_max=10_000)
    assert all(len(b.data) <= 10_000 for b in batches)
    assert decoded(log(batches)) == expected(some)


@pytest.mark.parametrize("how", COMPRESSIONS)
def test_batches_of_a_megabyte(how: str) -> None:
    some = [Row(b"%08d" % i, (b"%d," % (i * i)) * 30, [], i) for i in range(9000)]
    batches = encoded(some, compression=how)
    assert len(batches) > 1 or how != "none"
    assert decoded(log(batches)) == expected(some)


@pytest.mark.parametrize("how", ["gzip", "lz4", "zstd", "snappy"])
def test_a_bomb_is_refused_before_it_takes_memory(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rb, "_scratches", rb._Scratches())  # earlier tests of this process have grown this thread's
    before = encoded([Row(None, b"before", [], 1)], compression=how)
    (batch,) = encoded([Row(None, bytes(12 << 20), [], 1)], compression=how, bytes_max=32 << 20)
    assert len(batch.data) < 1 << 20
    buffer = log(before) + at_offset(batch.data, 7)
    found = iter(rb.decode(buffer, WHERE, 0, aborted=None, bytes_max=3 << 20))
    assert next(found).column("value").to_pylist() == [b"before"], "what comes before it is not lost"
    room = scratch()
    with pytest.raises(rb.BatchTooLarge, match=rf"KAFKA_BATCH_TOO_LARGE.*orders-3 at offset 7 .* of {how}") as caught:
        next(found)
    error = caught.value
    assert "maxRecordBatchBytes" in str(error.next_step) and "more than 3145728 decompressed" in error.message
    assert (error.offset, error.next_offset, error.batch) == (7, 8, at_offset(batch.data, 7))
    assert len(room._bytes) <= 2 * ((3 << 20) + 1), "and no more memory than its limit"
    assert decoded(at_offset(batch.data, 7), bytes_max=12 << 21) == expected([Row(None, bytes(12 << 20), [], 1)], 7)


# -- bytes that lie ----------------------------------------------------------------------------------------------------


@given(rows.filter(bool), compressions, st.data())
def test_damaged_bytes_are_an_error_that_names_the_place(some: list[Row], how: str, draw: st.DataObject) -> None:
    """One wrong byte after the length, wherever: the CRC tells."""
    (batch,) = encoded(some, compression=how)
    damaged = bytearray(at_offset(batch.data, 5))
    at = draw.draw(st.one_of(st.integers(17, len(damaged) - 1), st.integers(17, 61)))
    damaged[at] ^= draw.draw(st.integers(1, 255))
    with pytest.raises(rb.CorruptBatch, match="orders-3 at offset 5 is corrupt: its CRC-32C is"):
        decoded(bytes(damaged))


@given(rows.filter(bool), compressions, st.data())
def test_lies_under_a_valid_crc_are_an_error_or_records(some: list[Row], how: str, draw: st.DataObject) -> None:
    (batch,) = encoded(some, compression=how)
    damaged = bytearray(batch.data)
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.one_of(st.integers(8, len(damaged) - 1), st.integers(8, min(100, len(damaged) - 1))))
        damaged[at] = draw.draw(st.one_of(st.integers(0, 255), st.sampled_from([0, 127, 128, 255])))
    try:
        decoded(sealed(damaged))
    except (rb.CorruptBatch, UsageError) as error:
        assert "orders-3" in str(error)


@pytest.mark.parametrize("mutations", [20_000, pytest.param(2_000_000, marks=pytest.mark.matrix)])
def test_no_lie_makes_c_read_or_write_beyond_its_buffers(tmp_path: Path, mutations: int) -> None:
    """Mutated batches under AddressSanitizer and UndefinedBehaviorSanitizer, in buffers of their exact size."""
    compiler = os.environ.get("CC", "cc")
    source, driver = rb.LIBRARY.parent, tmp_path / "fuzz"
    sanitized = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    built = subprocess.run(
        [compiler, *sanitized, f"-I{source}", ROOT / "tests/support/record_batch_fuzz.c", "-o", driver],
        capture_output=True,
        text=True,
    )
    if "-lasan" in built.stderr or "-lubsan" in built.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    seeds = {
        "plain": part(0),
        "headers": log(encoded([Row(None, b"v" * 100, [("h", b"x"), ("", None)], 1), Row(b"", None, [], 2)] * 4), 4),
        "transaction": part(12, 1, 16),
        "control": control(16, 1, commit=False),
        "long": log(encoded([Row(b"k" * 200, b"v" * 300, [], 3)] * 3), 17),
    }
    for name, batch in seeds.items():
        (tmp_path / name).write_bytes(batch)
    ran = subprocess.run(
        [driver, str(mutations), "1", *(tmp_path / name for name in seeds)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    counted = [int(n) for n in ran.stdout.partition("faults:")[2].split()]
    # Each fault was found at least once, but for the last, which would be a mistake of the caller.
    assert len(counted) == len(FAULTS) and all(counted[:-1]) and not counted[-1], ran.stdout
