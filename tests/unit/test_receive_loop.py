"""The receiver's loop with a faulty queue or log: every acknowledged message is in the log."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from delivered import receiver as loops
from delivered.connectors.log.produce import build_rows
from delivered.contract.source import Entered, Journal, JournalSize, MessageBatch, Receiver
from delivered.model.errors import BadRecord, DeliveredError, OutcomeUnknown, Unreachable
from delivered.model.work import Failed, Ok, Outcome, Unknown
from delivered.receiver import ReceiveLimits, ReceiveLoop


class Broker:
    """Messages 0..count-1; unacknowledged ones are redelivered when a connection closes."""

    def __init__(self, count: int, without_id: frozenset[int] = frozenset()) -> None:
        self.ready = list(range(count))
        self.without_id = without_id
        self.forgotten: list[int] = []
        self.connections: list[Connection] = []
        self.dies_after: list[int] = []
        self.refuses = 0

    def connect(self) -> Connection:
        if self.refuses:
            self.refuses -= 1
            raise Unreachable("X", "refused")
        self.connections.append(Connection(self, self.dies_after.pop(0) if self.dies_after else 1 << 30))
        return self.connections[-1]


class Connection(Receiver):
    def __init__(self, broker: Broker, dies_after: int) -> None:
        self.broker = broker
        self.held: list[int] = []
        self.left = dies_after
        self.closed = False

    def receive(self, count_max: int, wait_s: float) -> MessageBatch:
        if self.left <= 0:
            self.close()
            raise Unreachable("X", "lost")
        taken = self.broker.ready[: min(count_max, self.left, 10)]
        del self.broker.ready[: len(taken)]
        self.left -= len(taken)
        self.held += taken
        batch = MessageBatch()
        for n in taken:
            batch.ids.append(None if n in self.broker.without_id else f"id{n}")
            batch.keys.append(None)
            batch.values.append(b"%d" % n)
            batch.headers.append([])
            batch.times_us.append(None)
            batch.handles.append((self, n))
        return batch

    def acknowledge(self, handles: Sequence[Any]) -> Outcome[int]:
        if self.closed:
            return Unknown("closed")
        for connection, n in handles:
            assert connection is self, "a handle means something on its own connection alone"
            self.held.remove(n)
            self.broker.forgotten.append(n)
        return Ok(len(handles))

    def give_back(self, handles: Sequence[Any]) -> None:
        for _, n in handles:
            self.held.remove(n)
            self.broker.ready.append(n)

    def close(self) -> None:
        self.closed = True
        self.broker.ready = sorted({*self.broker.ready, *self.held})
        self.held = []


class Memory(Journal):
    """A journal with scripted outcomes that records its content."""

    def __init__(self, *answers: Any) -> None:
        self.ids: list[str | None] = []
        self.rows: list[MessageBatch] = []
        self.answers = list(answers)
        self.bytes = 0
        self.upkeep: Callable[[], None] = lambda: None

    def append(self, batch: MessageBatch) -> Outcome[Entered]:
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Failed):
            return answer
        fresh = [i for i in batch.ids if i not in self.ids]
        self.ids += fresh
        self.rows.append(batch)
        return answer if isinstance(answer, Unknown) else Ok(Entered(len(fresh), len(batch) - len(fresh)))

    def size(self) -> JournalSize:
        return JournalSize(self.bytes, 1)

    def maintain(self, exact: bool = False) -> int:
        del exact
        self.upkeep()
        return 0

    def close(self) -> None:
        pass


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that rejects a batch ends the receiver at once."""
    monkeypatch.setattr(loops, "SOURCE_PATIENCE_S", 0.0)


LIMITS = ReceiveLimits(messages_max=20, bytes_max=1 << 20, linger_s=0.0, message_bytes_max=1 << 10)


def run(
    broker: Broker, journal: Memory, limits: ReceiveLimits = LIMITS, quarantine: Memory | None = None
) -> ReceiveLoop:
    loop = ReceiveLoop(broker.connect, journal, limits, quarantine)
    loop.run(lambda: not broker.ready and not any(c.held for c in broker.connections))
    return loop


def test_all_that_is_forgotten_is_in_the_log() -> None:
    broker, journal = Broker(100), Memory()
    counts = run(broker, journal).counts
    assert sorted(broker.forgotten) == list(range(100))
    assert len(journal.ids) == counts.entered == counts.acknowledged == counts.received == 100
    assert broker.connections[0].closed


def test_a_log_that_is_full_for_a_while_costs_no_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: at each restart messages went back to the queue, which dropped them by its delivery limit."""
    monkeypatch.setattr(loops, "_PAUSE_S", 0.01)
    broker, journal = Broker(50), Memory(None, *[Failed("disk full")] * 30)
    assert run(broker, journal).counts.received == 50
    assert len(broker.connections) == 1
    assert sorted(broker.forgotten) == list(range(50))
    broker, journal = Broker(50), Memory(*[Failed("disk full")] * 10_000)
    with pytest.raises(DeliveredError, match="returned to the queue: disk full"):  # a stop does not wait
        ReceiveLoop(broker.connect, journal, LIMITS).run(lambda: len(journal.answers) < 9_990)
    assert broker.ready == list(range(50))


@pytest.mark.usefixtures("impatient")
def test_what_failed_is_given_back_and_told() -> None:
    broker, journal = Broker(50), Memory(None, Failed("disk full"))
    with pytest.raises(DeliveredError, match="returned to the queue: disk full"):
        run(broker, journal)
    assert {f"id{n}" for n in broker.forgotten} <= set(journal.ids)
    assert sorted([*broker.forgotten, *broker.ready]) == list(range(50))


def test_what_nobody_can_tell_is_not_acknowledged() -> None:
    broker, journal = Broker(50), Memory(None, Unknown("no answer"))
    with pytest.raises(OutcomeUnknown, match="It is unknown whether"):
        run(broker, journal)
    assert sorted([*broker.forgotten, *broker.ready]) == list(range(50))
    counts = run(broker, journal).counts
    assert counts.repeated > 0, "they were in, and came again"
    assert sorted(broker.forgotten) == list(range(50))
    assert len(journal.ids) == 50


def test_a_lost_connection_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "_RECONNECT_S", 0.01)
    broker, journal = Broker(100), Memory()
    broker.dies_after = [15, 30]
    loop = ReceiveLoop(broker.connect, journal, LIMITS)
    loop.run(lambda: len(broker.forgotten) == 100)
    assert loop.counts.reconnected == 2
    assert sorted(journal.ids, key=str) == sorted((f"id{n}" for n in range(100)), key=str)


def test_a_queue_that_stays_away_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "_RECONNECT_S", 0.01)
    monkeypatch.setattr(loops, "SOURCE_PATIENCE_S", 0.05)
    broker = Broker(100)
    broker.dies_after = [15]
    loop = ReceiveLoop(broker.connect, Memory(), LIMITS)
    first = loop._connect()
    loop._connect = lambda: first if not first.closed else broker.connect()  # type: ignore[assignment,return-value]
    broker.refuses = 1_000
    with pytest.raises(Unreachable, match="refused"):
        loop.run(lambda: False)


@pytest.mark.parametrize("reason", ["id", "size"])
def test_bad_messages_stop_it_or_are_quarantined(reason: str) -> None:
    limits = LIMITS
    broker = Broker(30, frozenset({7}) if reason == "id" else frozenset())
    if reason == "size":
        limits = ReceiveLimits(20, 1 << 20, 0.0, message_bytes_max=1)
    with pytest.raises(BadRecord, match="cannot be accepted"):
        run(broker, Memory(), limits)
    bad = {7} if reason == "id" else set(range(10, 30))
    assert bad.isdisjoint(broker.forgotten)
    forgotten = len(broker.forgotten)
    quarantine, journal = Memory(), Memory()
    counts = run(broker, journal, limits, quarantine).counts
    assert (counts.quarantined, counts.entered) == (len(bad), 30 - len(bad) - forgotten)
    assert sorted(broker.forgotten) == list(range(30))
    assert quarantine.rows[0].headers[0][-1][0] == "delivered.reason"


class Picky(Memory):
    """Rejects some messages, by an outcome or by an unexpected exception."""

    def __init__(self, refuses: set[str], raises: bool = False) -> None:
        super().__init__()
        self.refuses = refuses
        self.raises = raises
        self.refused: list[str | None] = []

    def append(self, batch: MessageBatch) -> Outcome[Entered]:
        if bad := [i for i in batch.ids if i in self.refuses]:
            if len(batch) == 1:
                self.refused += bad
            if self.raises:
                raise OverflowError("too large for a time")
            return Failed("too large for a time")
        return super().append(batch)


@pytest.mark.parametrize("raises", [True, False])
def test_what_the_log_refuses_alone_is_quarantined_after_so_many_times(
    monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    monkeypatch.setattr(loops, "_RETRY_S", 0.0)
    broker, journal, quarantine = Broker(100), Picky({"id3", "id4", "id77"}, raises), Memory()
    counts = run(broker, journal, quarantine=quarantine).counts
    assert sorted(broker.forgotten) == list(range(100))
    assert (counts.entered, counts.quarantined, counts.acknowledged) == (97, 3, 100)
    assert quarantine.ids == ["id3", "id4", "id77"]
    assert Counter(journal.refused) == {"id3": 3, "id4": 3, "id77": 3}
    reason = dict(quarantine.rows[0].headers[0])["delivered.reason"] or b""
    assert b"rejected it on its own, 3 times" in reason
    assert b"too large for a time" in reason
    assert [i for i in journal.ids if i] == [f"id{n}" for n in range(100) if n not in (3, 4, 77)], "their order stays"


@pytest.mark.usefixtures("impatient")
def test_a_store_that_refuses_everything_is_broken_and_no_message_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "_RETRY_S", 0.0)
    broker, quarantine = Broker(9), Memory()
    with pytest.raises(DeliveredError, match="returned to the queue: too large for a time"):
        run(broker, Picky({f"id{n}" for n in range(9)}), quarantine=quarantine)
    assert broker.forgotten == []
    assert quarantine.ids == []
    assert sorted(broker.ready) == list(range(9))


@pytest.mark.usefixtures("impatient")
def test_code_that_raises_at_everything_is_broken_after_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any split of the messages into batches."""
    monkeypatch.setattr(loops, "_RETRY_S", 0.0)
    broker, quarantine = Broker(100), Memory()
    with pytest.raises(DeliveredError, match="11 messages in a row"):
        run(broker, Picky({f"id{n}" for n in range(100)}, raises=True), quarantine=quarantine)
    assert len(broker.forgotten) == len(quarantine.ids) <= 10
    assert sorted([*broker.ready, *broker.forgotten]) == list(range(100))


@pytest.mark.usefixtures("impatient")
def test_dead_letters_that_cannot_be_kept_are_not_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "_RETRY_S", 0.0)
    broker = Broker(20)
    with pytest.raises(DeliveredError, match="returned to the queue: disk full"):
        run(broker, Picky({"id3"}), quarantine=Memory(Failed("disk full"), Failed("disk full")))
    assert broker.forgotten == []


@pytest.mark.usefixtures("impatient")
def test_without_a_place_for_them_the_receiver_ends_and_says_so() -> None:
    broker = Broker(20)
    with pytest.raises(DeliveredError, match="OverflowError: too large for a time") as caught:
        run(broker, Picky({"id3"}, raises=True))
    assert "badMessages=quarantine" in str(caught.value)
    assert broker.forgotten == []


def test_dead_letters_are_written_readable_when_they_are_refused_as_they_are() -> None:
    bad = MessageBatch(["a\ud800", None], [b"k", None], [b"v", b""], [[("h", b"x")], []], [1 << 80, None], [1, 2])
    copy = loops.as_readable(bad)
    assert copy.ids == ["'a\\ud800'", None]
    assert copy.values == [b"v", b""]
    assert dict(copy.headers[0])["delivered.time_us"] == str(1 << 80).encode()
    assert dict(copy.headers[0])["delivered.headers"] == b"[('h', b'x')]"
    assert len(build_rows(copy)) == 2


def test_while_the_log_is_full_no_message_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "_PAUSE_S", 0.01)
    broker, journal = Broker(200), Memory()
    journal.bytes = 100
    seen: list[int] = []

    def upkeep() -> None:
        seen.append(sum(len(c.held) for c in broker.connections if not c.closed))
        if len(seen) > 5:
            journal.bytes = 0

    journal.upkeep = upkeep
    limits = ReceiveLimits(20, 1 << 20, 0.0, 1 << 10, log_bytes_max=50, maintain_s=0.005)
    loop = ReceiveLoop(broker.connect, journal, limits)
    loop.run(lambda: len(broker.forgotten) == 200)
    assert loop.counts.paused == 1
    assert seen[1:6] == [0] * 5
    assert sorted(broker.forgotten) == list(range(200))
    assert len(broker.connections) == 2


def test_a_stop_persists_what_was_taken() -> None:
    broker, journal = Broker(15), Memory()
    stop = threading.Event()
    limits = ReceiveLimits(1_000, 1 << 20, 3600.0, 1 << 10)
    loop = ReceiveLoop(broker.connect, journal, limits)
    threading.Timer(0.3, stop.set).start()
    loop.run(stop.is_set)
    assert len(journal.ids) == loop.counts.acknowledged == 15
