"""Dead letters of a pipeline, for an operator: list, retry, drop. Does not use Spark."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from delivered.checkpoint.folder import logged
from delivered.model.errors import Refused, UsageError
from delivered.model.limits import DEAD_LETTERS_BATCH_MAX, DEAD_LETTERS_MAX
from delivered.operate.dead_letter_batches import DeadLetter, Desk, Settlement, Status, letter_id
from delivered.operate.dead_records import KINDS, RecordDesk
from delivered.pipeline.definition import Definition
from delivered.pipeline.spec import NO_INCARNATION


def dead_letters(pipeline: Definition, *, settled: bool = False, limit: int = DEAD_LETTERS_MAX) -> list[DeadLetter]:
    """Dead letters of the pipeline's checkpoint. Claims nothing and fences nobody.

    Args:
        settled: also those that were retried or dropped.

    Raises:
        UsageError: the pipeline keeps no dead letters.
        Refused: they cannot be read back.
        Unreachable: a server or the checkpoint did not answer.
    """
    found = []
    for letter in _letters(pipeline, _desks(pipeline)):
        if settled or letter.status in (Status.OPEN, Status.BEGUN):
            found.append(letter)
        if len(found) == limit:
            break
    return found


def retry(pipeline: Definition, ids: Collection[str] | None = None) -> Settlement:
    """Write dead letters to the sinks that rejected them. May be called again, after a kill anywhere.

    Args:
        ids: None: all that are open.

    Raises:
        UsageError: an id is unknown, or not open.
        Refused: a letter's sink is no longer in the pipeline, or its row no longer suits the sink's columns; or an
            unfinished retry can no longer be finished as it began.
        DeliveredError: as a batch of the pipeline.
    """
    return _settle(pipeline, Status.RETRIED, ids)


def drop(pipeline: Definition, ids: Collection[str] | None = None) -> Settlement:
    """Record that dead letters will not be retried. As `retry`."""
    return _settle(pipeline, Status.DROPPED, ids)


def _settle(pipeline: Definition, how: Status, ids: Collection[str] | None) -> Settlement:
    desks = _desks(pipeline)
    done = Settlement()
    for desk, own in _distinct(desks).items():
        desk.finish(lambda own=own: _letters(pipeline, own))  # type: ignore[misc]
    chosen = _chosen(pipeline, desks, ids)
    if len(chosen) > DEAD_LETTERS_MAX:
        chosen, done.more = chosen[:DEAD_LETTERS_MAX], True
    by_desk: dict[Desk, list[DeadLetter]] = {}
    for letter in chosen:
        if letter.sink not in desks:
            count = sum(n.sink == letter.sink for n in chosen)
            raise Refused("DEAD_LETTER_SINK", count=count, sink=letter.sink, sink_names=", ".join(pipeline.sink_names))
        by_desk.setdefault(desks[letter.sink], []).append(letter)
    for desk, letters in by_desk.items():
        for start in range(0, len(letters), DEAD_LETTERS_BATCH_MAX):
            desk.settle(letters[start : start + DEAD_LETTERS_BATCH_MAX], how, done)
    return done


def _chosen(pipeline: Definition, desks: Mapping[str, Desk], ids: Collection[str] | None) -> list[DeadLetter]:
    chosen, left = [], set(ids or ())
    for letter in _letters(pipeline, desks):
        if ids is None:
            if letter.status is Status.OPEN:
                chosen.append(letter)
        elif letter.id in left:
            left.discard(letter.id)
            if letter.status is not Status.OPEN:
                raise UsageError("DEAD_LETTER_SETTLED", id=letter.id, status=letter.status)
            chosen.append(letter)
        if len(chosen) > DEAD_LETTERS_MAX:
            break
    if left:
        raise UsageError("DEAD_LETTER_UNKNOWN", pipeline=pipeline.name, id=min(left), checkpoint=pipeline.checkpoint)
    return chosen


def _desks(pipeline: Definition) -> dict[str, Desk]:
    """By what a letter has as its sink."""
    incarnation = logged(pipeline.checkpoint)[0] or NO_INCARNATION
    desks = {
        name: Desk(pipeline, name, endpoint.sink(), incarnation)
        for name, endpoint in zip(pipeline.sink_names, pipeline.sinks, strict=True)
    }
    if pipeline.dead_letter is None:
        return desks
    return {**desks, **dict.fromkeys([o.value for o in KINDS], RecordDesk(pipeline, incarnation))}


def _distinct(desks: Mapping[str, Desk]) -> dict[Desk, dict[str, Desk]]:
    """Each desk, with the part of `desks` that names it."""
    return {desk: {n: d for n, d in desks.items() if d is desk} for desk in desks.values()}


def _letters(pipeline: Definition, desks: Mapping[str, Desk]) -> Iterator[DeadLetter]:
    """Each letter once, with its status."""
    incarnation = logged(pipeline.checkpoint)[0] or NO_INCARNATION
    known = {desk: desk.status() for desk in _distinct(desks)}
    status = {name: known[desk] for name, desk in desks.items()}
    seen: set[str] = set()
    keeps = pipeline.dead_letter is not None
    for found in _in_sink(pipeline, incarnation):
        # An at_least_once pipeline may write one twice.
        if found.id not in seen:
            seen.add(found.id)
            yield _with_status(found, status)
    for desk in known:
        kept = desk.kept()
        keeps = keeps or kept is not None
        for found in kept or ():
            yield _with_status(found, status)
    if not keeps:
        raise UsageError("DEAD_LETTERS_NONE", pipeline=pipeline.name, on_bad_row=pipeline.on_bad_row.value)


def _with_status(letter: DeadLetter, status: Mapping[str, Mapping[str, Status]]) -> DeadLetter:
    known = status.get(letter.sink, {}).get(letter.id, Status.OPEN)
    return replace(letter, status=known)


def _in_sink(pipeline: Definition, incarnation: str) -> Iterator[DeadLetter]:
    """Letters in the dead-letter sink."""
    if pipeline.dead_letter is None or incarnation == NO_INCARNATION:
        return
    scan = pipeline.dead_letter.sink().scan().planned()
    for row in (r for piece in scan.slices() for batch in scan.read(piece) for r in batch.to_pylist()):
        told = row if "record" in row else json.loads(row["value"])
        if (told["pipeline"], told["incarnation"]) == (pipeline.name, incarnation):
            where = {n: told[n] for n in ("batch", "shard", "topic", "partition", "offset")}
            name = letter_id(told["sink"], told["batch"], told["shard"], told["row"])
            yield DeadLetter(name, told["sink"], told["reason"], record=told["record"], **where)
