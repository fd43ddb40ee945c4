"""Batches of one partition against a broker that loses requests and responses: each is stored once, in order."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from delivered.clients.kafka.record_batch import SEQUENCES
from delivered.clients.kafka.sender import UNANSWERED_MAX, Batch, PartitionQueue, Verdict, verdict_of


class ScriptedBroker:
    """What a partition's leader knows of one producer: its next sequence, and the last five batches; after it was
    killed, the last one."""

    def __init__(self, next_sequence: int) -> None:
        self.next = next_sequence
        self.kept: deque[tuple[int, int]] = deque(maxlen=5)
        self.stored: list[bytes] = []

    def restart(self) -> None:
        self.kept = deque(list(self.kept)[-1:], maxlen=5)

    def append(self, batch: Batch) -> int:
        if (batch.sequence, batch.records) in self.kept:
            return 0
        if batch.sequence != self.next:
            return 45
        self.next = (batch.sequence + batch.records) % SEQUENCES
        self.kept.append((batch.sequence, batch.records))
        self.stored.append(bytes(batch.data))
        return 0


FATES = st.sampled_from(["stored", "stored", "lost", "answer lost", "killed", 6, 7, 19, 20])


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    fates=st.lists(FATES, max_size=80),
    start=st.sampled_from([0, SEQUENCES - 20]),
)
def test_every_batch_is_stored_once_and_in_order(sizes: list[int], fates: list[str | int], start: int) -> None:
    queue, broker, script = PartitionQueue("t", 0, sequenced=True), ScriptedBroker(start), iter(fates)
    queue.next = start
    names = [b"%d" % i for i in range(len(sizes))]
    for name, size in zip(names, sizes, strict=True):
        queue.add(Batch(name, size, 0, 1e9, queue.next))
    flying: deque[Batch] = deque()
    now, calls = 0.0, 0
    while len(queue):
        now, calls = now + 1, calls + 1
        assert calls < 5_000
        while queue.due(now) is not None:
            flying.append(queue.take())
            assert queue.unanswered <= UNANSWERED_MAX
        batch = flying.popleft()
        fate = next(script, "stored")
        code = broker.append(batch) if fate in ("stored", "answer lost", "killed", 7, 20) else 13
        if fate == "killed":
            broker.restart()
        if fate in ("answer lost", "lost", "killed"):
            queue.put_back(batch, now)
            continue
        _, verdict = verdict_of(code if fate == "stored" or code == 45 else int(fate))
        if verdict is Verdict.STORED:
            queue.drop(batch)
        elif verdict is Verdict.GAP:
            if queue.is_first(batch):
                assert batch.again and bytes(batch.data) in broker.stored, "a gap, and preceding batches are stored"
                queue.drop(batch)
            else:
                queue.put_back(batch, now, pause=False)
        else:
            queue.put_back(batch, now)
    assert broker.stored == names


def test_a_batch_that_is_too_large_is_replaced_in_its_place() -> None:
    queue = PartitionQueue("t", 0, sequenced=True)
    for name in (b"a", b"b"):
        queue.add(Batch(name, 10, 0, 1e9, queue.next))
    first, second = queue.take(), queue.take()
    queue.replace(first, [Batch(b"a1", 5, 0, 1e9, 0), Batch(b"a2", 5, 0, 1e9, 5)])
    assert queue.due(0) is None  # until the second has its response
    assert not queue.is_first(second)
    queue.put_back(second, 0, pause=False)
    assert [bytes(queue.take().data) for _ in range(3)] == [b"a1", b"a2", b"b"]
