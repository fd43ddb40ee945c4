"""The log behind receivers: concurrent appends without duplicates, maintenance, restarts."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st
from tests.support.journal import messages, open_log, race

from delivered.connectors.log import CONNECTOR, append, produce
from delivered.connectors.log.table import write_progress
from delivered.contract.source import Entered
from delivered.model.work import Failed, Ok, Unknown
from delivered.source import HEADERS, id_text


def values(path: Path) -> list[bytes]:
    source = CONNECTOR.source({"path": str(path)})
    driver = source.driver()
    pieces = driver.slices(*driver.batch())
    return [v for p in pieces for b in source.read(p) for v in b.column("value").to_pylist()]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_a_message_enters_once(log: Path) -> None:
    journal = open_log(log)
    assert journal.append(messages("a", "b", "a")) == Ok(Entered(2, 1))
    assert journal.append(messages("b", "c")) == Ok(Entered(1, 1))
    assert open_log(log).append(messages("a", "b", "c")) == Ok(Entered(0, 3))
    assert values(log) == [b"value of a", b"value of b", b"value of c"]


def test_messages_with_nothing_but_an_id_are_written_as_any_others(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = replace(messages("a", "ü", "c" * 300), headers=[(), [], ()])
    alone = produce.build_rows(replace(plain, times_us=[1, 2, 3]))
    monkeypatch.setattr(produce, "_ids_alone", None)  # not used for mixed ones
    mixed = produce.build_rows(replace(plain, headers=[(), [("h", None)], ()], times_us=[1, 2, 3]))
    without = produce.build_rows(replace(plain, ids=["a", None, "c" * 300], times_us=[1, 2, 3]))
    assert alone.schema == mixed.schema == without.schema
    headers = alone.column("headers").to_pylist()
    assert headers == [[{"key": "delivered.id", "value": i.encode()}] for i in plain.ids if i is not None]
    assert mixed.column("headers").to_pylist() == [headers[0], [*headers[1], {"key": "h", "value": None}], headers[2]]
    assert without.column("headers").to_pylist() == [headers[0], [], headers[2]]


def test_a_message_batch_splits_into_what_it_held() -> None:
    whole = messages("a", "b", "c")
    for count in range(5):
        first, rest = messages("a", "b", "c").split(count)
        assert (len(first), len(rest)) == (min(count, 3), max(0, 3 - count))
        first.extend(rest)
        assert first == whole


def test_records_carry_id_and_headers(log: Path) -> None:
    open_log(log).append(messages("a"))
    source = CONNECTOR.source({"path": str(log), "includeHeaders": "true"})
    driver = source.driver()
    (batch,) = source.read(driver.slices(*driver.batch())[0])
    assert batch.column("headers").to_pylist() == [
        [{"key": "delivered.id", "value": b"a"}, {"key": "h", "value": b"1"}]
    ]


def test_messages_without_ids_enter_as_often_as_they_come(log: Path) -> None:
    journal = open_log(log)
    assert journal.append(messages(None, None)) == Ok(Entered(2, 0))
    assert open_log(log).append(messages(None)) == Ok(Entered(1, 0))


def test_p22_the_window_is_a_stated_bound(log: Path) -> None:
    """P22: a producer audit dedups a window only. Ours is stated: the last offsets, before and after a restart."""
    journal = open_log(log, window=2)
    journal.append(messages("a", "b", "c"))
    for reader in (journal, open_log(log, window=2)):
        assert [i for i in "abc" if i in reader.window] == ["b", "c"]
    assert open_log(log, window=2).append(messages("a")) == Ok(Entered(1, 0))


def test_ids_are_known_for_a_time_however_many_came_since(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after a restart and a compaction; and upkeep leaves their records."""
    now_s = [time.time() - 120]  # the client that compacts has its own clock
    monkeypatch.setattr(produce.time, "time_ns", lambda: int(now_s[0] * 1e9))
    options = {"window": 2, "dedup_for_ms": 60_000}
    journal = open_log(log, **options)
    for n in range(6):
        journal.append(messages(f"a{n}", f"b{n}"))
        now_s[0] += 20
    for reader in (journal, open_log(log, **options)):
        assert [n for n in range(6) if f"a{n}" in reader.window] == [2, 3, 4, 5]
    assert open_log(log, **options).append(messages("b2", "a1")) == Ok(Entered(1, 1))
    write_progress(str(log), {}, "orders", {0: 13})
    kept = open_log(log, readers=("orders",), **options)
    assert kept.maintain(exact=True) == 6, "those of a0, a1 and a2, which are older now"
    monkeypatch.setattr(produce, "LOG_FILES_MAX", 1)
    kept.maintain()
    assert kept.size().files == 1
    for reader in (journal, kept, open_log(log, **options)):
        assert reader.append(messages("a4", "a5", "b4")) == Ok(Entered(0, 3))


def test_partitions_by_key_survive_a_restart(log: Path) -> None:
    journal = open_log(log, partitions=4)
    for n in range(20):
        journal.append(messages(f"m{n}", f"o{n}", key=f"k{n}".encode()))
    again = open_log(log, partitions=4)
    assert len(again.window.ends) == 4
    assert again.window.ends == journal.window.ends
    assert again.append(messages(*(f"m{n}" for n in range(20)))) == Ok(Entered(0, 20))


def steal(log: Path, *ids: str) -> None:
    """Append as a receiver on another machine, which shares no lock with this one."""
    produce.append(str(log), pa.table(pa.Table.from_batches([produce.build_rows(messages(*ids))])))


def test_two_processes_that_append_one_message_leave_it_once(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_log(log)
    race(monkeypatch, lambda: steal(log, "b", "x"))
    assert journal.append(messages("a", "b", "c")) == Ok(Entered(2, 1, tries=2))
    assert sorted(values(log)) == [f"value of {i}".encode() for i in "abcx"]


def test_p8_an_id_known_before_it_is_persisted_loses_the_message(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P8: dedup that records the id first drops the retry. The same race, with the journal broken on purpose."""
    journal = open_log(log)
    fresh = journal.window.fresh

    def too_early(ids: Any) -> list[int]:
        found = fresh(ids)
        for i in found:
            journal.window._times[ids[i]] = 1
        return found

    monkeypatch.setattr(journal.window, "fresh", too_early)
    race(monkeypatch, lambda: steal(log, "x"))
    assert journal.append(messages("a")) == Ok(Entered(0, 1, tries=2))
    assert values(log) == [b"value of x"], "the mutant says that a is in, and it is not"


def test_receivers_of_one_log_share_what_enters(log: Path) -> None:
    """Three processes append the same 300 messages in batches of different sizes."""
    code = """
import sys
from tests.support.journal import messages, open_log
from pathlib import Path
journal, step = open_log(Path(sys.argv[1]), 1000), int(sys.argv[2])
for at in range(0, 300, step):
    journal.append(messages(*(f"m{n}" for n in range(at, min(300, at + step)))))
"""
    open_log(log)
    running = [subprocess.Popen([sys.executable, "-c", code, str(log), str(step)], cwd=Path()) for step in (7, 20, 50)]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    assert sorted(values(log)) == sorted(f"value of m{n}".encode() for n in range(300))


def test_a_receiver_stopped_with_the_lock_holds_up_the_others_once(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: they waited for ever, and could not be stopped."""
    monkeypatch.setattr(produce, "_LOCK_PATIENCE_S", 0.3)
    journal = open_log(log)
    with (log / "_delta_log" / produce._LOCK).open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        took = []
        for n in range(2):
            started = time.monotonic()
            done = Future[Any]()
            threading.Thread(
                target=lambda n=n, f=done: f.set_result(journal.append(messages(f"{n}"))), daemon=True
            ).start()
            assert done.result(20) == Ok(Entered(1, 0))
            took.append(time.monotonic() - started)
    assert took[0] >= 0.3 > took[1]
    assert journal.append(messages("2")) == Ok(Entered(1, 0))
    assert journal._lock_patience_s == 0.3, "it waits for a lock that is given back"


def copy_over(log: Path, older: Path) -> None:
    log.rename(older.with_name("former"))
    older.rename(log)
    for n in range(5):  # more commits than before
        steal(log, f"other {n}")


def restore(log: Path, older: Path) -> None:
    del older
    DeltaTable(str(log)).restore(1)


@pytest.mark.parametrize(("replace", "reason"), [(copy_over, "Another folder"), (restore, "Version 4 of the log")])
def test_a_log_taken_back_while_receiving_acknowledges_nothing(log: Path, replace: Any, reason: str) -> None:
    """Regression: messages that the log had lost counted as known, and new ones left a gap in its offsets."""
    journal, older = open_log(log), log.with_name("older")
    journal.append(messages("a"))
    shutil.copytree(log, older)
    journal.append(messages("b"))
    journal.append(messages("c"))
    replace(log, older)
    for batch in (messages("b"), messages("d")):
        outcome = journal.append(batch)
        assert isinstance(outcome, Failed)
        assert reason in outcome.reason
    assert open_log(log).append(messages("a", "b", "d")) == Ok(Entered(2, 1))
    assert {b"value of a", b"value of b", b"value of d"} <= set(values(log))


@pytest.mark.parametrize("landed", [False, True])
def test_an_error_of_the_storage_is_looked_at(log: Path, monkeypatch: pytest.MonkeyPatch, landed: bool) -> None:
    """Failed only if it was not appended. Appended with an error: not acknowledged, and recognised on redelivery."""
    journal = open_log(log)
    commit = produce.commit

    def fails(*arguments: Any) -> None:
        if landed:
            commit(*arguments)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(produce, "commit", fails)
    outcome = journal.append(messages("a"))
    monkeypatch.setattr(produce, "commit", commit)
    assert isinstance(outcome, Unknown if landed else Failed)
    assert open_log(log).append(messages("a")) == Ok(Entered(0, 1) if landed else Entered(1, 0))
    assert values(log) == [b"value of a"]
    assert not landed or open_log(log).append(messages("a")) == Ok(Entered(0, 1))


def test_upkeep_takes_what_every_reader_has_behind_it_and_no_more(log: Path) -> None:
    journal = open_log(log, window=10, readers=("audit", "orders"), keep_s=0)
    for n in range(6):
        journal.append(messages(*(f"m{n}-{i}" for i in range(10))))
    assert journal.maintain() == 0, "nothing is known of the readers"
    write_progress(str(log), {}, "orders", {0: 60})
    assert journal.maintain() == 0, "nothing is known of one of them"
    CONNECTOR.source({"path": str(log), "reader": "audit"}).driver().acknowledge({"version": 3, "offsets": {"0": 35}})
    assert journal.maintain() == 30, "whole files below 35"
    assert journal.maintain(exact=True) == 5, "to the record"
    assert values(log)[0] == b"value of m3-5"
    write_progress(str(log), {}, "audit", {0: 60})
    assert journal.maintain(exact=True) == 15, "the window's own ids stay"
    assert open_log(log, window=10).window.ends == {0: 60}
    assert journal.append(messages("m5-3", "new")) == Ok(Entered(1, 1))
    assert len(values(log)) == 11
    begin, end = CONNECTOR.source({"path": str(log)}).driver().batch()
    assert (begin["offsets"], end["offsets"]) == ({"0": 50}, {"0": 61})


def test_upkeep_keeps_what_is_young(log: Path) -> None:
    journal = open_log(log, window=1, readers=("orders",), keep_s=3600)
    journal.append(messages("a"))
    journal.append(messages("b"))
    journal.append(messages("c"))
    write_progress(str(log), {}, "orders", {0: 3})
    assert journal.maintain() == 0
    assert open_log(log, window=1, readers=("orders",), keep_s=0).maintain() == 2


def test_upkeep_puts_files_together_and_loses_nothing(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(produce, "LOG_FILES_MAX", 5)
    journal, other = open_log(log), open_log(log)
    for n in range(8):
        (journal if n % 2 else other).append(messages(f"m{n}"))
    assert journal.size().files == 8
    journal.maintain()
    assert journal.size().files == 1
    for writer in (other, journal, open_log(log)):
        assert writer.append(messages(*(f"m{n}" for n in range(8)))) == Ok(Entered(0, 8))
    assert other.append(messages("more")) == Ok(Entered(1, 0))
    assert values(log) == [*(f"value of m{n}".encode() for n in range(8)), b"value of more"]


def test_appending_to_a_log_of_others_goes_on_where_it_ends(log: Path) -> None:
    append(str(log), pa.table({"value": [b"old"]}))
    assert open_log(log).append(messages("a")) == Ok(Entered(1, 0))
    assert values(log) == [b"old", b"value of a"]


ids = st.none() | st.text(max_size=8) | st.binary(max_size=8).map(id_text)
named = st.tuples(st.sampled_from(["delivered.id", "h", ""]), st.none() | st.binary(max_size=4))


@given(st.lists(st.tuples(ids, st.lists(named, max_size=3)), min_size=1, max_size=5))
def test_an_id_is_the_one_that_its_sender_set_whatever_its_headers_say(
    given_: list[tuple[str | None, list[tuple[str, bytes | None]]]],
) -> None:
    batch = replace(messages(*(f"{n}" for n in range(len(given_)))), ids=[i for i, _ in given_])
    rows = produce.build_rows(replace(batch, headers=[h for _, h in given_]))
    assert produce.read_ids(rows.column("headers")) == batch.ids


def test_ids_of_any_bytes_are_recognised_after_a_restart(log: Path) -> None:
    odd = messages(*(id_text(b"\xff" * n + b"a") or "" for n in range(4)))
    assert open_log(log).append(odd) == Ok(Entered(4, 0))
    assert open_log(log).append(odd) == Ok(Entered(0, 4))


@pytest.mark.parametrize("value", [None, b"\xff\xfe", b""])
def test_a_log_with_any_value_in_our_header_can_be_opened(log: Path, value: bytes | None) -> None:
    headers = pa.array(
        [[{"key": "delivered.id", "value": value}, {"key": "delivered.id", "value": b"x"}]], HEADERS.type
    )
    append(str(log), pa.table({"value": pa.array([b"v"]), "headers": headers}))
    assert open_log(log).append(messages("x")) == Ok(Entered(1, 0))
