"""Ledgers of other pipelines and sinks, to name in an error whose they may be."""

from __future__ import annotations

import time
from contextlib import suppress
from difflib import SequenceMatcher

from delivered.clients.kafka.login import NoAnswer
from delivered.clients.kafka.protocol import Wire
from delivered.connectors.kafka.committed import NOBODY, CommittedReader
from delivered.connectors.kafka.ledger_keys import Key, is_moved
from delivered.connectors.kafka.sink_options import LEDGER_TOPICS
from delivered.connectors.kafka.topics import STATE_PARTITION
from delivered.model.errors import DeliveredError
from delivered.model.identity import OTHERS_MAX, OtherLedger, Scope, named_first
from delivered.model.limits import CONNECT_TIMEOUT_S
from delivered.model.work import Decision


def other_ledgers(wire: Wire, own: str, scope: Scope) -> list[OtherLedger]:
    """Skips topics that this user may not read, and what no ledger wrote. Raises NoAnswer."""
    others = [name for name in wire.topics() if name.startswith(LEDGER_TOPICS) and name != own]
    # Reads only some; a renamed pipeline's name is usually similar.
    others.sort(key=lambda name: (-SequenceMatcher(None, own, name).ratio(), name))
    found: dict[tuple[str, str], bool] = {}
    for topic in [own, *others[:OTHERS_MAX]]:
        pipeline = scope.pipeline if topic == own else topic.removeprefix(LEDGER_TOPICS)
        reader = CommittedReader(wire, topic, STATE_PARTITION)
        with suppress(NoAnswer, DeliveredError):
            for record in reader.read(time.monotonic() + CONNECT_TIMEOUT_S, wait=False):
                key, value = Key.parse(record.key), record.value
                theirs = key.pipeline or pipeline
                if value is None or record.producer == NOBODY or key.kind not in ("owner", "last", "begun"):
                    continue
                with suppress(ValueError, LookupError, TypeError, AttributeError, DeliveredError):
                    if key.pipeline is None and key.kind == "owner" and is_moved(value):
                        continue
                    if key.pipeline is None and key.kind == "last":
                        theirs = Decision.from_json(value).scope.pipeline
                    holds = key.kind in ("last", "begun") and key.rest == (scope.incarnation,)
                    if holds or key.kind == "owner":
                        found[theirs, key.sink] = found.get((theirs, key.sink), False) or holds
    found.pop((scope.pipeline, scope.sink), None)
    return named_first(OtherLedger(*name, same_incarnation=holds) for name, holds in found.items())
