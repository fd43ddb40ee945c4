"""What brokers tell of topics: their ids, and which of them hold ledgers."""

from __future__ import annotations

import contextlib
import json
import time
from difflib import SequenceMatcher
from typing import Any

from delivered.connectors.kafka.markers import LEDGER_TOPICS, STATE_PARTITION, CommittedReader
from delivered.connectors.kafka.protocol import (
    LEADER_NOT_AVAILABLE,
    NONE,
    UNKNOWN_TOPIC_OR_PARTITION,
    NoAnswer,
    Wire,
    name_of,
)
from delivered.model.identity import OTHERS_MAX, OtherLedger, Scope, named_first
from delivered.model.limits import CONNECT_TIMEOUT_S


def topic_id(wire: Wire, topic: str) -> str | None:
    """The id that a topic got when it was made; None: there is no such topic, or the brokers are older than ids.

    Raises:
        NoAnswer: nobody tells at the moment.
    """
    from kafka.protocol.metadata import MetadataRequest

    Topic = MetadataRequest.MetadataRequestTopic  # noqa: N806 - a class
    answer = wire.ask(MetadataRequest(topics=[Topic(name=topic)], allow_auto_topic_creation=False))
    [found] = answer.topics
    if found.error_code == UNKNOWN_TOPIC_OR_PARTITION:
        return None
    if found.error_code not in (NONE, LEADER_NOT_AVAILABLE):
        raise NoAnswer(f"topic {topic!r}: {name_of(found.error_code)}")
    known: Any = found.topic_id
    return str(known) if known is not None and known.int else None


def other_ledgers(wire: Wire, own: str, scope: Scope) -> list[OtherLedger]:
    """As `delivered.contract.powers.KnowsOthers.others`. Of topics that this user may not read nothing is told.

    Raises:
        NoAnswer: nobody tells at the moment.
    """
    from kafka.protocol.metadata import MetadataRequest

    answer = wire.ask(MetadataRequest(topics=None, allow_auto_topic_creation=False, max_version=9))
    names = [t.name for t in answer.topics if t.name.startswith(LEDGER_TOPICS) and t.name != own]
    # Not all are read. A new name is mostly like the former one.
    topics = sorted(names, key=lambda name: (-SequenceMatcher(None, own, name).ratio(), name))
    found: dict[tuple[str, str], bool] = {}
    for topic in [own, *topics[:OTHERS_MAX]]:
        pipeline = scope.pipeline if topic == own else topic.removeprefix(LEDGER_TOPICS)
        reader = CommittedReader(wire, topic, STATE_PARTITION)
        with contextlib.suppress(NoAnswer):
            for record in reader.read(time.monotonic() + CONNECT_TIMEOUT_S, wait=False):
                match json.loads(record.key):
                    case ["owner", str(sink)]:
                        found.setdefault((pipeline, sink), False)
                    case ["last" | "begun", str(sink), scope.incarnation] if record.value is not None:
                        found[pipeline, sink] = True
                    case _:
                        pass
    found.pop((scope.pipeline, scope.sink), None)
    return named_first(OtherLedger(*name, same_incarnation=holds) for name, holds in found.items())
