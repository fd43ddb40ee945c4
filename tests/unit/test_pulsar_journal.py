"""Which records of a journal count: drivers with outdated views, messages sent twice, deleted starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delivered.connectors.pulsar.journal import Chain, Record, Verdict
from delivered.model import work
from delivered.model.errors import Refused

COPY = "copy"
ACTIONS = st.tuples(st.sampled_from(["append", "append", "append", "copy", "again", "read"]), st.integers(0, 2))


class Writer:
    """Reads the log when it is told to; appends after what it has read."""

    def __init__(self) -> None:
        self.chain = Chain(is_copy)
        self.at = 0

    def read(self, log: Sequence[Record]) -> None:
        for record in log[self.at :]:
            self.chain.add(record)
        self.at = len(log)

    def next(self, kind: str) -> Record:
        return Record(self.chain.number + 1, self.chain.id, kind)


def is_copy(record: Record) -> bool:
    return record.kind == COPY


def counted(log: Sequence[Record], starts: Callable[[Record], bool] = is_copy) -> tuple[Chain, list[str]]:
    """Ids of the records that count, from the last start on."""
    chain, ids = Chain(starts), list[str]()
    for record in log:
        verdict = chain.add(record)
        if verdict is Verdict.START:
            ids = []
        if verdict in (Verdict.START, Verdict.NEXT):
            ids.append(record.id)
    return chain, ids


def logs(actions: Sequence[tuple[str, int]]) -> tuple[list[Record], dict[str, int]]:
    """A log, and where it has a record that its writer saw count, by id."""
    log, sent, won = list[Record](), dict[int, Record](), dict[str, int]()
    writers = [Writer() for _ in range(3)]
    for what, who in actions:
        writer = writers[who]
        if what == "read":
            writer.read(log)
        elif what == "again":  # the client sends what was stored already
            if who in sent:
                log.append(sent[who])
        else:
            record = sent[who] = writer.next(COPY if what == "copy" else "record")
            log.append(record)
            writer.read(log)
            if writer.chain.is_counted(record):
                won[record.id] = len(log) - 1
    return log, won


@settings(max_examples=80, deadline=None)
@given(st.lists(ACTIONS, max_size=40))
def test_of_two_records_that_follow_one_the_first_counts_for_everyone(actions: list[tuple[str, int]]) -> None:
    log, won = logs(actions)
    chain, ids = counted(log)
    assert set(ids) == set(won), "writers and readers agree"
    assert chain.number == len(ids)
    assert not chain.unplaced


@settings(max_examples=80, deadline=None)
@given(st.lists(ACTIONS, max_size=40), st.data())
def test_a_reader_that_starts_before_a_counted_copy_finds_the_chain(
    actions: list[tuple[str, int]], data: st.DataObject
) -> None:
    """Pulsar deletes from the start, at a ledger's boundary: any number of records before the copy may be left."""
    log, won = logs(actions)
    _, all_ids = counted(log)
    copies = [at for at, r in enumerate(log) if is_copy(r) and won.get(r.id) == at]
    if not copies:
        return
    copy = data.draw(st.sampled_from(copies))
    chain, ids = counted(log[data.draw(st.integers(0, copy)) :])
    assert ids == all_ids[-len(ids) :]
    assert log[copy].id in ids or chain.number >= log[copy].number
    assert chain.id == all_ids[-1]


@settings(max_examples=80, deadline=None)
@given(st.lists(ACTIONS, max_size=40), st.data())
def test_a_reader_near_the_end_believes_what_two_records_prove(
    actions: list[tuple[str, int]], data: st.DataObject
) -> None:
    log, _ = logs(actions)
    _, all_ids = counted(log)
    chain, ids = counted(log[data.draw(st.integers(0, len(log))) :], lambda _: True)
    if chain.proven:
        assert chain.id == all_ids[-1]
        assert ids == all_ids[-len(ids) :]


def test_one_record_after_the_start_proves_nothing() -> None:
    """The start was sent twice, and an outdated driver followed it."""
    log, _ = logs([("append", 0), ("read", 1), ("read", 2), ("append", 2), ("again", 0), ("append", 1)])
    chain, ids = counted(log[2:], lambda _: True)
    assert ids == [log[0].id, log[3].id], "neither of the newest ones counts"
    assert not chain.proven
    assert counted(log)[1] == [log[0].id, log[1].id]


def test_a_gap_is_an_error() -> None:
    log, _ = logs([("append", 0)] * 4 + [("copy", 0)] + [("append", 0)] * 4)
    with pytest.raises(ValueError, match="record 7 does not follow record 5"):
        counted(log[:5] + log[6:])
    chain, ids = counted(log[1:4])
    assert (chain.number, chain.unplaced, ids) == (0, True, [])


def test_records_come_back_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(3, "b", "claim", {"owner": "ö"})
    assert Record.decode(record.encode()) == record
    bad: list[Any] = [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff",
        b'{"number":"1","after":"","id":"a","kind":"b"}',
        b"[" * 100_000,
    ]
    for data in bad:
        with pytest.raises(ValueError, match="not a record"):
            Record.decode(data)
    monkeypatch.setattr(work, "RECORD_FORMAT", work.RECORD_FORMAT + 1)
    later = record.encode()
    monkeypatch.undo()
    with pytest.raises(Refused, match="FORMAT_NEWER"):
        Record.decode(later)
