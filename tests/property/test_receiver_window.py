"""The receiver's window against a model: exactly the ids of each partition's last offsets and last milliseconds."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from delivered.receiver import Window

IDS = st.one_of(st.none(), st.integers(0, 25).map(str))
PARTITIONS = st.integers(0, 2)


class WindowMachine(RuleBasedStateMachine):
    """A log is a list of ids and times per partition. The window must match the log's tail, however it was filled."""

    @initialize(size=st.integers(1, 8), for_ms=st.integers(0, 9))
    def begin(self, size: int, for_ms: int) -> None:
        self.size, self.for_ms = size, for_ms
        self.now_ms = 0
        self.log: dict[int, list[tuple[str | None, int]]] = {}
        self.retired: dict[int, int] = {}
        self.window = Window(size, for_ms)

    def young(self, partition: int) -> int | None:
        times = [at_ms for _, at_ms in self.log.get(partition, [])]
        return next((n for n, at_ms in enumerate(times) if at_ms >= times[-1] - self.for_ms), None)

    def start(self, partition: int) -> int:
        log = self.log.get(partition, [])
        start = len(log) - self.size
        if self.for_ms and log:
            start = min(start, self.young(partition) or 0)
        return max(self.retired.get(partition, 0), start)

    def known(self) -> set[str]:
        """Known ids by the log alone. The window may lack ids that were never added, but has no others."""
        return {i for partition, log in self.log.items() for i, _ in log[self.start(partition) :] if i is not None}

    def add(self, window: Window, partition: int, first: int) -> None:
        """What is in the log from this offset on, one commit at a time."""
        log = self.log[partition]
        while first < len(log):
            stop = next((n for n in range(first, len(log)) if log[n][1] != log[first][1]), len(log))
            window.add(partition, first, [i for i, _ in log[first:stop]], log[first][1])
            first = stop

    @rule(ms=st.integers(1, 6))
    def wait(self, ms: int) -> None:
        self.now_ms += ms

    @rule(partition=PARTITIONS, arrived=st.lists(IDS, max_size=6))
    def receive(self, partition: int, arrived: list[str | None]) -> None:
        """What a receiver does with a batch."""
        at = self.window.fresh(arrived)
        fresh = [arrived[i] for i in at]
        known, named = self.known(), [i for i in fresh if i is not None]
        assert len(set(named)) == len(named)
        assert known.isdisjoint(named)
        assert {i for i in arrived if i is not None} <= known | set(named)
        assert fresh.count(None) == arrived.count(None)
        log = self.log.setdefault(partition, [])
        self.window.add(partition, len(log), fresh, self.now_ms)
        log += [(i, self.now_ms) for i in fresh]

    @rule(partition=PARTITIONS, theirs=st.lists(IDS, min_size=1, max_size=12), overlap=st.integers(0, 5))
    def others_append(self, partition: int, theirs: list[str | None], overlap: int) -> None:
        """Another process appends; this one reads that, perhaps from further back than needed."""
        log = self.log.setdefault(partition, [])
        log += [(i, self.now_ms) for i in theirs]
        earliest = self.retired.get(partition, 0)
        start = self.window.start(partition, earliest, len(log), self.young(partition))
        self.add(self.window, partition, max(earliest, start - overlap))

    @rule(partition=PARTITIONS)
    def retire(self, partition: int) -> None:
        """Maintenance deletes records before the window, as in the journal."""
        self.retired[partition] = max(self.retired.get(partition, 0), self.window.first(partition))

    @rule()
    def restart(self) -> None:
        before = self.window
        self.window = Window(self.size, self.for_ms)
        for partition, log in self.log.items():
            earliest = self.retired.get(partition, 0)
            self.add(self.window, partition, self.window.start(partition, earliest, len(log), self.young(partition)))
        everything = {str(i) for i in range(26)}
        assert {i for i in everything if i in self.window} == {i for i in everything if i in before}

    @invariant()
    def holds_the_tail(self) -> None:
        known = self.known()
        for name in map(str, range(26)):
            assert (name in self.window) == (name in known), name
        assert len(self.window) == len(known)
        assert self.for_ms or len(known) <= self.size * 3


TestWindow = WindowMachine.TestCase


def test_a_clock_that_goes_back_or_a_compaction_forgets_nothing_early() -> None:
    window = Window(1, for_ms=10)
    window.add(0, 0, ["late"], 100)
    window.add(0, 1, ["behind"], 50)
    window.add(0, 2, ["now"], 105)
    assert [i in window for i in ("late", "behind", "now")] == [True, True, True]
    window.add(0, 3, ["later"], 111)
    assert [i in window for i in ("late", "behind", "now", "later")] == [False, False, True, True]
