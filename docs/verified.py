"""Results of the verifier, as tables for docs. `python -m docs.verified build/verify.json` stores a run.

A cell shows the last stored result, or that it is unproven. Nothing here is written by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from delivered.model.capability import Guarantee
from delivered_lab.verify.case import AHEAD, Result
from delivered_lab.verify.ends import SYSTEMS, cases
from delivered_lab.verify.faults import LOOP, PAIRS, PLACES, catalogue
from delivered_lab.verify.judge import RECOVERY_RATIO_MAX, Verdict
from delivered_lab.verify.matrix import FORMAT, SINKS, is_current, read_results, write_file
from delivered_lab.verify.provenance import environment_id, merged
from delivered_lab.verify.services import ENDS, ENGINE, SERVICES, SPARK
from delivered_lab.verify.systems import SINK_KINDS, SOURCE_KINDS
from delivered_lab.verify.workloads import WORKLOADS

STORED = Path(__file__).parent / "verified.json"
_BY_KEY = ("missing", "extra", "different")
_KEPT = (
    "sink", "guarantee", "workload", "fault", "seed", "verdict", "lost", "duplicated", "fired", "final_read",
    "service", "source", "place", "parts", "plain_s", "recovery_s", "start", "ran", "on", "stored",
    *_BY_KEY,
)  # fmt: skip
_RECOVERY = ("plain_s", "recovery_s")
_KEY = ("sink", "guarantee", "workload", "fault", "seed", "service", "source")
_PLACES = [p for p in PLACES if p != "none"]
UNPROVEN, REFUSED, OLDER = "unproven", "refused", "°"
SOAK = "soak-"
NOTHING = "-"
"""Of a failure point where no fault applies to a sink."""


def load() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _stored()["results"]
    return found


def _stored() -> dict[str, Any]:
    return read_results(STORED) if STORED.exists() else {"results": []}


def store(paths: Sequence[Path]) -> None:
    """Keep the results of these files, over what was stored before of the same cases, whose runs stay on record."""

    def key(result: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(result.get(k, "") for k in _KEY)  # what names no source is of the one that the sink has

    stored = _stored()
    found, versions = {key(r): r for r in stored["results"]}, stored.get("versions", {})
    for path in paths:
        for r in read_results(path)["results"]:
            if r["workload"] != "own":
                workload = WORKLOADS.get(r["workload"])  # of both ends it is none
                kept = _KEPT if workload is not None and workload.oracle is not None else _KEPT[: -len(_BY_KEY)]
                used = r.get("versions", {})
                versions[environment_id(used)] = used
                measured = found.get(key(r), {}) if r.get("start") == AHEAD else {}
                r = {
                    **r,
                    **{k: measured[k] for k in _RECOVERY if k in measured},
                    "ran": merged(found.get(key(r), {}).get("ran", []), r.get("ran", [])),
                    "on": environment_id(used),
                }
                found[key(r)] = {k: r[k] for k in kept if r.get(k, "") not in ("", {}, [])}
    used_now = {r.get("on") for r in found.values()}
    lines = ",\n".join(json.dumps(found[k]) for k in sorted(found))
    header = json.dumps({"format": FORMAT, "versions": {i: v for i, v in versions.items() if v and i in used_now}})
    write_file(STORED, f'{header[:-1]}, "results": [\n{lines}\n]}}\n')


def is_older(result: dict[str, Any]) -> bool:
    """Whether the code that the cell ran has changed since, or is not on record."""
    return not is_current(Result.from_json(result))


def runs(results: Sequence[dict[str, Any]]) -> list[str]:
    """How old the cells are, how often they ran and broke, and with which versions."""
    known = [r for r in results if r.get("ran")]
    times = sum(len(r["ran"]) for r in known)
    broke = [r for r in known if any(run[-1] == Verdict.BROKEN.value for run in r["ran"])]
    older = sum(map(is_older, results))
    stored = sorted(tuple(r["stored"]) for r in results if r.get("stored"))
    return [
        f"- Of {len(results):,} cells, {len(results) - older:,} ran on the code as it is. {older:,} are older",
        f"  ({OLDER}): engine, ledger, a kit or a connector has changed since.",
        *_stored_by(stored),
        f"- {times:,} runs are on record. Cells that broke in one of them: {len(broke):,}."
        + (f" Broken once, held since: {'; '.join(_name(r) for r in broke)}." if broke else ""),
        f"- In {sum(r.get('start') == AHEAD for r in results):,} cells of `spark` the last run was by",
        "  [drivers that were started ahead](verify.md#drivers-that-are-started-ahead); in the others every start was",
        "  a process of its own.",
        "- `verified.json` holds the time, commit, code and verdict of every run of a cell, and versions of the last;",
        "  `delivered verify --only SINK/GUARANTEE/WORKLOAD/FAULT --service SERVICE --seed SEED` repeats it.",
    ]


def _stored_by(stored: Sequence[tuple[str, str]]) -> list[str]:
    """
    Args:
        stored: day and commit by which a cell's figures came into the file, of those that ran before each run was
            recorded. Found in the history of the file.
    """
    if not stored:
        return []
    return [
        f"- For {len(stored):,} of them, stored by {len(set(stored))} commits from {stored[0][0]} to {stored[-1][0]},",
        "  `stored` names the commit that stored them. They ran on it, or shortly before it.",
    ]


def _name(result: dict[str, Any]) -> str:
    return "/".join(result[k] for k in ("sink", "guarantee", "workload", "fault"))


def environments(results: Sequence[dict[str, Any]]) -> list[str]:
    """Versions of the last runs: packages that all share, and a row for each combination of the others and servers."""
    known = {
        name: {package: version for package, version in found.items() if version != "not installed"}
        for name, found in _stored().get("versions", {}).items()
    }
    if not known:
        return []
    shared = dict(set.intersection(*(set(found.items()) for found in known.values())))
    texts = {name: {n: v for n, v in found.items() if n not in shared} for name, found in known.items()}
    first = next(iter(known.values()))
    lines = [
        f"Versions in all of them: {', '.join(f'{n} {v}' for n, v in first.items() if n in shared)}.",
        "",
        "| cells | last runs | besides |",
        "|---:|---|---|",
    ]
    for name, others in texts.items():
        cells = [r for r in results if r.get("on") == name]
        days = sorted({r["ran"][-1][0][:10] for r in cells})
        text = ", ".join(f"{n} {v}" for n, v in others.items())
        lines.append(f"| {len(cells)} | {' to '.join(dict.fromkeys([days[0], days[-1]]))} | {text} |")
    return lines


def matrix_results(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those of a soak, of a source that was asked for and of both ends, which have tables of their own."""
    found = [r for r in results if not r["fault"].startswith(SOAK) and not r.get("source")]
    return [r for r in found if r["service"] not in ENDS]


def both_ends(results: Sequence[dict[str, Any]]) -> list[str]:
    """Systems of both ends against failure points; in brackets the faults that were injected."""
    places = sorted({c.fault.place for s in ENDS for c in cases(s, 1)} - {"none"})
    lines = ["| service | system | undisturbed | " + " | ".join(places) + " |", "|---" * (3 + len(places)) + "|"]
    for service in ENDS:
        there = {(c.sink, c.fault.place) for c in cases(service, 1)}
        for system in SYSTEMS[service]:
            row = [r for r in results if (r["service"], r["sink"]) == (service, system)]
            cells = [cell(at(row, p)) if (system, p) in there else NOTHING for p in ("none", *places)]
            lines.append(f"| {service} | {system} | " + " | ".join(cells) + " |")
    return lines


def source_results(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of sources that were asked for, under exactly_once."""
    return [r for r in results if r.get("source") and r["guarantee"] == Guarantee.EXACTLY_ONCE]


def sources(results: Sequence[dict[str, Any]]) -> list[str]:
    """Sink and service against sources; in brackets the faults that were injected."""
    asked = [s for s in SOURCE_KINDS if any(r["source"] == s for r in results)]
    sinks = [s for s in SINKS if any(r["sink"] == s for r in results)]
    if not asked:
        return [UNPROVEN.capitalize() + "."]
    return _by_service("sink", sinks, asked, "source", results)


def upserts(results: Sequence[dict[str, Any]]) -> list[str]:
    """Sinks that write by key against failure points."""
    places = [p for p in _PLACES if any(r["place"] == p for r in results)]  # nothing is done to their producer
    return _by_service("sink", [s for s in SINKS if SINK_KINDS[s].upserts], places, "place", results)


def operators(results: Sequence[dict[str, Any]]) -> list[str]:
    """Workloads with an oracle, and sinks that they are run with, against failure points; and keys that differ."""
    lines = ["| workload, sink | none | " + " | ".join(_PLACES) + " | keys |", "|---" * (3 + len(_PLACES)) + "|"]
    for workload in (w for w in WORKLOADS.values() if w.oracle is not None):
        for sink in SINKS:
            row = [r for r in results if (r["workload"], r["sink"]) == (workload.name, sink)]
            if not row and sink not in workload.sinks:
                continue
            cells = [cell(at(row, p)) for p in ("none", *_PLACES)]
            sums = ", ".join(str(sum(int(r[k]) for r in row)) for k in _BY_KEY) if row else NOTHING
            lines.append(f"| {workload.name}, {sink} | " + " | ".join(cells) + f" | {sums} |")
    return lines


def _by_service(
    left: str, names: Sequence[str], tops: Sequence[str], top: str, results: Sequence[dict[str, Any]]
) -> list[str]:
    """Lines for each name and service that has results, with a cell for each of `tops`.

    Args:
        left, top: what stands in the lines and in the columns, as results call it.
    """
    lines = [f"| {left} | run by | " + " | ".join(tops) + " |", "|---" * (2 + len(tops)) + "|"]
    for name in names:
        for service in SERVICES:
            row = [r for r in results if (r[left], r["service"]) == (name, service)]
            if row:
                cells = [cell([r for r in row if r[top] == t]) for t in tops]
                lines.append(f"| {name} | {service} | " + " | ".join(cells) + " |")
    return lines


def at(results: Sequence[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    """Results of one failure point, with the faults that fired there."""
    parts = [(r, r.get("parts") or {r["place"]: r["fired"]}) for r in results]
    return [{**r, "fired": of[place]} for r, of in parts if place in of]


def cell(results: Sequence[dict[str, Any]]) -> str:
    """Of one failure point: the worst verdict, and how many faults it rests on: those of the code as it is, and older
    ones."""
    if not results:
        return UNPROVEN
    verdict = Verdict.worst([Verdict(r["verdict"]) for r in results])
    if verdict not in (Verdict.HELD, Verdict.BROKEN):
        return UNPROVEN
    older = [r for r in results if is_older(r)]
    before = sum(int(r["fired"]) for r in older)
    now = sum(int(r["fired"]) for r in results) - before
    counts = [f"{now}"] if now else []
    counts += [f"{before}{OLDER}"] if before else []
    return f"{verdict.value} ({' + '.join(counts or ['0' + OLDER * (len(older) == len(results))])})"


def matrix(results: Sequence[dict[str, Any]]) -> list[str]:
    """A table for each guarantee and service: sinks against failure points; in brackets the faults injected."""
    lines = []
    for guarantee in reversed(Guarantee):
        for service in SERVICES:
            lines += [f"### `{guarantee}`, run by {service}", "", "| sink | " + " | ".join(_PLACES) + " |"]
            lines.append("|---" * (1 + len(_PLACES)) + "|")
            for sink in (s for s in SINKS if guarantee in SINK_KINDS[s].guarantees):
                row = [r for r in results if (r["sink"], r["guarantee"], r["service"]) == (sink, guarantee, service)]
                absent = SINK_KINDS[sink].absent
                cells = [NOTHING if p in absent else cell(at(row, p)) for p in _PLACES]
                lines.append(f"| {sink} | " + " | ".join(cells) + " |")
            lines.append("")
    return lines[:-1]


def _absences() -> list[str]:
    """Why no fault applies, with the sinks of which it is so."""
    found: dict[tuple[str, str], list[str]] = {}
    for sink in SINK_KINDS.values():
        for place, why in sink.absent.items():
            found.setdefault((place, why), []).append(sink.name)
    return [f"- {place} of {', '.join(sinks)}: {why}" for (place, why), sinks in found.items()]


def recovery(results: Sequence[dict[str, Any]]) -> list[str]:
    """How soon the first new record was visible after a SIGKILL of the driver, against a plain restart."""
    lines = [
        "| sink | guarantee | run by | cases | slower than 2x | worst | plain restart in that case |",
        "|---" * 7 + "|",
    ]
    for sink in SINKS:
        for guarantee in reversed(Guarantee):
            for service in SERVICES:
                pairs = [
                    (float(r["plain_s"]), max(r["recovery_s"]))
                    for r in results
                    if (r["sink"], r["guarantee"], r["service"]) == (sink, guarantee, service)
                    and r.get("plain_s")
                    and r.get("recovery_s")
                ]
                if not pairs:
                    continue
                plain, worst = max(pairs, key=lambda p: p[1] / p[0])
                slow = sum(b > RECOVERY_RATIO_MAX * a for a, b in pairs)
                lines.append(
                    f"| {sink} | `{guarantee}` | {service} | {len(pairs)} | {slow} | {worst:.1f} s | {plain:.1f} s |"
                )
    return lines if len(lines) > 2 else [UNPROVEN.capitalize() + "."]


def soak(results: Sequence[dict[str, Any]]) -> list[str]:
    """Per sink and guarantee: faults in cases that hold nothing but faults, one after the other."""
    found = [r for r in results if r["fault"].startswith(SOAK)]
    if not found:
        return [UNPROVEN.capitalize() + "."]
    lines = [
        f"{sum(int(r['fired']) for r in found)} faults in {len(found)} cases, by `make soak`. Lost and duplicated are",
        "the counts found, whether the guarantee allows them or not.",
        "",
        "| sink | guarantee | run by | seeds | cases | faults | lost | duplicated | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for sink in SINKS:
        for guarantee in reversed(Guarantee):
            for service in SERVICES:
                group = [r for r in found if (r["sink"], r["guarantee"], r["service"]) == (sink, guarantee, service)]
                if group:
                    seeds = ", ".join(str(s) for s in sorted({r["seed"] for r in group}))
                    sums = " | ".join(str(sum(int(r[k]) for r in group)) for k in ("fired", "lost", "duplicated"))
                    worst = Verdict.worst([Verdict(r["verdict"]) for r in group])
                    lines.append(
                        f"| {sink} | `{guarantee}` | {service} | {seeds} | {len(group)} | {sums} | {worst.value} |"
                    )
    return lines


def summary(results: Sequence[dict[str, Any]]) -> list[str]:
    """One line per sink and service: what was shown of each guarantee."""
    lines = ["| sink | run by | " + " | ".join(f"`{g}`" for g in reversed(Guarantee)) + " |", "|---|---|---|---|---|"]
    for sink in SINKS:
        for service in SERVICES:
            cells = []
            for guarantee in reversed(Guarantee):
                found = [r for r in results if (r["sink"], r["guarantee"], r["service"]) == (sink, guarantee, service)]
                points = [p for p in _PLACES if cell(at(found, p)) != UNPROVEN]
                text = cell(found) if any(r["fired"] for r in found) else UNPROVEN
                of = len(_PLACES) - len(SINK_KINDS[sink].absent)
                if guarantee not in SINK_KINDS[sink].guarantees:
                    text = _without(sink)
                cells.append(text if not points else f"{text}, {len(points)} of {of} failure points")
            lines.append(f"| {sink} | {service} | " + " | ".join(cells) + " |")
    return lines


def _without(sink: str) -> str:
    """What stands where a sink of the verifier has no cells of a guarantee."""
    other = sink.partition("-")[0]  # of the same connector, by another mechanism
    return f"as {other}" if other != sink and other in SINK_KINDS else REFUSED


def pairs(results: Sequence[dict[str, Any]]) -> list[str]:
    """Sinks against the faults that hit two parts at a time, whatever the guarantee."""
    lines = ["| sink | service | " + " | ".join(PAIRS) + " |", "|---" * (2 + len(PAIRS)) + "|"]
    for sink, kind in SINK_KINDS.items():
        known = {f.name: f for g in kind.guarantees for f in catalogue(g, sink)}
        for service in (SPARK, ENGINE):
            cells = []
            for name in PAIRS:
                fault = known.get(name)
                unfit = fault is None or (service == SPARK and LOOP in fault.needs)
                row = [r for r in results if (r["sink"], r["service"], r["fault"]) == (sink, service, name)]
                cells.append(NOTHING if unfit else cell(row))
            lines.append(f"| {sink} | {service} | " + " | ".join(cells) + " |")
    return lines


def page() -> str:
    everything = load()
    results = matrix_results(everything)
    fired = sum(int(r["fired"]) for r in results)
    places = [f"| {p} | {text} |" for p, text in PLACES.items() if p != "none"]
    return "\n".join(
        [
            "# Verification results",
            "",
            "This page shows which guarantees held, sink by sink, when a process, a server or the network failed on",
            "purpose, in the stored runs of [`delivered verify`](verify.md). Look here before you rely on a",
            "combination.",
            "",
            "Each cell shows the worst verdict at that failure point and, in brackets, the number of faults injected:",
            f"those of the code as it is, then those of older code ({OLDER}).",
            "*Unproven*: not run, invalid or unknown. `spark` is the product as users run it; `engine` runs the same",
            "connectors and commit engine in a loop that replaces Spark, and says nothing about Spark.",
            "`-`: no fault applies:",
            "",
            *_absences(),
            "",
            "`kafka` is the connector with its default client, Arrow; `kafka-librdkafka` is its fall-back.",
            "`mysql` and `mysql-xa` are MySQL itself, `mariadb` and `mariadb-xa` MariaDB.",
            "",
            f"{len(results):,} cases, {fired:,} faults.",
            "",
            *runs(everything),
            "",
            *environments(everything),
            "",
            *summary(results),
            "",
            "## By failure point",
            "",
            *matrix(results),
            "",
            "## Two parts at a time",
            "",
            "Faults that [hit two parts at once](verify.md#two-parts-at-a-time), the worst verdict of each.",
            "",
            *pairs(results),
            "",
            "## Every source with every sink",
            "",
            *_between(source_results(everything)),
            "",
            "## Both ends",
            "",
            "`delivered verify --service producer` kills applications that write business rows and an",
            "[outbox](outbox.md), the relay that sends the messages on, and the database, which also fails over,",
            "with the slot and without. `--service consumer` kills consumers with an [inbox](inbox.md), which get",
            "every second message twice, and workers of [sagas](saga.md), at every call of every step and",
            "compensation, and every question.",
            "Each business row and its message, and each effect, must be there once; each saga must be at rest, and",
            "the effects as it ended. F7: a transaction that commits late, two consumers at once, a paused worker,",
            "three workers at once.",
            "",
            *both_ends(everything),
            "",
            "## Upserts",
            "",
            "`exactly_once`: those of the cases above whose workload is `changes`. Rows replace those with the same",
            "key, without a version. A key that goes back, or lags behind the others of its batch, breaks a case.",
            "",
            *upserts([r for r in results if WORKLOADS[r["workload"]].replaces]),
            "",
            "## Operators",
            "",
            "`exactly_once`: queries that keep state ([workloads](verify.md#workloads)). What must be in the",
            "sink is recomputed in plain Python from what the source holds, and compared by key. The last column",
            "counts keys that are missing, extra or different.",
            "",
            *operators([r for r in results if WORKLOADS[r["workload"]].oracle is not None]),
            "",
            "## Recovery time",
            "",
            "From the restart after a SIGKILL of the driver until a reader sees the first new record. Measured where",
            "every start is a process of its own; a later run by drivers that were started ahead keeps the figure.",
            "",
            *recovery(results),
            "",
            "## Soak test",
            "",
            *soak(everything),
            "",
            "## Failure points",
            "",
            "| failure point | fault |",
            "|---|---|",
            *places,
            "",
        ]
    )


def _between(results: Sequence[dict[str, Any]]) -> list[str]:
    lost, duplicated = (sum(int(r[k]) for r in results) for k in ("lost", "duplicated"))
    return [
        "`exactly_once`, by `delivered verify --source NAME`. Killed are the producer, the source's server, the driver",
        "and a task; for queues (rabbitmq, activemq, rocketmq) also the receiver, at each of its steps, at random, and",
        "together with the driver. Every acknowledged message must be in the sink exactly once, by its id.",
        "",
        f"{len(results)} cases, {sum(int(r['fired']) for r in results)} faults; {lost} lost, {duplicated} duplicated.",
        "",
        *sources(results),
    ]


if __name__ == "__main__":
    store([Path(a) for a in sys.argv[1:]])
