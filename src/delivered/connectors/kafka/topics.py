"""The pipeline's internal topic: layout, creation, keys of the ledger's records; transactional ids."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from delivered.clients.kafka import protocol
from delivered.clients.kafka.errors import NoAnswer, only
from delivered.clients.kafka.protocol import Wire, name_of
from delivered.clients.kafka.transactions import OPEN_STATES, OpenTransaction, Transaction, describe, initialise, listed
from delivered.connectors.kafka.options import LEDGER_TOPICS, SinkOptions
from delivered.model.errors import Refused, Unreachable
from delivered.model.identity import Scope, Work
from delivered.model.limits import CLAIMS_APART, OUTAGE_PATIENCE_S, REQUEST_TIMEOUT_S, TRANSACTION_SLOTS
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.work import Owner

# The pipeline's internal topic: layout and creation.

STATE_PARTITION = 0
"""Owners, newest decisions and begun batches: small, read at every start."""
HISTORY_PARTITION = 1
"""Decisions kept for the audit."""
MARKERS_FROM = 2
MARKER_PARTITIONS = 6
"""Shared by a pipeline's sinks; several, so that an open transaction of one sink rarely hides another's markers."""
PARTITIONS = MARKERS_FROM + MARKER_PARTITIONS

_CONFIG = {
    "cleanup.policy": "compact",
    # A read costs what compaction has not removed yet: one or two segments per partition.
    "segment.bytes": str(1 << 20),
    "segment.ms": "600000",
    "min.cleanable.dirty.ratio": "0.1",
    "max.compaction.lag.ms": "600000",
    "delete.retention.ms": "600000",
    "max.message.bytes": str(2 << 20),
    "unclean.leader.election.enable": "false",
}
_MIN_ISR = "min.insync.replicas"
COPIES = 3
"""Replicas of the internal topic, where the sink's topics give no measure. Two of so many must be in sync."""
_DEFAULT_COPIES = -1
"""The broker's default."""


def ledger_topic(scope: Scope, named: str | None) -> str:
    """Name of the pipeline's internal topic."""
    return named or f"{LEDGER_TOPICS}{scope.pipeline}"


def ensure_topic(wire: Wire, topic: str, options: SinkOptions) -> None:
    """Create the topic if it does not exist, and wait until its partitions have leaders.

    Unless its replication factor is an option, it gets that of the sink's topic; a sink of several topics, 3.

    Raises:
        Refused: no permission, or the name is not allowed. Unreachable: no answer.
    """
    wire.forget()  # it may have been deleted since this process last saw it
    deadline = time.monotonic() + OUTAGE_PATIENCE_S
    if not _ready(wire, topic):
        _create(wire, topic, options)
    while not _ready(wire, topic):
        if time.monotonic() > deadline:
            raise Unreachable(
                "LEDGER_UNAVAILABLE",
                f"The ledger's topic {topic!r} has no leader for some partition after {OUTAGE_PATIENCE_S:.0f} s.",
                next_step="check the brokers",
            )
        time.sleep(0.02)


def _ready(wire: Wire, topic: str) -> bool:
    try:
        for partition in range(PARTITIONS):
            wire.leader(topic, partition)
    except NoAnswer:
        return False
    return True


def _create(wire: Wire, topic: str, options: SinkOptions) -> None:
    from kafka.protocol.admin.topics import CreateTopicsRequest

    Topic = CreateTopicsRequest.CreatableTopic  # noqa: N806
    Config = Topic.CreatableTopicConfig  # noqa: N806

    def ask() -> Any:
        copies = options.ledger_replication or copies_wanted(wire, options.topic)
        settings = _CONFIG | ({_MIN_ISR: "2"} if copies >= COPIES else {})
        request = CreateTopicsRequest(
            topics=[
                Topic(
                    name=topic,
                    num_partitions=PARTITIONS,
                    replication_factor=copies,
                    assignments=[],
                    configs=[Config(name=k, value=v) for k, v in settings.items()],
                )
            ],
            timeout_ms=int(REQUEST_TIMEOUT_S * 1000),
            validate_only=False,
            max_version=5,
        )
        found = only(wire.ask(request).topics, "topics")
        if found.error_code == protocol.INVALID_REPLICATION_FACTOR and options.ledger_replication is None:
            raise NoAnswer(f"fewer than {copies} brokers are up now")
        return found

    try:
        found = wire.patiently(ask)  # idempotent
    except NoAnswer as error:
        raise Unreachable(
            "LEDGER_UNAVAILABLE",
            f"The ledger's topic {topic!r} could not be created: {error}.",
            next_step="create the topic, or grant the user Create on it, then start again",
        ) from None
    if found.error_code in (protocol.NONE, protocol.TOPIC_ALREADY_EXISTS):
        return
    raise Refused(
        "LEDGER_TOPIC",
        f"The ledger's topic {topic!r} could not be created: {name_of(found.error_code)} {found.error_message or ''}.",
        next_step=f"create it with cleanup.policy=compact and {PARTITIONS} partitions; or set ledgerTopic to another",
    )


def copies_wanted(wire: Wire, beside: str | None) -> int:
    """Replication factor for the ledger of a sink that writes to this topic; None: to several."""
    if beside is not None:
        found: Any = wire.patiently(lambda: wire.topic(beside))
        if copies := min((len(p.replica_nodes) for p in found.partitions), default=0):
            return copies
    return COPIES if len(wire.nodes()) >= COPIES else _DEFAULT_COPIES


def topic_id(wire: Wire, topic: str) -> str | None:
    """A topic's id; None: the topic does not exist, or the brokers are too old for topic ids.

    Raises:
        NoAnswer: still no answer after 120 s.
    """

    def ask() -> Any:
        found = wire.topic(topic)
        if found.error_code not in (protocol.NONE, protocol.LEADER_NOT_AVAILABLE, protocol.UNKNOWN_TOPIC_OR_PARTITION):
            raise NoAnswer(f"topic {topic!r}: {name_of(found.error_code)}")
        return found

    found = wire.patiently(ask)
    if found.error_code == protocol.UNKNOWN_TOPIC_OR_PARTITION:
        return None
    known: Any = found.topic_id
    return str(known) if known is not None and known.int else None


# Transactional ids, and which transactions of a cluster are a sink's.
#
# A transactional id is `delivered.<pipeline>.<sink>.<check>.<shard>.<slot>`. Names may contain dots, so the check, a
# hash of pipeline and sink, distinguishes pairs that join to the same name.
#
# Initialising an id fences its previous holder. So slots alternate
#
# - between batches: a batch does not wait until the previous one's transaction has ended at the brokers;
# - between attempts of a task: overlapping attempts never share an id;
# - between claims of the ledger: tasks of a driver that was superseded fence none of its successor.

_PARALLEL_MAX = 8


def id_prefix(scope: Scope) -> str:
    """Prefix of this sink's transactional ids in this pipeline, of all incarnations, and of no other ids."""
    check = hashlib.blake2b(f"{scope.pipeline}\0{scope.sink}".encode(), digest_size=4).hexdigest()
    return f"{scope.prefix}{check}."


def slot_of(batch: int, attempt: int, claim: int = 0) -> int:
    """Which of a shard's ids an attempt uses. Without a claim, those of release 0.1."""
    per_batch = TRANSACTION_SLOTS // 2
    turn = 0 if claim == 0 else 1 + (claim - 1) % CLAIMS_APART
    return turn * TRANSACTION_SLOTS + (batch % 2) * per_batch + attempt % per_batch


def transactional_id(work: Work) -> str:
    return f"{id_prefix(work.scope)}{work.shard}.{slot_of(work.batch, work.attempt, work.claim)}"


def is_ours(scope: Scope, candidate: str) -> bool:
    """Whether a transactional id belongs to a shard of this sink in this pipeline."""
    prefix = id_prefix(scope)
    return candidate.startswith(prefix) and re.fullmatch(r"\d+\.\d{1,2}", candidate[len(prefix) :]) is not None


def open_transactions(wire: Wire, scope: Scope) -> list[OpenTransaction]:
    """This sink's unfinished transactions in this pipeline, oldest first. Raises NoAnswer."""
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    found = [describe(wire, name) for name in listed(wire, partial(is_ours, scope), OPEN_STATES, deadline)]
    return sorted((t for t in found if t is not None and t.state in OPEN_STATES), key=lambda t: t.started_ms)


def abort_orphans(
    wire: Wire, scope: Scope, keep: Iterable[Transaction], timeout_ms: int, wait_s: float
) -> Outcome[int]:
    """Fence every id of this sink whose open or future transaction is not in `keep`.

    Fences instead of just aborting, so that a paused task cannot continue writing.

    Returns:
        Number of aborted transactions.
    """
    deadline = time.monotonic() + wait_s
    kept = {h.transactional_id: h for h in keep}

    def one(item: tuple[str, str]) -> Outcome[int]:
        name, state = item
        if name in kept:
            try:
                now = describe(wire, name)
            except NoAnswer as error:
                return Unknown(str(error))
            if now is not None and now.participant == kept[name]:
                return Ok(0)
        match initialise(wire, name, timeout_ms, deadline):
            case Ok():
                # PrepareCommit is already decided: just wait for it to complete.
                return Ok(1 if state in ("Ongoing", "PrepareAbort", "PrepareEpochFence") else 0)
            case Failed(reason) | Unknown(reason):
                return Unknown(reason)

    try:
        found = listed(wire, partial(is_ours, scope), (*OPEN_STATES, "Empty"), deadline)
    except NoAnswer as error:
        return Unknown(str(error))
    if not found:
        return Ok(0)
    total = 0
    with ThreadPoolExecutor(min(_PARALLEL_MAX, len(found))) as pool:
        for outcome in pool.map(one, sorted(found.items())):
            if not isinstance(outcome, Ok):
                return outcome
            total += outcome.value
    return Ok(total)


# Keys of a ledger's records in its topic.
#
#     partition 0   ["owner", pipeline, sink]                  the ledger's owner
#                   ["last", pipeline, sink, incarnation]      its newest decision
#                   ["begun", pipeline, sink, incarnation]     its newest begun batch (at_most_once)
#                   ["archive", pipeline, sink, n]             summaries of old incarnations: 25 bytes each
#     partition 1   ["kept", pipeline, sink, incarnation, n]   decisions for the audit, n = batch % 1000
#     partition 2.. ["marker", pipeline, sink, shard]          written by tasks: see markers.py
#
# Keys of an earlier release (format 1) lack the pipeline; several pipelines that share a topic may have written to
# them. They stay where they are, are read, and are never written again:
#
# - A decision counts for the pipeline that it names. An owner, a begun batch and an archive name none, and count for
#   every pipeline of that sink: at worst, a start is refused that need not be.
# - A claim replaces the old owner by one that such a release refuses (`FORMAT_NEWER`): it would not see the new keys.

_PARTS = {"owner": 3, "last": 4, "begun": 4, "archive": 4, "kept": 5}


@dataclass(frozen=True)
class Key:
    """
    Attributes:
        kind: "owner", ...; of a record that this release does not know, too.
        pipeline: None: an earlier release wrote it.
        rest: incarnation or number, or both.
    """

    kind: str
    pipeline: str | None
    sink: str
    rest: tuple[str | int, ...]

    @classmethod
    def parse(cls, raw: bytes) -> Key:
        try:
            kind, *parts = json.loads(raw)
            pipeline = parts.pop(0) if len(parts) + 1 == _PARTS.get(kind) else None
            return cls(kind, pipeline, parts[0], tuple(parts[1:]))
        except (ValueError, TypeError, IndexError, RecursionError):
            return cls("", None, "", ())  # anybody may write to a topic


class Keys:
    """Keys of one pipeline and sink."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def key(self, kind: str, *rest: str | int) -> bytes:
        return json.dumps([kind, self._scope.pipeline, self._scope.sink, *rest], separators=(",", ":")).encode()

    def old(self, kind: str, *rest: str | int) -> bytes:
        """As an earlier release wrote it."""
        return json.dumps([kind, self._scope.sink, *rest], separators=(",", ":")).encode()

    def one(self, kind: str, *rest: str | int) -> tuple[bytes, ...]:
        return (self.key(kind, *rest),)

    def both(self, kind: str, *rest: str | int) -> tuple[bytes, ...]:
        return self.key(kind, *rest), self.old(kind, *rest)

    def holds(self, key: Key) -> bool:
        """Whether a record may be this pipeline's and sink's."""
        return key.sink == self._scope.sink and key.pipeline in (None, self._scope.pipeline)


MOVED = {"moved": True}
"""Field of an owner under an earlier release's key that only stops such a release."""


def is_moved(owner: bytes) -> bool:
    return "moved" in Owner.from_json(owner)[1]
