"""Puts rules and steps together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from delivered.model.bad_row import OnBadRow
from delivered.model.capability import Commit
from delivered.model.errors import Refused, Unreachable
from delivered.model.guarantee import Guarantee
from delivered.model.step import Step
from delivered.planner import group, repeats
from delivered.planner.request import Request
from delivered.planner.rules import Reason, reasons, seconds
from delivered.planner.steps import batch_steps, mechanism, recovery_steps


@dataclass(frozen=True)
class Plan:
    """What a pipeline will do, and what its guarantee rests on.

    Attributes:
        mechanism: by what the guarantee is kept, as a phrase.
        steps: of one batch, in order; exactly one decides.
        recovery: of a start, before its first batch.
        assumptions: what must hold outside of the pipeline.
        limits: bounds worth knowing before the start.
        warnings: what preflight and the ledger showed and does not refuse.
        dedup: what is known again of the source's repeats, what is forgotten, and what that costs. Empty: no dedup.
        order: of several sinks: which one decides, in which order the others come, and why. Empty for one sink.
    """

    pipeline: str
    guarantee: Guarantee
    mechanism: str
    steps: tuple[Step, ...]
    recovery: tuple[Step, ...]
    assumptions: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    dedup: tuple[str, ...] = ()

    @property
    def deciding(self) -> Step:
        return next(s for s in self.steps if s.decides)

    def __str__(self) -> str:
        from delivered.planner.explain import to_text

        return to_text(self)


@dataclass(frozen=True)
class Refusal:
    """Why a pipeline cannot have its guarantee, and what can be had.

    Attributes:
        nearest: the strongest other guarantee that can be had as everything stands; None: none.
        way_out: what to change to get the guarantee asked for.
        transient: a server is away; asked later, the answer may be another.
    """

    pipeline: str
    guarantee: Guarantee
    code: str
    reason: str
    nearest: Guarantee | None
    way_out: str
    transient: bool = False

    @property
    def error(self) -> Refused | Unreachable:
        """The refusal as an exception, for `start`."""
        return (Unreachable if self.transient else Refused)(self.code, self.reason, next_step=self.next_step)

    @property
    def next_step(self) -> str:
        return self.way_out + (f"; or name the guarantee {self.nearest.value}" if self.nearest else "")

    def __str__(self) -> str:
        from delivered.planner.explain import to_text

        return to_text(self)


def make_plan(request: Request) -> Plan | Refusal:
    """Answer a request. Pure: the same request, the same answer."""
    reason = next(reasons(request), None)
    if reason is not None:
        return _refusal(request, reason)
    return Plan(
        pipeline=request.pipeline,
        guarantee=request.guarantee,
        mechanism=mechanism(request),
        steps=repeats.with_steps(request.dedup, batch_steps(request)),
        recovery=recovery_steps(request),
        assumptions=tuple(_assumptions(request)),
        limits=tuple(_limits(request)),
        warnings=(
            *_transform_changed(request),
            *(f.message for f in [*request.source.findings, *(f for s in request.sinks for f in s.findings)]),
        ),
        order=group.order(request) if request.is_group else (),
        dedup=repeats.says(request.dedup, request.decider.capability.system) if request.dedup is not None else (),
    )


def _refusal(request: Request, reason: Reason) -> Refusal:
    weaker = [g for g in (Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE) if g is not request.guarantee]
    # What a server can do does not depend on whether it runs now; but that it is away stands against every guarantee.
    nearest = None if reason.transient else next((g for g in weaker if _can_be_had(request, g)), None)
    return Refusal(
        request.pipeline, request.guarantee, reason.code, reason.text, nearest, reason.way_out, reason.transient
    )


def _can_be_had(request: Request, guarantee: Guarantee) -> bool:
    return all(reason.transient for reason in reasons(replace(request, guarantee=guarantee)))


def _transform_changed(request: Request) -> Iterator[str]:
    """What it means that the newest batches ran with another transform."""
    if request.checkpoint.transform_changed is None:
        return
    first, last = request.checkpoint.transform_changed
    ran = f"batch {last}" if first == last else f"batches {first} to {last}"
    yield (
        f"the transform changed: {ran} ran with another version. What that wrote stays as it is; from batch {last + 1} "
        "on this one runs. An audit recomputes the batches of this version and answers unknown for the others"
    )
    if request.guarantee is Guarantee.EXACTLY_ONCE and _promises(request):
        yield (
            f"if batch {last} is decided and a transaction of it expired, the query stops (REPLAY_DIFFERS): start once "
            "with the former transform"
        )


def _promises(request: Request) -> list[float]:
    """Seconds that the sinks' promises last, where they expire."""
    return [
        s.capability.prepared_timeout_s
        for s in request.sinks
        if s.capability.commit is Commit.TWO_PHASE and s.capability.prepared_timeout_s is not None
    ]


def _assumptions(request: Request) -> list[str]:
    found = list(request.source.capability.assumes)
    match request.guarantee:
        case Guarantee.EXACTLY_ONCE:
            found.extend(dict.fromkeys(a for s in request.sinks for a in s.capability.assumes))
            found.extend(_same_rows(request))
        case Guarantee.AT_LEAST_ONCE:
            found.append(f"readers of {_each(request)} bear repeated records")
            if request.transform.deterministic is False:
                found.append("a repeated record may differ from its first copy: the transform is not deterministic")
        case Guarantee.AT_MOST_ONCE:
            found.append(f"readers of {_each(request)} bear missing records; how many were given up is in the ledger")
            if request.transform.kind in ("sql", "python"):
                found.append(
                    "after lost shuffle files the query stops: spark.stage.maxConsecutiveAttempts=1 (sessions made "
                    "here have it)"
                )
    if request.transform.stateful or (request.dedup is not None and not request.dedup.in_table):
        found.append("the state lives in Spark's checkpoint and is restored together with the offsets")
    return found


def _same_rows(request: Request) -> list[str]:
    """What exactly_once takes for granted of the transform: only an expired promise ever needs its rows again."""
    promises = _promises(request)
    if not promises:
        return []
    span = seconds(min(promises))
    if request.dedup is not None and not request.dedup.in_table:
        found = [f"copies of one record in one batch are alike (only if a transaction expired: {span})"]
        return found + _same_transform(request, span)
    return _same_transform(request, span)


def _same_transform(request: Request, span: str) -> list[str]:
    if request.transform.kind == "none":
        return []
    if request.transform.deterministic is False:
        return [
            f"no decided transaction expires ({span}): the transform is not deterministic, so its rows could not be "
            "written again; the query would stop and say so"
        ]
    return [f"a batch run again gives the same rows (only if a transaction expired: {span})"]


def _bad_rows(request: Request) -> list[str]:
    """What becomes of rows that a sink refuses for themselves, and which of them are not seen in time."""
    if request.on_bad_row is OnBadRow.FAIL:
        return []
    goes = (
        "is left out and counted as given up"
        if request.on_bad_row is OnBadRow.DROP
        else f"goes to {request.dead_letters} in the same batch, with the reason"
    )
    written = [s.name for s in request.sinks if s.name != request.dead_letters]
    validating = [n for n in written if n in request.validating]
    blind = [n for n in written if n not in request.validating]
    found = []
    if validating:
        found.append(f"a row that {' or '.join(validating)} refuses for itself {goes}")
    stops = "what a server refuses by its own rules (constraints, limits of a topic) stops the query all the same"
    tail = f"; {', '.join(blind)} cannot tell bad rows before it writes" if blind else ""
    return [*found, stops + tail]


def _each(request: Request) -> str:
    return "every sink" if request.is_group else "the sink"


def _limits(request: Request) -> list[str]:
    exactly_once = request.guarantee is Guarantee.EXACTLY_ONCE
    found = list(dict.fromkeys(limit for s in request.sinks for limit in s.capability.limits))
    promises = [p for s in request.sinks if (p := s.capability.prepared_timeout_s) is not None]
    if exactly_once:
        if promises:
            declared = request.execution.batch_s_max
            tail = f"; a batch may take {seconds(declared)} as declared" if declared is not None else ""
            found.append(f"from its first row to its end a transaction lives {seconds(min(promises))}{tail}")
        if not all(s.capability.batch_atomic for s in request.sinks):
            found.append("a reader may see the shards of a batch appear one after the other")
    if request.is_group:
        found.extend(group.limits(request))
    found.extend(_bad_rows(request))
    if request.source.capability.sent_twice and request.dedup is None:
        found.append("what a producer sent twice is two records: the pipeline names no dedup")
    if request.source.capability.local:
        found.append(f"the source {request.source.label} rests on files of this machine")
    found.extend(f"the sink {s.label} rests on files of this machine" for s in request.sinks if s.capability.local)
    return found
