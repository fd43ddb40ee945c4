"""Waiting for an unreachable server: warnings, timeouts, and what is never retried."""

from __future__ import annotations

import logging
import time

import pytest

from delivered.model import patience
from delivered.model.errors import Unreachable
from delivered.model.patience import (
    Outages,
    Stall,
    asking_once,
    left_s,
    patience_s,
    patiently,
    unanswered,
    wait_out,
    within,
)


class Away(Exception):
    pass


def _is_away(error: BaseException) -> bool:
    return isinstance(error, Away)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "TELL_AFTER_S", 0.05)
    monkeypatch.setattr(patience, "_LOOK_S", 0.01)
    monkeypatch.setattr(patience, "_STALL_S", 0.01)
    monkeypatch.setattr(patience, "_silences", {})
    monkeypatch.setattr(patience, "_watcher", None)


def told(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    deadline = time.monotonic() + 120
    while text not in caplog.text:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def test_an_outage_is_waited_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    def ask() -> int:
        if "x does not answer, retrying (" not in caplog.text:
            raise Away
        return 7

    assert wait_out("x", ask, _is_away) == 7
    assert "x answers again, after " in caplog.text
    assert {r.levelno for r in caplog.records if r.name == "delivered.outage"} == {logging.WARNING}


def test_one_call_that_hangs_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    """A paused server accepts the request, but does not answer."""
    with unanswered("y"):
        assert told(caplog, "y does not answer")
    assert "y answers again" in caplog.text


def test_what_is_answered_is_not_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "TELL_AFTER_S", 60.0)  # a loaded machine may stop for a moment
    for _ in range(20):
        assert wait_out("z", lambda: 1, _is_away) == 1
    with pytest.raises(ValueError, match="an answer"):
        wait_out("z", lambda: int("an answer"), _is_away)
    assert not caplog.records


def test_one_request_of_those_asked_once_is_short() -> None:
    assert left_s(10) == 10
    with asking_once(3):
        assert left_s(10) == 3
        with asking_once():
            assert (left_s(10), left_s(2)) == (3, 2)
        with within(1):
            assert left_s(10) <= 1


def test_patience_ends_with_the_last_error_and_with_the_wait_around_it() -> None:
    def ask() -> None:
        raise Away("gone")

    for patient_s, outer_s in ((0.05, 60.0), (60.0, 0.05)):
        with within(outer_s), pytest.raises(Away, match="gone"):
            wait_out("a", ask, _is_away, patient_s)


def test_a_stall_is_told_when_nothing_moves(caplog: pytest.LogCaptureFixture) -> None:
    with Stall("b") as stall:
        for left in range(50, 0, -1):
            stall.look(left)
        assert not caplog.records
        deadline = time.monotonic() + 120
        while "b does not answer" not in caplog.text:
            stall.look(1)
            assert time.monotonic() < deadline
        stall.look(0)
        assert "b answers again" in caplog.text


def test_only_what_answered_before_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_in_query", False)
    assert patience_s(answered=False) < 15 < patience_s(answered=True)
    patience.in_query()
    assert patience_s(answered=False) == patience_s(answered=True)


def test_an_answer_of_another_kind_does_not_end_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    """Of two brokers one is frozen: what the other answers says nothing of it."""
    with unanswered("c", kind="write"):
        assert told(caplog, "c does not answer")
        with unanswered("c", kind="read"):
            pass
        assert "c answers again" not in caplog.text
    assert "c answers again" in caplog.text
    caplog.clear()
    with pytest.raises(Away), unanswered("d", _is_away, "write"):
        assert told(caplog, "d does not answer")
        raise Away
    with unanswered("d", kind="read"):
        pass
    assert "d answers again" not in caplog.text, "the write was given up, and is not answered yet"
    with unanswered("d", kind="write"):
        pass
    assert "d answers again" in caplog.text


def test_outages_of_several_processes_are_one() -> None:
    outages = Outages()
    away, again = "Kafka at a:1 does not answer, retrying ({} s)", "Kafka at a:1 answers again, after {} s"
    assert outages.is_new(1, away.format(3))
    assert not any(outages.is_new(process, away.format(s)) for process in (1, 2, 3) for s in (3, 8, 13))
    assert outages.is_new(2, "Kafka at b:1 does not answer, retrying (3 s)"), "another server"
    assert not outages.is_new(2, again.format(14)), "1 and 3 still wait"
    assert not outages.is_new(3, again.format(14))
    assert outages.is_new(1, again.format(15))
    assert not outages.is_new(4, again.format(15)), "it is known"
    assert outages.is_new(1, away.format(4)), "a new outage"
    assert outages.is_new(1, "another warning") and outages.is_new(1, "another warning")


def test_a_process_that_was_killed_does_not_keep_an_outage_open(monkeypatch: pytest.MonkeyPatch) -> None:
    outages, away = Outages(), "x does not answer, retrying (3 s)"
    now = time.monotonic()
    assert outages.is_new(1, away) and not outages.is_new(2, away)
    again = "x answers again, after 9 s"
    assert not outages.is_new(2, again) and outages.ended() == []
    monkeypatch.setattr(patience.time, "monotonic", lambda: now + 3 * patience.TELL_EVERY_S)
    assert outages.ended() == [again] and outages.ended() == []
    assert outages.is_new(2, away), "a new outage"
    monkeypatch.setattr(patience.time, "monotonic", lambda: now + 3 * patience.TELL_EVERY_S + patience.SHOW_EVERY_S)
    assert outages.is_new(2, away), "once a minute"


def test_a_slow_start_is_no_outage(caplog: pytest.LogCaptureFixture) -> None:
    """A plan may take seconds of a busy machine: no server is away."""

    def slow() -> int:
        with unanswered("other"):
            assert told(caplog, "other does not answer")
        return 1

    assert patiently("a server of orders", slow) == 1
    assert "a server of orders" not in caplog.text
    tries = iter([Unreachable("KAFKA_UNREACHABLE.CONNECT", "No broker answered."), None])

    def away_once(_: object) -> Unreachable | None:
        return next(tries)

    def ask() -> int:
        return 2

    assert patiently("a server of orders", ask, away=away_once) == 2
    assert "No broker answered; waiting up to" in caplog.text
