"""Runs of `delivered verify`, each kept as it was: a file of results, a page, and a page that lists them all.

runs/<when>.json    rewritten after every case, so that a killed run is listed too
runs/<when>.html    the run's own page with its timelines, self-contained
index.html          every run of the folder, newest first
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from delivered import html
from delivered.model.errors import UsageError
from delivered_lab.verify.case import Result
from delivered_lab.verify.judge import Verdict
from delivered_lab.verify.matrix import FORMAT, read_results, versions, write_file
from delivered_lab.verify.report import write_report

_log = logging.getLogger(__name__)
RUNS, INDEX = "runs", "index.html"


@dataclass
class Run:
    """
    Attributes:
        name: of its files: start time and process.
        asked: what was requested, as on the command line.
        ended: None: still running, or killed.
    """

    name: str
    asked: str
    began: str
    ended: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **vars(self), "results": [r.to_json() for r in self.results]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Run:
        known = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
        return cls(**{**known, "results": [Result.from_json(r) for r in data["results"]]})

    @property
    def verdict(self) -> Verdict:
        return Verdict.worst([Verdict(r.verdict) for r in self.results])

    @property
    def seconds(self) -> float | None:
        if self.ended is None:
            return None
        return (datetime.fromisoformat(self.ended) - datetime.fromisoformat(self.began)).total_seconds()


class RunLog:
    """The current run."""

    def __init__(self, folder: Path, asked: str) -> None:
        self._folder = folder
        now = datetime.now(UTC)
        name = f"{now:%Y%m%dT%H%M%SZ}-{os.getpid()}"
        self.run = Run(name, asked, now.isoformat(timespec="seconds"), versions=versions())

    def add(self, result: Result) -> None:
        """Add a result. The file is replaced atomically."""
        self.run.results.append(result)
        self._save()

    def end(self) -> Path | None:
        """Write the run's page and the list of all runs. Returns the list; None: no case ran.

        Raises:
            MissingExtra: the pages need the extra `report`.
        """
        if not self.run.results:
            return None
        self.run.ended = datetime.now(UTC).isoformat(timespec="seconds")
        self._save()
        write_report(self.run.results, self._folder / RUNS / f"{self.run.name}.html")
        return write_index(self._folder)

    def _save(self) -> None:
        path = self._folder / RUNS / f"{self.run.name}.json"
        write_file(path, json.dumps(self.run.to_json(), ensure_ascii=False))


def load_runs(folder: Path) -> list[Run]:
    """Newest first. Files that are not runs, or have a newer format, are skipped."""
    found = []
    for path in (folder / RUNS).glob("*.json"):
        try:
            found.append(Run.from_json(read_results(path)))
        except (ValueError, KeyError, TypeError):
            continue
        except UsageError as error:
            _log.warning("%s", error)
    return sorted(found, key=lambda r: r.name, reverse=True)


def write_index(folder: Path) -> Path:
    """The page that lists the runs of a folder.

    Raises:
        MissingExtra: it needs the extra `report`.
    """
    path = folder / INDEX
    path.write_text(index(load_runs(folder), folder), encoding="utf-8")
    return path


def index(runs: Sequence[Run], folder: Path) -> str:
    """The whole file."""
    return html.page(
        "delivered verify: runs",
        _TEMPLATE,
        runs=runs,
        pages={r.name for r in runs if (folder / RUNS / f"{r.name}.html").exists()},
        counts=lambda r: {v.value: sum(x.verdict == v.value for x in r.results) for v in Verdict},
        services=lambda r: ", ".join(sorted({x.service for x in r.results})),
        lost=lambda r: sum(x.lost for x in r.results if x.guarantee != "at_most_once"),
        duplicated=lambda r: sum(x.duplicated for x in r.results if x.guarantee != "at_least_once"),
        total=sum(len(r.results) for r in runs),
        fired=sum(x.fired for r in runs for x in r.results),
    )


_TEMPLATE = """<p class="made">runs: {{ runs | length }}, cases: {{ total }}, faults injected: {{ fired }}</p>
<div class="scroll"><table>
<tr><th>began</th><th>asked</th><th>run by</th><th>verdict</th><th>cases</th><th>faults</th>
<th>lost, duplicated<small>where none may be</small></th><th>back within 2x<small>of a plain restart</small></th>
<th>took</th></tr>
{% for r in runs %}<tr>
<td class="square">{% if r.name in pages %}<a href="runs/{{ r.name }}.html">{{ r.began[:16] | replace("T", " ") }}</a>
{%- else %}{{ r.began[:16] | replace("T", " ") }}{% endif %}</td>
<td class="asked" title="{{ r.asked }}"><code>{{ r.asked | truncate(120) }}</code></td><td>{{ services(r) }}</td>
<td class="square"><b class="{{ r.verdict.value }}">{{ signs[r.verdict.value] }} {{ r.verdict.value }}</b>
{%- if r.ended is none %}<small>did not end</small>{% endif %}</td>
<td>{{ r.results | length }}<small>{% for v, n in counts(r).items() if n %}{{ n }} {{ v }}
{%- if not loop.last %}, {% endif %}{% endfor %}</small></td>
<td>{{ r.results | sum(attribute="fired") }}</td><td>{{ lost(r) }}, {{ duplicated(r) }}</td>
{% set measured = r.results | selectattr("recovery", "in", ["held", "broken"]) | list %}
<td class="square">{% if measured %}{{ measured | selectattr("recovery", "equalto", "held") | list | length }} of {{
measured | length }}<small>cases with kills</small>{% else %}<small>not measured</small>{% endif %}</td>
<td class="square">{% if r.seconds is not none %}{{ (r.seconds / 60) | round(1) }} min{% else %}-{% endif %}</td>
</tr>
{% endfor %}</table></div>
"""
