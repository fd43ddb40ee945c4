"""Gathers the evidence once everything has ended: what went in, what came out, how runs ended.

The expected content of the sink follows from what *is* in the source at the end, and what a script saw it lose. A queue
is empty then, so it follows from what was sent: acknowledged messages must be there once, by id; the others once or not
at all.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from delivered_lab.verify.evidence import End, Evidence, Seen, fired, sends
from delivered_lab.verify.fixture import Fixture
from delivered_lab.verify.services import Run, VerifierError
from delivered_lab.verify.systems.base import QueueSource, Row
from delivered_lab.verify.systems.group import at_sink, sink_names
from delivered_lab.verify.template import row_effect
from delivered_lab.verify.workloads import source_id

_SETTLE_S = 15.0


def gather(fixture: Fixture, required: Sequence[str], ordered: bool) -> Evidence:
    """Read source and sink at the end, stop the reader, and build the evidence.

    Raises:
        VerifierError: the reader ended early.
    """
    s = fixture.setting
    with suppress(TimeoutError):
        # The markers of transactions that just ended arrive a moment later.
        fixture.wait(lambda: not s.sink.open_transactions(s.name), "open transactions end", _SETTLE_S)
    hanging = s.sink.open_transactions(s.name)
    source = [*s.source.read(), *fixture.lost]
    final = fixture.reader.as_seen(s.sink.read())
    fixture.history.add("final reader", "read", End.OK, {"effects": len(final)})
    fixture.reader.close()
    fixture.reader.check()
    ends = sends(fixture.history)
    by_record = s.template is None and s.workload.together is None and s.workload.oracle is None
    results = _results(fixture, source, final)
    return Evidence(
        guarantee=s.guarantee,
        expected=_expected_of_sent(fixture, ends, final)
        if isinstance(s.source, QueueSource)
        else _expected(fixture, source, final)
        if results is None
        else results.expected,
        wanted=results.wanted if results is not None else None,
        states=results.states if results is not None else None,
        acknowledged=frozenset(i for i, end in ends.items() if end is End.OK),
        in_source=Counter(_source_id(fixture, r) for r in source),
        offered=frozenset(ends),
        seen=fixture.reader.seen,
        final=final,
        snapshots=fixture.reader.snapshots,
        batches=_batches(fixture, source) if by_record else None,
        # The rows that a custom or stateful transform makes of a batch cannot be known from outside.
        batch_atomic=s.sink.batch_atomic and (by_record or (results is not None and results.states is not None)),
        ordered=ordered,
        given_up=_audited(fixture, "counts", "given_up"),
        audit_verdict=fixture.audited["verdict"] if fixture.audited else None,
        open_transactions=hanging,
        required=required,
        fired=fired(fixture.history),
        stops=[*(fixture.receiving.stops if fixture.receiving is not None else ()), *fixture.stops],
        stays_down=fixture.stays_down,
        recovery_s=_recoveries(fixture),
        plain_s=s.plain_s,
    )


def first_effect_s(fixture: Fixture) -> float | None:
    """Seconds from the first start to the first effect seen by the reader."""
    return _visible_after(fixture, fixture.runs[0], None) if fixture.runs else None


def plain_restart_s(fixture: Fixture) -> float | None:
    """The same for the last start, in a case whose runs all ended by themselves; None: there was none."""
    plain = [r for r in fixture.runs[1:] if not r.after_kill]
    return _visible_after(fixture, plain[0], None) if plain else None


def _audited(fixture: Fixture, *path: str) -> int | None:
    found: Any = fixture.audited
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, int) else None


def _expected(fixture: Fixture, source: Sequence[Row], final: Sequence[Seen]) -> Counter[str]:
    template, workload = fixture.setting.template, fixture.setting.workload
    if template is None and workload.together is not None:
        return Counter(workload.effect_of(None, v).id for v in workload.together([r.value for r in source]))
    if template is None:
        found = Counter(e for r in source for e in _effects(fixture, r.key, r.value))
        # One row per key, however often the source has it.
        return Counter(dict.fromkeys(found, 1)) if workload.replaces else found
    if template.reference is None:
        template.reference = Counter(s.effect for s in final)
    return template.reference


@dataclass(frozen=True)
class _Results:
    """See `Evidence`."""

    expected: Counter[str]
    wanted: dict[str, str]
    states: list[frozenset[str]] | None


def _results(fixture: Fixture, source: Sequence[Row], final: Sequence[Seen]) -> _Results | None:
    """The oracle's answer, if the workload has one: for all records, and in output mode update for every prefix of the
    batches.

    Raises:
        VerifierError: in output mode update, the checkpoint has already dropped batches.
    """
    workload = fixture.setting.workload
    if workload.oracle is None:
        return None

    def rows(found: Mapping[str, str]) -> dict[str, str]:
        return {k: workload.effect_of(k, v).id for k, v in found.items()}

    wanted = rows(workload.oracle([r.value for r in source]))
    if workload.accepts is not None:
        for s in final:
            value, prefix = wanted.get(s.key or ""), f"{s.key} = "
            if value is not None and workload.accepts(value.removeprefix(prefix), s.effect.removeprefix(prefix)):
                wanted[s.key or ""] = s.effect
    if workload.output_mode == "append":
        return _Results(Counter(wanted.values()), wanted, None)
    batches = _by_batch(fixture, source)
    if batches is None:
        raise VerifierError("BATCHES_UNKNOWN", case=fixture.setting.name)
    parts = [[r.value for b in batches[: n + 1] for r in b] for n in range(len(batches))]
    states = [frozenset(rows(workload.oracle(part)).values()) for part in parts]
    if fixture.reader.upserted:
        return _Results(Counter(wanted.values()), wanted, states)
    changes = [now - before for before, now in itertools.pairwise([frozenset[str](), *states])]
    return _Results(Counter(c for part in changes for c in part), wanted, None)


def _expected_of_sent(fixture: Fixture, ends: dict[str, End], final: Sequence[Seen]) -> Counter[str]:
    """Each id once: a resend by the sender is for the receiver to deduplicate."""
    there = {s.effect for s in final}
    found = Counter[str]()
    for record in {r.id: r for r in fixture.records}.values():
        effects = Counter(_effects(fixture, record.key, record.value))
        end = ends.get(record.id)
        if end is End.OK or (end is End.UNKNOWN and there & effects.keys()):
            found += effects
    return found


def _source_id(fixture: Fixture, row: Row) -> str:
    return source_id(row.value) if fixture.setting.template is None else row_effect(row.key, row.value).id


def _effects(fixture: Fixture, key: str | None, value: str) -> list[str]:
    workload = fixture.setting.workload
    found = [workload.effect_of(key, v).id for v in workload.effects(value)]
    return [at_sink(sink, effect) for sink in sink_names(fixture.setting.sink) for effect in found]


def _recoveries(fixture: Fixture) -> list[float]:
    """From each start after a SIGKILL of the driver to the first effect after it, if it came before the next start."""
    found = [
        _visible_after(fixture, run, after)
        for run, after in itertools.zip_longest(fixture.runs, fixture.runs[1:])
        if run.after_kill
    ]
    return [s for s in found if s is not None]


def _visible_after(fixture: Fixture, run: Run, next_run: Run | None) -> float | None:
    first = next((s.at_s for s in fixture.reader.seen if s.at_s > run.started_s), None)
    if first is None or (next_run is not None and first > next_run.started_s):
        return None
    return round(first - run.started_s, 2)


def _batches(fixture: Fixture, source: Sequence[Row]) -> dict[int, frozenset[str]] | None:
    """Effects of each batch that the checkpoint still has; None if it has a gap."""
    batches = _by_batch(fixture, source)
    if batches is None:
        return None
    return {n: frozenset(e for r in rows for e in _effects(fixture, r.key, r.value)) for n, rows in enumerate(batches)}


def _by_batch(fixture: Fixture, source: Sequence[Row]) -> list[list[Row]] | None:
    """Records of each batch from 0 on; None if the checkpoint has a gap."""
    ends: dict[int, dict[str, int]] = {}
    for number in fixture.batches_planned():
        lines = (fixture.checkpoint / "offsets" / str(number)).read_text(encoding="utf-8").splitlines()
        ends[number] = fixture.setting.source.offsets(json.loads(lines[2]))
    if not ends or list(ends) != list(range(len(ends))):
        return None
    found: list[list[Row]] = [[] for _ in ends]
    for row in source:
        batch = next((n for n, end in ends.items() if row.position < end.get(row.partition, 0)), None)
        if batch is not None:
            found[batch].append(row)
    return found
