"""Who may write to the ledger's topic makes no shard look visible or missing, against a real broker (decision 113)."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.broker.sink_help import Forger, Rig, prepared

from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.transactions import initialise
from delivered.connectors.kafka.committer import marker_key, marker_partition, marker_value
from delivered.model.errors import OutcomeUnknown, PromiseBroken
from delivered.model.fingerprint import Fingerprint
from delivered.model.work import Failed, Ok


@pytest.fixture
def rig(kafka: Any) -> Rig:
    return Rig(kafka, kafka.topic(2))


def forge(rig: Rig, forger: Forger, shard: int, *values: bytes | None) -> None:
    forger.write(marker_partition(rig.scope), *((marker_key(rig.scope, shard), value) for value in values))


@pytest.mark.parametrize("transactional", [False, True], ids=["plainly", "in a transaction"])
def test_an_expired_shard_with_a_forged_marker_is_written_again(rig: Rig, transactional: bool) -> None:
    """Were the marker believed, its rows would be missing for ever."""
    context = rig.context()
    messages = rig.write(rig.plan(context, 0))
    expired = prepared(messages[1])
    assert context.committers.abort(expired) == Ok(None)  # as the broker does on a time-out
    forge(rig, Forger(rig, transactional), 1, marker_value(rig.work(0, 1), expired.fingerprint))
    with pytest.raises(PromiseBroken, match="PROMISE_EXPIRED"):
        rig.commit(context, 0, messages)
    again = rig.context()
    plan = rig.plan(again, 0)
    assert set(plan.rewrite) == {1}
    rig.commit(again, 0, rig.write(plan))
    assert rig.visible() == rig.expected([0])


def test_what_others_write_under_a_markers_key_does_not_hide_it(rig: Rig) -> None:
    """Nor does it stop the one who looks: bytes, a tombstone, a marker of another batch or of a later release."""
    context = rig.context()
    message = rig.write(rig.plan(context, 0), [0])[0]
    kept = prepared(message)
    forger = Forger(rig, True)
    later = marker_value(rig.work(7), Fingerprint(1, 2, 3))
    values = (b"\xff", b"[" * 100_000, None, later, later.replace(b'"format":2', b'"format":99'))
    forge(rig, forger, 0, *values)
    assert context.committers.commit(rig.work(0), kept) == Ok(None)
    forge(rig, forger, 0, *values)
    assert context.committers.was_committed(rig.work(0), kept)
    forger.hold(marker_partition(rig.scope), (marker_key(rig.scope, 0), later))
    assert rig.committer().was_committed(rig.work(0), kept), "behind a transaction that another application leaves open"
    assert rig.committer().visible_shards(0) == [0]


def test_a_marker_that_may_have_been_overwritten_is_unknown(rig: Rig) -> None:
    """Compaction keeps the newest record of a key. Whether the coordinator has forgotten the end, its epochs show."""
    context = rig.context()
    message = rig.write(rig.plan(context, 0), [0])[0]
    lost = prepared(message)
    wire = Wire(rig.sink.options.resolved())
    for _ in range(2):  # it ends the transaction first, then it is used again
        taken = initialise(wire, lost.handle["transactional_id"], 60_000, time.monotonic() + 30)
        assert isinstance(taken, Ok)
    wire.close()
    committer = context.committers
    assert isinstance(committer.commit(rig.work(0), lost), Failed)
    assert not committer.was_committed(rig.work(0), lost)
    forge(rig, Forger(rig, True), 0, None)
    with pytest.raises(OutcomeUnknown, match=r"MARKER_OVERWRITTEN.*offset \d+"):
        committer.was_committed(rig.work(0), lost)
