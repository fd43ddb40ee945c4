"""Which cases exist, and how they run: in parallel, seeded, resumable, with every result on disk at once."""

from __future__ import annotations

import fnmatch
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from delivered import Guarantee, UsageError
from delivered_lab.verify import ends
from delivered_lab.verify.case import Case, Environment, Result, Say, can_mount, run_case
from delivered_lab.verify.faults import CLUSTER, LOOP, MOUNT, TOPICS, catalogue, source_catalogue
from delivered_lab.verify.fixture import Template
from delivered_lab.verify.judge import Verdict, compared
from delivered_lab.verify.provenance import Ran, code_of, merged
from delivered_lab.verify.services import ENDS, ENGINE, SERVICES, SPARK
from delivered_lab.verify.systems import KAFKA, SINK_KINDS
from delivered_lab.verify.workloads import WORKLOADS, Workload

FORMAT = 1
"""Version of stored results. 1: {"format": 1, "results": ...}; 0, until 0.1: a bare list of results, or a run."""


def read_results(path: Path) -> dict[str, Any]:
    """Results in a file, converted to the newest format.

    Raises:
        UsageError: a newer version of this package wrote it.
        ValueError: not JSON.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if not (isinstance(data, dict) and "results" in data):
        data = {"results": data}
    version = data.setdefault("format", 0)
    if not isinstance(version, int) or version > FORMAT:
        raise UsageError("VERIFY_FORMAT_NEWER", path=path, version=version, newest=FORMAT)
    return {**data, "format": FORMAT}


def write_file(path: Path, text: str) -> None:
    """Replace a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


SINKS = tuple(SINK_KINDS)
GUARANTEES = (Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE)
DEFAULT_WORKLOAD = "keyed"
SEEDS_MAX = 1_000
_SETTLED = {Verdict.HELD.value, Verdict.BROKEN.value}


@dataclass(frozen=True)
class Choice:
    """What to run.

    Attributes:
        only: patterns such as sink/guarantee/workload/fault, where * matches anything; also a failure point (F7) or a
            part of one of the four; empty: everything.
        quick: the quick subset.
        service: what runs the pipelines: "spark", or "engine", which is the product without Spark; or what is
            killed instead of pipelines: "producer" or "consumer".
        minutes: start no case after this long; None: no limit.
        faults: continue with the next seeds until this many faults fired; None: one seed. Runs only the soak's cases.
        per_place: at most this many cases per failure point, guarantee and sink: those with the fewest faults, which
            need the fewest starts; None: all.
        sources: feed every sink from each of these, with the faults of a source and a sink; empty: each sink's own
            source, with all faults of a sink.
        workloads: only these; empty: all.
        fresh: every run through Spark is a process of its own; else drivers that were started before take it.
    """

    only: tuple[str, ...] = ()
    seed: int = 1
    quick: bool = False
    audit: bool = False
    service: str = SPARK
    jobs: int = 1
    minutes: float | None = None
    faults: int | None = None
    per_place: int | None = None
    sources: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    fresh: bool = False


def cases(choice: Choice) -> list[Case]:
    """In run order: the strictest guarantee first, the default workload before the others."""
    if choice.service in ENDS:
        found = ends.cases(choice.service, choice.seed)
        return [c for c in found if not choice.only or any(_matches(c, p) for p in choice.only)]
    found = _source_cases(choice) if choice.sources else _sink_cases(choice)
    if choice.quick:
        found = [c for c in found if c.fault.quick and c.workload == DEFAULT_WORKLOAD]
    possible = [c for c in found if _possible(c) and (not choice.workloads or c.workload in choice.workloads)]
    chosen = [c for c in possible if not choice.only or any(_matches(c, p) for p in choice.only)]
    return chosen if choice.per_place is None else _few(chosen, choice.per_place)


def _source_cases(choice: Choice) -> list[Case]:
    return [
        Case(sink, guarantee, DEFAULT_WORKLOAD, fault, choice.seed, choice.service, source)
        for guarantee in GUARANTEES
        for source in choice.sources
        for sink in SINKS
        for fault in source_catalogue(guarantee, sink, source)
        if choice.faults is None
    ]


def _sink_cases(choice: Choice) -> list[Case]:
    of_soak = choice.faults is not None
    every = [(g, s, f) for g in GUARANTEES for s in SINKS for f in catalogue(g, s) if f.soak == of_soak]
    first = [(g, s, f.workload or DEFAULT_WORKLOAD, f) for g, s, f in every]
    others = [
        (g, s, w.name, f)
        for g, s, f in every
        for w in WORKLOADS.values()
        if f.workload is None and f.name in w.faults and w.name != DEFAULT_WORKLOAD and _takes(s, g, w)
    ]
    return [Case(s, g, w, f, choice.seed, choice.service) for g, s, w, f in [*first, *others]]


def _takes(sink: str, guarantee: Guarantee, workload: Workload) -> bool:
    kind = SINK_KINDS[sink]
    exactly = guarantee is Guarantee.EXACTLY_ONCE
    if workload.oracle is not None:
        return exactly and sink in workload.sinks
    return not kind.members and (not workload.replaces or (kind.upserts and exactly))


def _few(found: Sequence[Case], per_place: int) -> list[Case]:
    """Order is kept. The undisturbed run always stays: it is needed to judge the others."""
    groups: dict[tuple[str, str, str, str], list[Case]] = {}
    for c in found:
        groups.setdefault((c.fault.place, c.guarantee.value, c.sink, c.source), []).append(c)
    kept = {id(c) for g in groups.values() for c in sorted(g, key=lambda c: len(c.fault.requires))[:per_place]}
    return [c for c in found if id(c) in kept]


def _possible(case: Case) -> bool:
    service = SERVICES[case.service]
    unfit = LOOP if service.sql else CLUSTER
    return service.can_run(WORKLOADS[case.workload]) and unfit not in case.fault.needs


def own_cases(choice: Choice, template: Template) -> list[Case]:
    """Cases of a user's pipeline: its guarantee, its sink, and every fault that needs no workload of its own. The
    undisturbed run comes first: it defines the expected output."""
    found = [
        Case(template.sink, template.guarantee, template.workload.name, fault, choice.seed, choice.service)
        for fault in catalogue(template.guarantee, template.sink)
        if fault.workload is None
        and not fault.soak
        and not {CLUSTER, LOOP} & set(fault.needs)
        and (TOPICS not in fault.needs or template.source == KAFKA)
    ]
    undisturbed, others = found[0], found[1:]
    if choice.quick:
        others = [c for c in others if c.fault.quick]
    return [undisturbed, *(c for c in others if not choice.only or any(_matches(c, p) for p in choice.only))]


def _matches(case: Case, pattern: str) -> bool:
    parts = (case.sink, case.guarantee.value, case.workload, case.fault.name)
    return fnmatch.fnmatchcase("/".join(parts), pattern) or pattern in parts or pattern == case.fault.place


def read_cases(path: Path) -> dict[tuple[Any, ...], Result]:
    """Results in a file, by their case; empty if there is no file."""
    found = [Result.from_json(data) for data in read_results(path)["results"]] if path.exists() else []
    return {result.key: result for result in found}


def is_current(result: Result) -> bool:
    """Whether its last run was of the code that is here."""
    return bool(result.ran) and Ran(*result.ran[-1]).code == code_of(result.service, result.sink, result.source)


@dataclass
class Store:
    """Results on disk, as a list; always complete.

    Attributes:
        earlier: those that the file held, whose runs stay on record when a case is run again.
    """

    path: Path
    results: dict[tuple[Any, ...], Result] = field(default_factory=dict)
    earlier: dict[tuple[Any, ...], Result] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Raises UsageError: a newer version of this program wrote the file."""
        self.earlier = read_cases(self.path)

    def load(self) -> None:
        self.results.update(self.earlier)

    def add(self, result: Result) -> None:
        before = self.results.get(result.key) or self.earlier.get(result.key)
        if before is not None:
            result.ran = merged(before.ran, result.ran)
        self.results[result.key] = result
        results = {"format": FORMAT, "results": [r.to_json() for r in self.results.values()]}
        write_file(self.path, json.dumps(results, indent=1, ensure_ascii=False) + "\n")

    def settled(self, case: Case) -> bool:
        """Whether the case has a verdict, of the code that is here."""
        found = self.results.get(case.key)
        return found is not None and found.verdict in _SETTLED and is_current(found)

    def plain_s(self, case: Case) -> float | None:
        """Time of a plain restart to its first effect, with this sink, guarantee and service; of this workload if
        known, else of the default one."""
        for workload in (case.workload, DEFAULT_WORKLOAD):
            key = (case.sink, case.guarantee.value, workload, "none", case.seed, case.service, case.source)
            found = self.results.get(key)
            if found is not None and found.plain_s is not None:
                return found.plain_s
        return None


def run_matrix(
    choice: Choice,
    store: Store,
    folder: Path,
    *,
    resume: bool = False,
    say: Say = lambda _: None,
    done: Callable[[Result, int, int], None] = lambda *_: None,
    env: dict[str, str] | None = None,
    template: Template | None = None,
    known: Mapping[tuple[Any, ...], Result] | None = None,
) -> list[Result]:
    """Run the chosen cases; return the results of this call.

    Args:
        resume: skip cases that have a verdict of this code in the store; else each earlier result is replaced as its
            case is run again.
        known: results that are published: cases that are not among them, or only of older code, run first.
        done: called after each case with its result, the number done, and the total.
        template: a user's pipeline that replaces the verifier's own; then one case at a time.
    """
    todo = cases(choice) if template is None else own_cases(choice, template)
    if choice.faults is not None:
        todo = [c for n in range(SEEDS_MAX) for c in cases(replace(choice, seed=choice.seed + n))]
    if resume:
        store.load()
        todo = [c for c in todo if not store.settled(c) or (template is not None and c.fault.name == "none")]
    if known is not None:
        todo.sort(key=lambda c: c.key in known and is_current(known[c.key]))
    if not can_mount():
        skipped = [c for c in todo if MOUNT in c.fault.needs]
        todo = [c for c in todo if MOUNT not in c.fault.needs]
        if skipped:
            say(f"{len(skipped)} cases need to mount a small disk, which only root may; they are skipped")
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in todo:
        waiting.put(case)
    lock, results = threading.Lock(), list[Result]()
    ends_at_s = None if choice.minutes is None else time.monotonic() + choice.minutes * 60

    def enough() -> bool:
        if choice.faults is not None and sum(r.fired for r in list(store.results.values())) >= choice.faults:
            return True
        return ends_at_s is not None and time.monotonic() >= ends_at_s

    def work(number: int) -> None:
        place, ahead = folder / f"environment{number}", choice.service == SPARK and not choice.fresh
        environment = Environment(place, say, dict(env or {}), template=template, ahead=ahead)
        try:
            while not enough():
                try:
                    case = waiting.get_nowait()
                except queue.Empty:
                    return
                environment.used.clear()
                if case.service in ENDS:
                    result, again = ends.run_case(case, environment), None
                else:
                    result = run_case(case, environment, plain_s=store.plain_s(case), audit=choice.audit)
                    again = _plain_now(case, result, environment)
                for ended in (result, *([again] if again is not None else [])):
                    ended.record(environment.used)
                with lock:
                    if again is not None:
                        store.add(again)
                    results.append(result)
                    store.add(result)
                    done(result, len(results), len(todo))
        finally:
            environment.close()

    threads = [
        threading.Thread(target=work, args=(n,), name=f"environment {n}")
        for n in range(choice.jobs if template is None else 1)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


def _plain_now(case: Case, result: Result, environment: Environment) -> Result | None:
    """Compare a seemingly slow restart after a kill with a plain restart of the same minutes: the known one may be from
    quieter times. Returns the undisturbed case that was run for this."""
    if result.recovery != Verdict.BROKEN.value or environment.template is not None:
        return None
    undisturbed = next(f for f in catalogue(case.guarantee, case.sink) if f.name == "none")
    workload = case.workload if "none" in WORKLOADS[case.workload].faults else DEFAULT_WORKLOAD
    plain = run_case(replace(case, fault=undisturbed, workload=workload), environment)
    if plain.verdict != Verdict.HELD.value or plain.plain_s is None:
        return None
    finding = compared(result.recovery_s, plain.plain_s)
    result.plain_s, result.recovery = plain.plain_s, finding.verdict.value
    result.findings = [finding.to_json() if f["checker"] == finding.checker else f for f in result.findings]
    return plain


def worst(results: Sequence[Result]) -> Verdict:
    """The worst verdict of many cases; UNKNOWN if there are none."""
    return Verdict.worst([Verdict(r.verdict) for r in results])


__all__ = ["ENGINE", "SINKS", "SPARK", "Choice", "Store", "cases", "run_matrix", "worst"]
