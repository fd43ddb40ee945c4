"""Durable records: those from before formats were numbered are read, later ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from delivered.checkpoint import first_offsets
from delivered.connectors.kafka.markers import read_marker
from delivered.connectors.log.produce import append
from delivered.connectors.log.table import open_table, read_progress
from delivered.model.errors import Refused
from delivered.model.fingerprint import Fingerprint
from delivered.model.record_format import FORMAT, LOG_PROPERTY
from delivered.model.work import Begun, Decision, Owner

UNNUMBERED: dict[str, str] = json.loads((Path(__file__).parent / "formats" / "unnumbered.json").read_text())
"""As they were written before formats were numbered."""


def progress(text: str, folder: Path) -> Any:
    (folder / "_progress").mkdir(exist_ok=True)
    (folder / "_progress" / "reader.json").write_text(text)
    return read_progress(str(folder), {}, "reader")


def first(text: str, folder: Path) -> Any:
    (folder / first_offsets.FILE).parent.mkdir(exist_ok=True)
    (folder / first_offsets.FILE).write_text(text)
    return first_offsets.kept(str(folder))


READERS: dict[str, Callable[[str, Path], Any]] = {
    "decision": lambda text, _: Decision.from_json(text),
    "owner": lambda text, _: Owner.from_json(text),
    "owner_kafka": lambda text, _: Owner.from_json(text),
    "owner_iceberg": lambda text, _: Owner.from_json(text),
    "begun": lambda text, _: Begun.from_json(text),
    "marker": lambda text, _: read_marker(text.encode()),
    "first_offsets": first,
    "log_progress": progress,
}


@pytest.mark.parametrize("kind", UNNUMBERED)
def test_record_without_a_format_is_read(kind: str, tmp_path: Path) -> None:
    found = READERS[kind](UNNUMBERED[kind], tmp_path)
    owner = Owner("driver-2", "host-1", 4711, 1763884700000, ("driver-1", "driver-0"))
    match kind:
        case "decision":
            assert (found.batch, found.revision, found.total.count, found.given_up.count) == (41, 1, 100, 3)
            assert [p.fingerprint.count for p in found.participants] == [10, 2, 2]
            assert [p.sink for p in found.participants] == ["kafka", "kafka", "audit"], (
                "the ledger's sink was not named"
            )
            assert [*found.transforms[1].accounts] == ["kafka"]
            assert (found.transform, found.transforms[1].batch) == ("def", 40)
            assert json.loads(found.to_json()) == {"format": FORMAT, **json.loads(UNNUMBERED[kind])}
        case "owner":
            assert found == (owner, {})
        case "owner_kafka":
            assert found == (owner, {"claims": 9})
        case "owner_iceberg":
            assert found == (owner, {"epoch": 9})
        case "begun":
            assert found == Begun(42, '{"orders":{"0":4200}}')
        case "marker":
            assert found == ("5f0c7f9e-3a63-4f0e-9a53-0d1f0a7a6d11", 41, Fingerprint(10, 11, 12))
        case "first_offsets":
            assert found == {"orders": {"0": 17}}
        case "log_progress":
            assert found == {0: 17}
        case _:
            raise AssertionError(f"no test of {kind}")


@pytest.mark.parametrize("newer", [FORMAT + 1, "2024a", -1])
@pytest.mark.parametrize("kind", UNNUMBERED)
def test_record_of_a_later_version_is_refused(kind: str, newer: object, tmp_path: Path) -> None:
    text = json.dumps({**json.loads(UNNUMBERED[kind]), "format": newer})
    with pytest.raises(Refused, match="FORMAT_NEWER") as refused:
        READERS[kind](text, tmp_path)
    assert repr(newer) in refused.value.message
    assert "or a later one" in str(refused.value.next_step)


def test_written_records_are_read_again() -> None:
    owner, begun = Owner("a", "b", 1, 2, ("c",)), Begun(1, "{}")
    assert Owner.from_json(owner.to_json(epoch=3)) == (owner, {"epoch": 3})
    assert Begun.from_json(begun.to_json()) == begun
    assert json.loads(owner.to_json())["format"] == FORMAT


def test_log_of_a_later_version_is_refused(tmp_path: Path) -> None:
    import deltalake
    import pyarrow as pa

    path = str(tmp_path / "log")
    append(path, pa.table({"value": [b"a"]}))
    assert open_table(path, {}).metadata().configuration[LOG_PROPERTY] == str(FORMAT)
    table = deltalake.DeltaTable(path)
    table.alter.set_table_properties({LOG_PROPERTY: str(FORMAT + 1)}, raise_if_not_exists=False)
    with pytest.raises(Refused, match="FORMAT_NEWER"):
        append(path, pa.table({"value": [b"b"]}))
