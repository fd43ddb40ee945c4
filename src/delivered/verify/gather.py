"""What there is to judge, put together when everything has ended: what went in, what came out, how runs ended.

What must be in the sink follows from what *is* in the source at the end. A queue that forgets holds nothing then: there
it follows from what was sent. What its sender was told is in must be there once, by its id; what the sender was told
nothing about may be there once, or not at all.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from delivered.verify.bench import Bench
from delivered.verify.clients.base import Forgets, Row
from delivered.verify.clients.several import at_sink, names_of
from delivered.verify.evidence import Evidence, Seen
from delivered.verify.history import End, fired, sends
from delivered.verify.services import Run
from delivered.verify.template import whole
from delivered.verify.workloads import source_id

_SETTLE_S = 15.0


def gather(bench: Bench, required: Sequence[str], ordered: bool) -> Evidence:
    """Read source and sink at the end, stop the reader, and put together what there is to judge.

    Raises:
        Trouble: the reader ended early.
    """
    s = bench.setting
    with suppress(TimeoutError):
        # The markers of transactions that were just ended arrive a moment later.
        bench.wait(lambda: not s.drain.open_transactions(s.name), "open transactions end", _SETTLE_S)
    hanging = s.drain.open_transactions(s.name)
    source = s.feed.read()
    final = bench.reader.as_seen(s.drain.read())
    bench.history.add("final reader", "read", End.OK, {"effects": len(final)})
    bench.reader.close()
    bench.reader.check()
    ends = sends(bench.history)
    by_record = s.template is None and s.workload.together is None
    return Evidence(
        guarantee=s.guarantee,
        expected=_expected_of_sent(bench, ends, final)
        if isinstance(s.feed, Forgets)
        else _expected(bench, source, final),
        acknowledged=frozenset(i for i, end in ends.items() if end is End.OK),
        in_source=Counter(_source_id(bench, r) for r in source),
        offered=frozenset(ends),
        seen=bench.reader.seen,
        final=final,
        snapshots=bench.reader.snapshots,
        batches=_batches(bench, source) if by_record else None,
        # Which rows of an own transform, or of one with state, make a batch cannot be told from outside.
        batch_atomic=s.drain.batch_atomic and by_record,
        ordered=ordered,
        given_up=_audited(bench, "counts", "given_up"),
        audit_verdict=bench.audited["verdict"] if bench.audited else None,
        open_transactions=hanging,
        required=required,
        fired=fired(bench.history),
        stops=[*(bench.receiving.stops if bench.receiving is not None else ()), *bench.stops],
        stays_down=bench.stays_down,
        recovery_s=_recoveries(bench),
        plain_s=s.plain_s,
    )


def first_effect_s(bench: Bench) -> float | None:
    """Seconds from the first start to the first effect that the reader saw."""
    return _visible_after(bench, bench.runs[0], None) if bench.runs else None


def plain_restart_s(bench: Bench) -> float | None:
    """The same of the last start, in a cell whose runs all ended by themselves; None: there was none."""
    plain = [r for r in bench.runs[1:] if not r.after_kill]
    return _visible_after(bench, plain[0], None) if plain else None


def _audited(bench: Bench, *path: str) -> int | None:
    found: Any = bench.audited
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, int) else None


def _expected(bench: Bench, source: Sequence[Row], final: Sequence[Seen]) -> Counter[str]:
    template, workload = bench.setting.template, bench.setting.workload
    if template is None and workload.together is not None:
        return Counter(workload.told_by(None, v).id for v in workload.together([r.value for r in source]))
    if template is None:
        found = Counter(e for r in source for e in _effects(bench, r.key, r.value))
        # One row of a key, however often the source says it.
        return Counter(dict.fromkeys(found, 1)) if workload.replaces else found
    if template.reference is None:
        template.reference = Counter(s.effect for s in final)
    return template.reference


def _expected_of_sent(bench: Bench, ends: dict[str, End], final: Sequence[Seen]) -> Counter[str]:
    """Each id once: that a sender repeats itself is the receiver's to notice."""
    there = {s.effect for s in final}
    found = Counter[str]()
    for record in {r.id: r for r in bench.records}.values():
        effects = Counter(_effects(bench, record.key, record.value))
        end = ends.get(record.id)
        if end is End.OK or (end is End.UNKNOWN and there & effects.keys()):
            found += effects
    return found


def _source_id(bench: Bench, row: Row) -> str:
    return source_id(row.value) if bench.setting.template is None else whole(row.key, row.value).id


def _effects(bench: Bench, key: str | None, value: str) -> list[str]:
    workload = bench.setting.workload
    found = [workload.told_by(key, v).id for v in workload.effects(value)]
    return [at_sink(sink, effect) for sink in names_of(bench.setting.drain) for effect in found]


def _recoveries(bench: Bench) -> list[float]:
    """From each start after a SIGKILL of the driver to the first effect seen after it, if that came before the next
    start."""
    found = [
        _visible_after(bench, run, after)
        for run, after in itertools.zip_longest(bench.runs, bench.runs[1:])
        if run.after_kill
    ]
    return [s for s in found if s is not None]


def _visible_after(bench: Bench, run: Run, next_run: Run | None) -> float | None:
    first = next((s.at_s for s in bench.reader.seen if s.at_s > run.started_s), None)
    if first is None or (next_run is not None and first > next_run.started_s):
        return None
    return round(first - run.started_s, 2)


def _batches(bench: Bench, source: Sequence[Row]) -> dict[int, frozenset[str]] | None:
    """Effects of each batch that the checkpoint still knows; None if it has a gap."""
    ends: dict[int, dict[str, int]] = {}
    for number in bench.batches_planned():
        lines = (bench.checkpoint / "offsets" / str(number)).read_text(encoding="utf-8").splitlines()
        ends[number] = bench.setting.feed.offsets(json.loads(lines[2]))
    if not ends or list(ends) != list(range(len(ends))):
        return None
    found: dict[int, set[str]] = {n: set() for n in ends}
    for row in source:
        batch = next((n for n, end in ends.items() if row.position < end.get(row.lane, 0)), None)
        if batch is not None:
            found[batch] |= set(_effects(bench, row.key, row.value))
    return {n: frozenset(effects) for n, effects in found.items()}
