"""A plan or a refusal, rendered as text or JSON. Both walk the steps that the engine runs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, assert_never

from delivered import html
from delivered.model.capability import Guarantee, LedgerPlace
from delivered.model.errors import Refused, Unreachable, texts
from delivered.model.step import Step

_LABEL = 18
_WIDTH = 120


@dataclass(frozen=True)
class Reason:
    """Why a request is refused.

    Attributes:
        code: as in an error, without the prefix.
        way_out: what the user can change to get the requested guarantee.
        transient: a server is unreachable, which says nothing about what it supports.
    """

    code: str
    text: str
    way_out: str
    transient: bool = False

    @classmethod
    def build(cls, code: str, **values: object) -> Reason:
        """With the texts of the catalogue; `code` with its condition."""
        text, way_out = texts(code, values)
        return cls(code.partition(".")[0], text, way_out or "")


@dataclass(frozen=True)
class Plan:
    """What a pipeline will do, and what its guarantee depends on.

    Attributes:
        mechanism: how the guarantee is kept, as a phrase.
        steps: of one batch, in order; exactly one decides.
        recovery: what a start runs before its first batch.
        ledger: the sink whose store holds the decision, and whether rows become visible with it.
        assumptions: what must hold outside the pipeline.
        limits: bounds worth knowing before the start.
        warnings: findings of preflight and the ledger that are no reason to refuse.
        dedup: which duplicates in the source are recognised, which keys expire, and the cost. Empty: no dedup.
        order: which of several sinks decides, the order of the others, and why. Empty for a single sink.
        records: by which client sources and sinks read and write them, and why, if a system has several.
        checked: what preflight looked at in targets whose definition may change what is written.
    """

    pipeline: str
    guarantee: Guarantee
    mechanism: str
    steps: tuple[Step, ...]
    recovery: tuple[Step, ...]
    ledger: LedgerPlace
    assumptions: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    dedup: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()

    @property
    def deciding(self) -> Step:
        return next(s for s in self.steps if s.decides)

    def __str__(self) -> str:
        return to_text(self)

    def _repr_html_(self) -> str:
        return to_html(self)


@dataclass(frozen=True)
class Refusal:
    """Why a pipeline cannot have its guarantee, and which one it can have.

    Attributes:
        nearest: the strongest other guarantee available to the unchanged request; None: none.
        way_out: what to change to get the requested guarantee.
        transient: a server is unreachable; a later request may succeed.
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
        return self.way_out + (f"; or choose the guarantee {self.nearest.value}" if self.nearest else "")

    def __str__(self) -> str:
        return to_text(self)

    def _repr_html_(self) -> str:
        return to_html(self)


def to_text(answer: Plan | Refusal, width: int = _WIDTH) -> str:
    """Human-readable; ends without a newline."""
    match answer:
        case Plan():
            return "\n".join(_plan_lines(answer, width))
        case Refusal():
            return "\n".join(_refusal_lines(answer, width))
        case _:
            assert_never(answer)


def to_html(answer: Plan | Refusal) -> str:
    """The same, for a notebook."""
    match answer:
        case Plan():
            return html.fragment(*_plan_parts(answer))
        case Refusal():
            return html.fragment(*_refusal_parts(answer))
        case _:
            assert_never(answer)


def to_json(answer: Plan | Refusal) -> dict[str, Any]:
    """JSON values only."""
    head = {"pipeline": answer.pipeline, "guarantee": answer.guarantee.value}
    match answer:
        case Plan():
            return {
                **head,
                "refused": False,
                "mechanism": answer.mechanism,
                "steps": [_step(s) for s in answer.steps],
                "recovery": [_step(s) for s in answer.recovery],
                "assumptions": list(answer.assumptions),
                "limits": list(answer.limits),
                "warnings": list(answer.warnings),
                **({"records": list(answer.records)} if answer.records else {}),
                **({"checked": list(answer.checked)} if answer.checked else {}),
                **({"order": list(answer.order)} if answer.order else {}),
                **({"dedup": list(answer.dedup)} if answer.dedup else {}),
            }
        case Refusal():
            return {
                **head,
                "refused": True,
                "code": answer.error.code,
                "reason": answer.reason,
                "nearest": answer.nearest.value if answer.nearest else None,
                "way_out": answer.way_out,
            }
        case _:
            assert_never(answer)


def _step(step: Step) -> dict[str, Any]:
    return {"id": step.id.value, "does": step.does, "on_crash": step.on_crash, "decides": step.decides}


def _plan_lines(plan: Plan, width: int) -> Iterable[str]:
    yield f"{plan.pipeline}: {plan.guarantee.value} by {plan.mechanism}"
    yield ""
    column = max(len(s.does) for s in plan.steps) + 2
    for step in plan.steps:
        mark = _mark(plan) if step.decides else ""
        if mark and _LABEL + column + len(mark) > width:
            yield from _wrapped(step.id.value, step.does, width)
            yield f"{'':{_LABEL}}{mark}"
        elif mark:
            yield f"  {step.id.value:{_LABEL - 2}}{step.does:{column}}{mark}"
        else:
            yield from _wrapped(step.id.value, step.does, width)
    yield ""
    for label, lines in _blocks(plan):
        yield from _block(label, lines, width)
    yield ""
    yield "  What a crash right after each step costs"
    for name, cost in dict.fromkeys((s.id.value, s.on_crash) for s in plan.steps):
        yield from _wrapped(name, cost, width)


def _blocks(plan: Plan) -> Iterable[tuple[str, tuple[str, ...]]]:
    yield "records", plan.records
    yield "order", plan.order
    yield "dedup", plan.dedup
    yield "on start", (", ".join(f"{s.id.value} ({s.does})" for s in plan.recovery),)
    yield "assumes", plan.assumptions
    yield "limits", plan.limits
    yield "checked", plan.checked
    yield "warning", plan.warnings


def _plan_parts(plan: Plan) -> Iterable[html.Html]:
    yield html.element(
        "p", html.joined((html.element("b", plan.pipeline), f": {plan.guarantee.value} by {plan.mechanism}"))
    )
    rows = []
    for step in plan.steps:
        mark = html.element("small", _mark(plan).removeprefix("<- ")) if step.decides else ""
        does = html.joined((html.element("b", step.does, "held") if step.decides else step.does, mark))
        rows.append((html.element("code", step.id.value), does, step.on_crash))
    yield html.table(("step", "does", "a crash right after it costs"), rows)
    yield html.table((), [(label, html.bullets(lines)) for label, lines in _blocks(plan) if lines])


def _refusal_parts(refusal: Refusal) -> Iterable[html.Html]:
    head = (html.element("b", refusal.pipeline), f": {refusal.guarantee.value} is refused")
    yield html.element("p", html.joined(head))
    yield html.problem(refusal.error.code, refusal.reason, refusal.way_out)
    yield html.element("p", f"Nearest guarantee: {refusal.nearest.value if refusal.nearest else 'none, as configured'}")


def _mark(plan: Plan) -> str:
    exactly_once = plan.guarantee is Guarantee.EXACTLY_ONCE
    return f"<- from here on the batch {'counts' if exactly_once else 'is not sent again'}"


def _refusal_lines(refusal: Refusal, width: int) -> Iterable[str]:
    yield f"{refusal.pipeline}: {refusal.guarantee.value} is refused [{refusal.error.code}]"
    yield ""
    yield from _wrapped("why", refusal.reason, width)
    yield from _wrapped("next step", refusal.way_out, width)
    yield from _wrapped("nearest", refusal.nearest.value if refusal.nearest else "none, as configured", width)


def _block(label: str, lines: Iterable[str], width: int) -> Iterable[str]:
    for i, line in enumerate(lines):
        yield from _wrapped(label if i == 0 else "", line, width)


def _wrapped(label: str, text: str, width: int) -> Iterable[str]:
    # Never wrap text meant for pasting, such as offsets in JSON.
    lines = textwrap.wrap(text, max(width - _LABEL, 20), break_long_words=False, break_on_hyphens=False)
    for i, line in enumerate(lines or [""]):
        yield (f"  {label if i == 0 else '':{_LABEL - 2}}{line}").rstrip()


def seconds(value: float) -> str:
    """A duration for display: "90 s", "15 min", "72 h"."""
    if value >= 7_200 and value % 3_600 == 0:
        return f"{value / 3_600:g} h"
    if value >= 120 and value % 60 == 0:
        return f"{value / 60:g} min"
    return f"{value:g} s"
