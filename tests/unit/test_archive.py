"""Archive entries of old runs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pyarrow import fs

from delivered.kits.table import store as storage
from delivered.kits.table.store import FILES_MAX, ArchiveFiles, Store
from delivered.model.errors import InvariantBroken
from delivered.model.fingerprint import Fingerprint
from delivered.model.work import ENTRY_BYTES, Archive, Archived, key_of


def entry(number: int, given_up: int = 0) -> Archived:
    return Archived.of(f"run-{number}", Fingerprint(number, number, number), Fingerprint(given_up))


def at(folder: Path) -> ArchiveFiles:
    return ArchiveFiles(Store(fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem()), folder), "archive")


def test_an_entry_comes_back_as_it_went_in() -> None:
    for made in (entry(7), entry(7, given_up=2), Archived.started("run-7")):
        assert Archived.decode(made.encode()) == made
        assert len(made.encode()) == ENTRY_BYTES == 25


def test_an_entry_knows_its_rows() -> None:
    assert entry(7).holds(Fingerprint(7, 7, 7))
    assert not entry(7).holds(Fingerprint(7, 7, 8))
    assert not entry(7).holds(Fingerprint(6, 7, 7))
    assert entry(7, given_up=2).holds(Fingerprint(9, 1, 1))  # at_most_once: the digest excludes what was given up
    assert not entry(7, given_up=2).holds(Fingerprint(6, 7, 7))


def test_a_decision_counts_more_than_a_batch_that_was_begun() -> None:
    started = Archived.started("run-1")
    for order in ([started, entry(1)], [entry(1), started]):
        archive = Archive().with_more(order)
        assert archive.find("run-1") == entry(1)
    assert len(Archive().with_more([entry(1)]).with_more([entry(1), entry(2)])) == 2


def test_a_name_is_found_at_its_own_place_alone() -> None:
    """The bytes of a name may span two entries."""
    hidden = Archived(bytes(8), int.from_bytes(key_of("run-1"), "big"))
    archive = Archive().with_more([hidden, *(entry(i) for i in range(2, 100))])
    assert archive.find("run-1") is None
    assert archive.with_more([entry(1)]).find("run-1") == entry(1)


def test_bytes_that_were_not_written_are_refused() -> None:
    with pytest.raises(InvariantBroken, match="LEDGER_RECORD_MISSING"):
        Archive(b"short")


def test_p4_many_files_become_few_and_nothing_is_forgotten(tmp_path: Path) -> None:
    for i in range(200):
        at(tmp_path).add([entry(i)])
        assert len(list((tmp_path / "archive").iterdir())) <= FILES_MAX + 1
    archive = at(tmp_path).read()
    assert len(archive) == 200
    assert all(archive.find(f"run-{i}") == entry(i) for i in range(200))


def test_one_who_comes_late_takes_nothing_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver fenced during compaction resumes after the next owner has added and compacted files."""
    monkeypatch.setattr(storage, "FILES_MAX", 3)
    late, removed = at(tmp_path), []
    with monkeypatch.context() as paused:
        paused.setattr(late._store, "remove", lambda names: removed.extend(names))
        for i in range(4):
            late.add([entry(i)])
    for i in range(4, 20):
        at(tmp_path).add([entry(i)])
    late._store.remove(removed)  # only now
    archive = at(tmp_path).read()
    assert all(archive.find(f"run-{i}") == entry(i) for i in range(20))


def test_a_full_file_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "FULL_BYTES", 10 * ENTRY_BYTES)
    monkeypatch.setattr(storage, "FILES_MAX", 3)
    for i in range(100):
        at(tmp_path).add([entry(i)])
    sizes = [p.stat().st_size for p in (tmp_path / "archive").iterdir()]
    assert sum(size >= 10 * ENTRY_BYTES for size in sizes) <= 10
    assert len(at(tmp_path).read()) == 100


@pytest.mark.matrix
def test_p4_a_million_runs(tmp_path: Path) -> None:
    began = time.monotonic()
    for first in range(0, 1_000_000, 10_000):
        at(tmp_path).add([entry(i) for i in range(first, first + 10_000)])
    files = [p.stat().st_size for p in (tmp_path / "archive").iterdir()]
    wrote = time.monotonic()
    found = at(tmp_path).read().find("run-999999")
    print(f"{sum(files):,} bytes in {len(files)} files; written in {wrote - began:.0f} s, ", end="")
    print(f"one found in {(time.monotonic() - wrote) * 1000:.0f} ms")
    assert found == entry(999_999)
    assert sum(files) == 1_000_000 * ENTRY_BYTES
    assert len(files) <= 1_000_000 * ENTRY_BYTES // storage.FULL_BYTES + FILES_MAX + 1
