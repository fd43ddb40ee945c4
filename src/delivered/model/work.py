"""What travels between driver and tasks: the checkpoint's view, a batch's plan, a shard's message, a decision."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope


@dataclass(frozen=True)
class CheckpointView:
    """What Spark's checkpoint says when a batch is about to run.

    Attributes:
        incarnation: the query's id, from the file `metadata`.
        batch: the batch about to run: the newest file of `offsets/`.
        offsets: what the sources' offsets of that batch are, one line per source, without Spark's own first lines.
        logged: the newest batch of `commits/`, or None if no batch was ever logged.
    """

    incarnation: str
    batch: int
    offsets: str
    logged: int | None


class Action(StrEnum):
    """What a task does with its shard."""

    WRITE = "write"
    SKIP = "skip"
    """The shard is in; reading it again would be waste."""
    GIVE_UP = "give_up"
    """at_most_once: an earlier attempt may have sent records; count them and send none."""


@dataclass(frozen=True)
class BatchPlan:
    """What recovery found, for the tasks of one batch. Pickled into every task.

    Attributes:
        action: for every shard that `rewrite` does not name.
        rewrite: shard -> fingerprint that was decided for it; these shards alone are written again.
        guarantee: of the decision, where the batch was decided already: it is finished as it was begun.
        epoch: the claim that this plan rests on; a later claim voids it.
    """

    scope: Scope
    owner: str
    guarantee: Guarantee
    batch: int
    offsets: str
    action: Action
    rewrite: Mapping[int, Fingerprint] = field(default_factory=dict)
    epoch: int = 0

    def action_for(self, shard: int) -> Action:
        return Action.WRITE if shard in self.rewrite else self.action


@dataclass(frozen=True)
class Prepared:
    """A shard's promise to commit, or the account of what it sent.

    Attributes:
        fingerprint: of the rows as they were handed to the sink.
        handle: all that a process which never saw the writer needs to apply or abort it. JSON values only. Names
            the rows of this one writer: Spark counts attempts from 0 again when a batch or a stage runs again, so
            two writers may share one `Work`. Empty when there is nothing to apply.
    """

    shard: int
    attempt: int
    fingerprint: Fingerprint
    handle: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "shard": self.shard,
            "attempt": self.attempt,
            "fingerprint": str(self.fingerprint),
            "handle": dict(self.handle),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Prepared:
        return cls(
            int(data["shard"]), int(data["attempt"]), Fingerprint.parse(data["fingerprint"]), dict(data["handle"])
        )


@dataclass(frozen=True)
class ShardMessage:
    """What a task tells the driver.

    Attributes:
        plan: the plan that the task worked by.
        did: what it did. WRITE carries `prepared`; GIVE_UP carries the fingerprint of what was not sent.
    """

    plan: BatchPlan
    shard: int
    attempt: int
    did: Action
    prepared: Prepared | None = None
    given_up: Fingerprint = Fingerprint()


@dataclass(frozen=True)
class Decision:
    """The durable record from which on a batch counts.

    Attributes:
        offsets: the sources' offsets of the batch; a replay must show the same.
        participants: every shard that was written, in the order of shards.
        total: running fingerprint of all decided batches of this incarnation, this one included.
        given_up: running fingerprint of what at_most_once gave up (an upper bound of what it lost).
        revision: 0, and one more each time a shard of a decided batch had to be written again.
    """

    scope: Scope
    owner: str
    guarantee: Guarantee
    batch: int
    offsets: str
    participants: tuple[Prepared, ...]
    total: Fingerprint
    given_up: Fingerprint
    decided_at_ms: int
    revision: int = 0

    @property
    def fingerprint(self) -> Fingerprint:
        """Of this batch alone."""
        return sum((p.fingerprint for p in self.participants), Fingerprint())

    def to_json(self) -> str:
        return json.dumps(
            {
                "pipeline": self.scope.pipeline,
                "sink": self.scope.sink,
                "incarnation": self.scope.incarnation,
                "owner": self.owner,
                "guarantee": self.guarantee.value,
                "batch": self.batch,
                "offsets": self.offsets,
                "participants": [p.to_json() for p in self.participants],
                "total": str(self.total),
                "given_up": str(self.given_up),
                "decided_at_ms": self.decided_at_ms,
                "revision": self.revision,
            },
            separators=(",", ":"),
            sort_keys=True,  # one text for one decision, whatever keeps it
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Decision:
        data = json.loads(text)
        return cls(
            scope=Scope(data["pipeline"], data["sink"], data["incarnation"]),
            owner=data["owner"],
            guarantee=Guarantee(data["guarantee"]),
            batch=data["batch"],
            offsets=data["offsets"],
            participants=tuple(Prepared.from_json(p) for p in data["participants"]),
            total=Fingerprint.parse(data["total"]),
            given_up=Fingerprint.parse(data["given_up"]),
            decided_at_ms=data["decided_at_ms"],
            revision=data["revision"],
        )


@dataclass(frozen=True)
class Begun:
    """This batch may have sent records that no transaction holds back.

    Kept for every batch under at_most_once; under at_least_once for the first batch of an incarnation alone, so that
    a later change to a stricter guarantee knows of it.
    """

    batch: int
    offsets: str


@dataclass(frozen=True)
class Owner:
    """The one driver that may decide.

    Attributes:
        id: of the driver's session; new for each Spark session that registers the formats.
        host, process, started_ms: where it runs, so that a person or `doctor` can tell whether it lives.
        superseded: ids of earlier owners, newest first; none of them may claim again.
    """

    id: str
    host: str = ""
    process: int = 0
    started_ms: int = 0
    superseded: tuple[str, ...] = ()


@dataclass(frozen=True)
class LedgerState:
    """What a ledger holds for one scope.

    Attributes:
        last: newest decision of this incarnation.
        begun: newest begun batch of this incarnation (at_most_once only).
        earlier: newest decisions of other incarnations of the same pipeline and sink, newest incarnation first.
        earlier_begun: newest begun batches of other incarnations that decided nothing, by incarnation: their records
            may have left.
        epoch: grows with every claim. It tells apart two claims of one owner: a query stopped and started again in
            one session. 0 where a ledger does not count.
    """

    owner: Owner | None = None
    last: Decision | None = None
    begun: Begun | None = None
    earlier: tuple[Decision, ...] = ()
    earlier_begun: tuple[tuple[str, Begun], ...] = ()
    epoch: int = 0


@dataclass(frozen=True)
class Tolerance:
    """What the user explicitly takes on.

    Attributes:
        new_checkpoint: a new checkpoint may start over although an earlier one of this pipeline wrote to the sink.
        missing_ledger: a checkpoint with batches may meet a ledger that lacks some or all of them.
        repeated_batch: exactly_once may begin with a batch that at_least_once may have sent in part before.
    """

    new_checkpoint: bool = False
    missing_ledger: bool = False
    repeated_batch: bool = False
