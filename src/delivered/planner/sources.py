"""Sources added or removed between two runs: whether Spark can continue, and the plan's warnings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from delivered.model.guarantee import Guarantee
from delivered.model.identity import SOURCE
from delivered.model.options import shown, starting_at
from delivered.planner.answer import Reason
from delivered.planner.request import Request


def sources_known(request: Request) -> Reason | None:
    """Spark's offset log identifies sources by name; without names it cannot show which one was added or removed."""
    facts = request.checkpoint
    now, before = _names(request), set(facts.offsets)
    if not before or (_unnamed(now) and _unnamed(before)):
        return None
    if _unnamed(now) or _unnamed(before):
        is_named, was_named = _join(now), _join(before)
        return Reason.build(
            "SOURCES_UNNAMED",
            sources="source" if _unnamed(now) else f"the named sources {is_named}",
            location=facts.location,
            before="source" if _unnamed(before) else f"the named sources {was_named}",
            starting_offsets=starting_at(facts.offsets_text),
        )
    back = sorted((now - before) & set(facts.removed))
    if back:
        end = facts.removed[back[0]]
        return Reason.build("SOURCE_RETURNED", source=back[0], end=shown(end), starting_offsets=starting_at(end))
    if now != before and facts.unfinished:
        return Reason.build(
            "SOURCES_UNFINISHED",
            newest=facts.newest,
            before=_join(before),
            current=_join(now),
            alternative=_undone(request),
        )
    return None


def _undone(request: Request) -> str:
    """The way back from a batch that Spark logged and then refused to run, as with other operators that keep state."""
    facts = request.checkpoint
    newest = facts.newest
    decided = newest is None or (facts.ledger_newest is not None and facts.ledger_newest >= newest)
    if decided or request.guarantee is not Guarantee.EXACTLY_ONCE:
        return ""
    return (
        f"; or, if Spark refuses to run the batch, delete offsets/{newest} and offsets/.{newest}.crc of the "
        "checkpoint: the batch is not decided, and no sink shows any of it"
    )


def changed(request: Request) -> Iterator[str]:
    """Warnings: sources that are new to the checkpoint, and sources missing from the pipeline."""
    now, before = _names(request), request.checkpoint.offsets
    if not before or _unnamed(now):
        return
    for name in sorted(now - set(before)):
        yield f"the source {name} is new to this checkpoint: it begins at its startingOffsets, once"
    for name in sorted(set(before) - now):
        yield (
            f"the source {name} is removed: it ended at {shown(before[name])}. What it delivered stays; should it "
            "return, it needs another name and startingOffsets"
        )


def _names(request: Request) -> set[str]:
    return {s.name or SOURCE for s in request.sources}


def _unnamed(names: Iterable[str]) -> bool:
    """Whether Spark's log identifies these sources by position."""
    return all(n == SOURCE or n.isdigit() for n in names)


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
