"""The receiver's window against a model: exactly the ids of the last offsets of each partition."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from delivered.source.window import Window

IDS = st.one_of(st.none(), st.integers(0, 25).map(str))
PARTITIONS = st.integers(0, 2)


class WindowMachine(RuleBasedStateMachine):
    """A log is a list of ids per partition. The window must match the log's tail, however it was filled."""

    @initialize(size=st.integers(1, 8))
    def begin(self, size: int) -> None:
        self.size = size
        self.log: dict[int, list[str | None]] = {}
        self.retired: dict[int, int] = {}
        self.window = Window(size)

    def known(self) -> set[str]:
        """Known ids by the log alone. The window may lack ids that were never added, but has no others."""
        tails = (
            ids[max(self.retired.get(partition, 0), len(ids) - self.size) :] for partition, ids in self.log.items()
        )
        return {i for tail in tails for i in tail if i is not None}

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
        ids = self.log.setdefault(partition, [])
        self.window.add(partition, len(ids), fresh)
        ids += fresh

    @rule(partition=PARTITIONS, theirs=st.lists(IDS, min_size=1, max_size=12), overlap=st.integers(0, 5))
    def others_append(self, partition: int, theirs: list[str | None], overlap: int) -> None:
        """Another process appends; this one reads that, perhaps from further back than needed."""
        ids = self.log.setdefault(partition, [])
        ids += theirs
        start = self.window.start(partition, self.retired.get(partition, 0), len(ids))
        told = max(self.retired.get(partition, 0), start - overlap)
        self.window.add(partition, told, ids[told:])

    @rule(partition=PARTITIONS)
    def retire(self, partition: int) -> None:
        """Maintenance deletes records before the window, as in the journal."""
        self.retired[partition] = max(self.retired.get(partition, 0), len(self.log.get(partition, [])) - self.size)

    @rule()
    def restart(self) -> None:
        before = self.window
        self.window = Window(self.size)
        for partition, ids in self.log.items():
            start = self.window.start(partition, self.retired.get(partition, 0), len(ids))
            self.window.add(partition, start, ids[start:])
        everything = {str(i) for i in range(26)}
        assert {i for i in everything if i in self.window} == {i for i in everything if i in before}

    @invariant()
    def holds_the_tail(self) -> None:
        known = self.known()
        for name in map(str, range(26)):
            assert (name in self.window) == (name in known), name
        assert len(self.window) == len(known) <= self.size * 3


TestWindow = WindowMachine.TestCase
