"""Durable records: those from before formats were numbered are read, later ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.dedup import kept_dedup

from delivered.checkpoint import sidecar
from delivered.clients.kafka.transactions import Transaction
from delivered.connectors.delta import client as delta
from delivered.connectors.files import StagedFile
from delivered.connectors.iceberg import writer as iceberg
from delivered.connectors.kafka.committer import read_marker
from delivered.connectors.log.produce import append
from delivered.connectors.log.table import open_table, read_progress
from delivered.connectors.rocketmq.publish import HalfMessages
from delivered.connectors.sqlite.writer import StagedRows
from delivered.kits.sql.sink import PreparedRows
from delivered.model.capability import Dedup
from delivered.model.errors import Refused
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.work import (
    LOG_FORMAT,
    LOG_PROPERTY,
    RECORD_FORMAT,
    Decision,
    Handle,
    Ok,
    Owner,
    Prepared,
    Promise,
    Started,
)
from delivered.pipeline.registry import connector

FORMATS = Path(__file__).parent / "formats"
UNNUMBERED: dict[str, str] = json.loads((FORMATS / "unnumbered.json").read_text())
"""As they were written before formats were numbered."""
FORMAT_1: dict[str, str] = json.loads((FORMATS / "format_1.json").read_text())
"""As 0.1 writes them. A later format gets a file of its own; this one stays."""
FORMAT_2: dict[str, str] = json.loads((FORMATS / "format_2.json").read_text())
"""Records that this format changed."""
RECORDS = {"unnumbered": UNNUMBERED, "format_1": FORMAT_1, "format_2": FORMAT_2}
STORED = [(name, kind) for name, records in RECORDS.items() for kind in records]


def progress(text: str, folder: Path) -> Any:
    (folder / "_progress").mkdir(exist_ok=True)
    (folder / "_progress" / "reader.json").write_text(text)
    return read_progress(str(folder), {}, "reader")


def sidecar_file(file: str, read: Callable[[str], Any]) -> Callable[[str, Path], Any]:
    def reader(text: str, folder: Path) -> Any:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)
        return read(str(folder))

    return reader


def metadata(location: str) -> Any:
    keys = frozenset({"#topic ids"})
    return sidecar.OffsetMetadata(location, keys, keys).find({"orders": {"0": 17}})


READERS: dict[str, Callable[[str, Path], Any]] = {
    "decision": lambda text, _: Decision.from_json(text),
    "owner": lambda text, _: Owner.from_json(text),
    "owner_kafka": lambda text, _: Owner.from_json(text),
    "owner_iceberg": lambda text, _: Owner.from_json(text),
    "begun": lambda text, _: Started.from_json(text),
    "marker": lambda text, _: read_marker(text.encode()),
    "first_offsets": sidecar_file(sidecar.FIRST_FILE, sidecar.read_first),
    "offset_metadata": sidecar_file(sidecar.METADATA_FILE, metadata),
    "deciding_sink": sidecar_file(sidecar.DECIDER_FILE, sidecar.read_decider),
    "dedup": sidecar_file(
        sidecar.DEDUP_FILE, lambda location: (kept_dedup(location), sidecar.find_changed_dedup(location, None))
    ),
    "removed_sources": sidecar_file(sidecar.REMOVED_FILE, sidecar.read_removed),
    "log_progress": progress,
}


@pytest.mark.parametrize(("records", "kind"), STORED)
def test_stored_record_is_read(records: str, kind: str, tmp_path: Path) -> None:
    text = RECORDS[records][kind]
    found = READERS[kind](text, tmp_path)
    owner = Owner("driver-2", "host-1", 4711, 1763884700000, ("driver-1", "driver-0"))
    match kind:
        case "decision":
            assert (found.batch, found.revision, found.total.count, found.given_up.count) == (41, 1, 100, 3)
            assert [p.fingerprint.count for p in found.participants] == [10, 2, 2]
            assert [p.sink for p in found.participants] == ["kafka", "kafka", "audit"], (
                "the ledger's sink was not named"
            )
            assert [*found.transforms[1].accounts] == ["kafka"]
            assert found.sequence == (7 if records == "format_2" else 0)
            assert (found.transform, found.transforms[1].batch) == ("def", 40)
            assert [p.given_up for p in found.participants] == [{}, {}, {"unknown": 2}], "it stood in the handle"
            stored = json.loads(text)
            stored["participants"][2] |= {"handle": {}, "given_up": {"unknown": 2}}
            assert json.loads(found.to_json()) == {**stored, "format": RECORD_FORMAT}
        case "owner":
            assert found == (owner, {})
        case "owner_kafka":
            assert found == (owner, {"claims": 9})
        case "owner_iceberg":
            assert found == (owner, {"epoch": 9})
        case "begun":
            assert found == Started(42, '{"orders":{"0":4200}}')
            assert found.sequence == (7 if records == "format_2" else 0)
        case "marker":
            assert found == ("5f0c7f9e-3a63-4f0e-9a53-0d1f0a7a6d11", 41, Fingerprint(10, 11, 12))
        case "first_offsets":
            assert found == {"orders": {"0": 17}}
        case "offset_metadata":
            assert found == {"#topic ids": {"orders": "Ab3"}}
        case "deciding_sink":
            assert found == "audit"
        case "dedup":
            kept = Dedup(("id",), 3_600_000, kind="table")
            assert found == (kept, f"dedup {kept.says} of the database of sink 'audit'")
        case "removed_sources":
            assert found == {"orders": '{"orders":{"0":17}}'}
        case "log_progress":
            assert found == {0: 17}
        case _:
            raise AssertionError(f"no test of {kind}")


@pytest.mark.parametrize("newer", [RECORD_FORMAT + 1, "2024a", -1])
@pytest.mark.parametrize("kind", READERS)
def test_record_of_a_later_version_is_refused(kind: str, newer: object, tmp_path: Path) -> None:
    text = json.dumps({**json.loads(FORMAT_1[kind]), "format": newer})
    with pytest.raises(Refused, match="FORMAT_NEWER") as refused:
        READERS[kind](text, tmp_path)
    assert repr(newer) in refused.value.message
    assert "or a later one" in str(refused.value.next_step)


HANDLES: list[tuple[Handle, str]] = [
    (Transaction("delivered.p.s.0.1", 7, 3), '{"epoch": 3, "producer_id": 7, "transactional_id": "delivered.p.s.0.1"}'),
    (PreparedRows("delivered/p/s/0"), '{"gid": "delivered/p/s/0"}'),
    (
        PreparedRows("", "s_1", "a.t", '"k", "v"', 2, ("k", "v"), "PRIMARY"),
        '{"staged": "s_1", "target": "a.t", "columns": "\\"k\\", \\"v\\"", "kept": 2, "stored": ["k", "v"], '
        '"index": "PRIMARY"}',
    ),
    (
        delta.StagedFiles((delta.DataFile("a.parquet", 9, 2, {"day": None}, "{}", 5),)),
        '{"files": [{"path": "a.parquet", "size": 9, "rows": 2, "partition": {"day": null}, "statistics": "{}", '
        '"modified_ms": 5}]}',
    ),
    (
        iceberg.StagedFiles("d/w", 1, 9, 0, 0, (1, 2)),
        '{"writer": "d/w", "files": 1, "bytes": 9, "schema": 0, "spec": 0, "columns": [1, 2]}',
    ),
    (
        iceberg.StagedFiles("d/w", 1, rows=(("d/w-0.parquet", 9, 2),)),
        '{"writer": "d/w", "files": 1, "rows": [["d/w-0.parquet", 9, 2]]}',
    ),
    (StagedFile("0-0-0-a.staged", 9, 2), '{"file": "0-0-0-a.staged", "bytes": 9, "rows": 2}'),
    (StagedRows("i.0.0.0.a.arrow", 2, 9, 4), '{"path": "i.0.0.0.a.arrow", "rows": 2, "bytes": 9, "crc32": 4}'),
    (
        HalfMessages("g.a", {"b": "c$}"}, {"b": {"0": 17}}),
        '{"name": "g.a", "halves": {"b": "c$}"}, "since": {"b": {"0": 17}}}',
    ),
]
"""With what was stored before handles had a format."""


@pytest.mark.parametrize(("handle", "unnumbered"), HANDLES, ids=lambda h: type(h).__name__)
def test_handles_with_and_without_a_format_are_read_and_later_ones_refused(handle: Handle, unnumbered: str) -> None:
    stored = json.loads(unnumbered)
    work = Work(Scope("p", "s", "i"), 0, 3, 1)
    prepared = Prepared.of(work, Fingerprint(2), Promise(handle, {"x": 1}))
    assert prepared.handle == json.loads(json.dumps(prepared.handle)) == {"format": 1, **stored}
    again = Prepared.from_json(json.loads(json.dumps(prepared.to_json("s"))), "s")
    assert again == prepared
    kind = type(handle)
    assert kind.of(again) == handle == kind.from_json(stored)
    assert handle.names(again)
    assert handle.names(replace(again, handle=stored))
    assert not handle.names(replace(again, handle={"gid": "another"}))
    with pytest.raises(Refused, match="FORMAT_NEWER") as refused:
        kind.from_json({**stored, "format": 2})
    assert kind.__name__ in refused.value.message


@pytest.mark.parametrize("system", ["delta", "files", "iceberg", "sqlite"])
def test_committers_of_staged_files_refuse_handles_of_a_later_version(system: str, tmp_path: Path) -> None:
    """At once, not after they have asked for as long as an outage may last."""
    more = {"sqlite": {"path": str(tmp_path / "rows.db"), "table": "rows"}, "iceberg": {"table": "shop.orders"}}
    at = {"warehouse": str(tmp_path)} if system == "iceberg" else {"path": str(tmp_path / "rows")}
    sink, work = connector(system).sink({**at, **more.get(system, {})}), Work(Scope("p", "s", "i"), 0, 3, 1)
    kinds = {"delta": delta.StagedFiles, "files": StagedFile, "iceberg": iceberg.StagedFiles, "sqlite": StagedRows}
    handle = next(h for h, _ in HANDLES if type(h) is kinds[system])
    prepared = Prepared.of(work, Fingerprint(2), Promise(handle))
    later = replace(prepared, handle={**prepared.handle, "format": 2})
    with closing(sink.committer(work.scope)) as committer:
        assert committer.abort(replace(prepared, handle={})) == Ok(None)
        with pytest.raises(Refused, match="FORMAT_NEWER"):
            committer.abort(later)
        if system != "iceberg":  # without a table there are no orphans
            with pytest.raises(Refused, match="FORMAT_NEWER"):
                committer.abort_orphans([later])


def test_what_was_given_up_keeps_its_reasons() -> None:
    stored = {"shard": 0, "attempt": 0, "fingerprint": str(Fingerprint(9))}
    for handle, given_up in (
        ({"given_up": 5, "reasons": {"_MSG_TIMED_OUT": 3, "_TRANSPORT": 2}}, {"_MSG_TIMED_OUT": 3, "_TRANSPORT": 2}),
        ({"given_up": 5}, {"unknown": 5}),
    ):
        found = Prepared.from_json({**stored, "handle": handle}, "s")
        assert (found.handle, found.given_up) == ({}, given_up)
        assert Prepared.from_json(found.to_json("s"), "s") == found


def test_written_records_are_read_again() -> None:
    owner, started = Owner("a", "b", 1, 2, ("c",)), Started(1, "{}")
    assert Owner.from_json(owner.to_json(epoch=3)) == (owner, {"epoch": 3})
    assert Started.from_json(started.to_json()) == started
    assert json.loads(owner.to_json())["format"] == RECORD_FORMAT


def test_log_of_a_later_version_is_refused(tmp_path: Path) -> None:
    import deltalake
    import pyarrow as pa

    path = str(tmp_path / "log")
    append(path, pa.table({"value": [b"a"]}))
    assert open_table(path, {}).metadata().configuration[LOG_PROPERTY] == str(LOG_FORMAT)
    table = deltalake.DeltaTable(path)
    table.alter.set_table_properties({LOG_PROPERTY: str(RECORD_FORMAT + 1)}, raise_if_not_exists=False)
    with pytest.raises(Refused, match="FORMAT_NEWER"):
        append(path, pa.table({"value": [b"b"]}))
