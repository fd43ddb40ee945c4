"""Sinks in the plan: which one decides, in which order they are written, what readers may see."""

from __future__ import annotations

from delivered.model.guarantee import Guarantee
from delivered.planner.answer import Reason
from delivered.planner.request import Request, SinkFacts


def mechanism(request: Request) -> str:
    """How exactly_once is kept, as a phrase."""
    if len(request.sinks) == 1:
        return request.decider.capability.mechanism
    last = f", {request.decider.name} as the last resource" if _last_resource(request) else ""
    return f"one decision for {len(request.sinks)} sinks{last}"


def order(request: Request) -> tuple[str, ...]:
    """Which sink decides, the order of the others, and why; empty: there is one."""
    if len(request.sinks) == 1:
        return ()
    decider = request.decider
    names = ", ".join(s.name for s in request.sinks)
    if request.guarantee is not Guarantee.EXACTLY_ONCE:
        return (
            f"{names}: rows are sent to each in this order",
            f"the ledger of {decider.name} records a batch once every sink has it",
        )
    if not _last_resource(request):
        return (
            f"{names}: each task prepares them in this order; the driver applies them in parallel",
            f"the ledger of {decider.name} decides for all: every sink can prepare, and it is listed first",
        )
    others = ", ".join(s.name for s in _others(request))
    return (
        f"{names}: each task prepares them in this order",
        f"{decider.name} decides for all: {decider.capability.system} cannot prepare a batch before it commits, so its "
        "own transaction carries the decision, as the last resource",
        f"{others}: prepared before it, so none can still vote no; applied after it, in parallel",
    )


def limits(request: Request) -> tuple[str, ...]:
    """What readers of several sinks may see (P27)."""
    names = [s.name for s in request.sinks]
    if len(names) == 1:
        return ()
    match request.guarantee:
        case Guarantee.EXACTLY_ONCE:
            others = ", ".join(s.name for s in _others(request))
            visibility = (
                f"readers of {request.decider.name} see a batch before readers of {others}"
                if _last_resource(request)
                else f"readers of {', '.join(names)} see a batch at different times"
            )
            return (
                f"{visibility}: it is visible in all after the last commit.apply (about 10 ms per transaction after "
                "commit.decide; the log has the time); after a crash in between, the next start applies the rest",
            )
        case Guarantee.AT_LEAST_ONCE:
            return ("writes are not atomic across sinks: after a crash, one may hold a batch twice and another once",)
        case Guarantee.AT_MOST_ONCE:
            return (
                "writes are not atomic across sinks: of an interrupted batch, one may hold rows that another lacks; "
                "given-up records are counted per sink",
            )


def decider_kept(request: Request) -> Reason | None:
    """Without the sink that decided, another ledger would be asked: it may lack the newest batch."""
    facts, now = request.checkpoint, request.decider.name
    former = facts.other_decider
    if former is None:
        return None
    ends = f"ends at batch {facts.ledger_newest}" if facts.ledger_newest is not None else "has no batch of it"
    return Reason.build(
        "DECIDER_REMOVED",
        former=former,
        location=facts.location,
        newest=facts.newest,
        unfinished=" (not finished)" if facts.unfinished else "",
        decider=now,
        ends=ends,
    )


def _last_resource(request: Request) -> bool:
    return request.ledger.carries_rows


def _others(request: Request) -> list[SinkFacts]:
    return [s for s in request.sinks if s is not request.decider]
