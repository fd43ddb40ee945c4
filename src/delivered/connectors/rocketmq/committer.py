"""Commits and aborts the half messages that tasks sent.

EndTransaction is not idempotent: a half message committed twice appears twice. So one process at a time ends half
messages (end_journal.py), and after a crash the topic, where each message names its half message, shows which were
committed.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from delivered.connectors.rocketmq.end_journal import EndJournal, State
from delivered.connectors.rocketmq.half_messages import COMMIT, ROLLBACK, Ending, HalfMessage, HalfMessages, group_of
from delivered.connectors.rocketmq.options import RocketmqSinkOptions
from delivered.connectors.rocketmq.remoting import Cluster, Place
from delivered.connectors.rocketmq.topic import added, open_half_messages
from delivered.contract.sink import Committer
from delivered.model.errors import InvariantBroken, Unreachable
from delivered.model.identity import Scope, Work
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.prepared import Prepared

SETTLE_S = 4.0
"""Then no earlier request can take effect: brokers drop those queued for 3 s (waitTimeMillsInTransactionQueue), and
unsent ones are lost with their connection."""


class RocketmqCommitter(Committer):
    """See `delivered.contract.sink.Committer`."""

    def __init__(self, options: RocketmqSinkOptions, scope: Scope) -> None:
        self._cluster = Cluster(options)
        self._scope = scope
        self._journal = EndJournal(options.ledger, scope)

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        """Commit every half message exactly once."""
        handle = HalfMessages.of(prepared)
        try:
            with self._journal.held():
                return self._apply(work, handle)
        except Unreachable as error:
            self._cluster.close()
            return Unknown(str(error))

    def was_committed(self, work: Work, prepared: Prepared) -> bool:  # noqa: ARG002 - only owners write the journal
        """Whether the journal records that all its messages were confirmed or found in the topic."""
        return self._journal.is_visible(work)

    def abort(self, prepared: Prepared) -> Outcome[None]:
        """Roll back, which ends the broker's transaction checks. Also runs in tasks, without a ledger."""
        if not prepared.handle:
            return Ok(None)
        handle = HalfMessages.of(prepared)
        return self._roll_back(handle.name, handle.by_broker)

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        """Void half messages of this sink that are not in `keep` and that no process began to end."""
        kept = {HalfMessages.of(p).name for p in keep if p.handle}
        try:
            found: dict[str, dict[str, list[HalfMessage]]] = defaultdict(lambda: defaultdict(list))
            tops = self._journal.tops()
            for broker in dict.fromkeys(p.broker for p in self._cluster.places()):
                for message in open_half_messages(self._cluster, broker, tops.get(broker, -1) + 1):
                    name = message.properties.get("PGROUP", "")
                    if name.rpartition(".")[0] == group_of(self._scope) and name not in kept:
                        found[name][broker].append(HalfMessage(message.place, message.offset))
            gone = self._journal.void(found)
            for name, half_messages in found.items():
                self._roll_back(name, half_messages)
        except Unreachable as error:
            self._cluster.close()
            return Unknown(str(error))
        return Ok(gone)

    def close(self) -> None:
        self._cluster.close()

    def _apply(self, work: Work, handle: HalfMessages) -> Outcome[None]:
        left: Mapping[str, Sequence[HalfMessage]] = handle.by_broker
        match self._journal.begin(work, handle.name):
            case State.ENDED:
                return Ok(None)
            case State.VOID:
                return Failed("its half messages were rolled back")
            case State.BEGUN:
                left = self._uncommitted(handle)
            case State.NEW:
                pass
        gone = 0
        for broker, half_messages in left.items():
            ending = Ending(self._cluster, broker, handle.name)
            ending.end(half_messages, COMMIT)
            if ending.refused is not None:
                return Unknown(ending.refused)
            gone += len(ending.gone)
        if gone:
            return self._gone(handle, gone)
        tops = [(broker, half_messages[-1].offset) for broker, half_messages in handle.by_broker.items()]
        self._journal.end(work, handle.name, tops)
        return Ok(None)

    def _uncommitted(self, handle: HalfMessages) -> dict[str, list[HalfMessage]]:
        """Half messages that are not in the topic, after `SETTLE_S`. Raises Unreachable."""
        self._cluster.close()
        time.sleep(SETTLE_S)
        left: dict[str, list[HalfMessage]] = {}
        for broker, half_messages in handle.by_broker.items():
            ours = {h.place for h in half_messages}
            shown: Counter[int] = Counter()
            for queue, since in handle.since[broker].items():
                there = added(self._cluster, Place(broker, int(queue)), since)
                shown.update(m.half for m in there if m.half in ours)
            twice = [place for place, times in shown.items() if times > 1]
            if twice:
                raise InvariantBroken(
                    "COMMITTED_TWICE",
                    f"{len(twice)} messages of {handle.name} are in the topic {self._cluster.topic!r} twice, the first "
                    f"from the half message at {min(twice)} of the log of {broker!r}: another producer committed them "
                    "too.",
                    next_step="stop other RocketMQ producers of that group",
                )
            left[broker] = [h for h in half_messages if h.place not in shown]
        return left

    def _gone(self, handle: HalfMessages, count: int) -> Outcome[None]:
        total = sum(map(len, handle.by_broker.values()))
        if count == total:
            return Failed("the broker no longer has its half messages, and none of them was committed")
        return Unknown(
            f"{count} of {total} half messages are no longer in the broker's log, and the others are committed: "
            "compare the topic with the source manually"
        )

    def _roll_back(self, name: str, half_messages: Mapping[str, Sequence[HalfMessage]]) -> Outcome[None]:
        try:
            for broker, mine in half_messages.items():
                Ending(self._cluster, broker, name).end(mine, ROLLBACK)
        except Unreachable as error:
            self._cluster.close()
            return Unknown(str(error))
        return Ok(None)
