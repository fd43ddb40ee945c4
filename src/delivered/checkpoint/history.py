"""What a pipeline's batches took and its audits found, one line each next to its checkpoint, on a local disk only.

For metrics and pages, never evidence: lines are not synced, and a batch that a later start finished has none.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pyarrow import fs

from delivered.checkpoint.folder import open_folder
from delivered.model.work import BatchReport

log = logging.getLogger(__name__)

FILE = "delivered/batches.jsonl"
AUDITS = "delivered/audits.jsonl"
BYTES_MAX = 1 << 20
"""Of a file; then it becomes `<file>.1`, in place of the one before. About 4,000 batches each."""


@dataclass(frozen=True)
class Totals:
    """Since the checkpoint's first batch with a line.

    Attributes:
        rewritten: shards.
        seconds: by step.
        bytes: of the rows written, in memory.
    """

    batches: int = 0
    rewritten: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes: int = 0

    def after(self, report: BatchReport) -> Totals:
        seconds = Counter(self.seconds) + Counter(report.seconds)
        return Totals(
            self.batches + 1,
            self.rewritten + report.rewritten,
            {step: round(s, 4) for step, s in seconds.items()},
            self.bytes + report.bytes,
        )


def add(location: str, report: BatchReport) -> None:
    """Append a batch. Never raises: a full disk must not stop a batch that is already visible."""
    try:
        if location not in _totals:
            _totals[location] = totals(location)
        _totals[location] = now = _totals[location].after(report)
        _append(location, FILE, {**report.to_json(), "totals": now.__dict__})
    except Exception as error:
        log.debug("batch %d: its report was not kept: %s", report.batch, error)


def batches(location: str, newest: int = 1000) -> list[BatchReport]:
    """The newest reports, oldest first."""
    return [BatchReport.from_json(line) for line in _lines(location, FILE, newest)]


def totals(location: str) -> Totals:
    """Since the first batch with a line, also of batches whose lines are no longer kept."""
    last = next(iter(_lines(location, FILE, 1)), None)
    return Totals(**last["totals"]) if last is not None else Totals()


def add_audit(location: str, report: Mapping[str, Any]) -> None:
    """Append an audit, as `audits` returns it. Never raises."""
    try:
        _append(location, AUDITS, report)
    except Exception as error:
        log.debug("the audit was not kept: %s", error)


def audits(location: str, newest: int = 100) -> list[dict[str, Any]]:
    """The newest audits, oldest first: sink, at_ms, seconds, verdict, breaches, unknowns, counts; keys."""
    return _lines(location, AUDITS, newest)


def last_audits(location: str) -> dict[str, dict[str, Any]]:
    """The last audit of each sink. One that held and compared a share of the keys says nothing of the others."""
    found: dict[str, dict[str, Any]] = {}
    for audit in audits(location):
        if "keys" not in audit:
            found[audit["sink"]] = audit
        elif audit["verdict"] != "held":  # it is not sealed: what was stands
            before = found.get(audit["sink"], {})
            found[audit["sink"]] = audit | {k: v for k, v in before.items() if k == "seal"}
    return found


def _append(location: str, name: str, line: Mapping[str, Any]) -> None:
    path = _path(location, name)
    if path is None:
        return
    path.parent.mkdir(exist_ok=True)
    if path.is_file() and path.stat().st_size > BYTES_MAX:
        path.replace(_older(path))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _lines(location: str, name: str, newest: int) -> list[dict[str, Any]]:
    path = _path(location, name)
    files = () if path is None else (path, _older(path))
    return [*islice(chain.from_iterable(map(_newest_first, files)), newest)][::-1]


def _newest_first(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return
    for line in reversed(text.splitlines()):
        try:
            yield json.loads(line)
        except ValueError:  # a crash tore it
            continue


def _path(location: str, name: str) -> Path | None:
    filesystem, folder = open_folder(location)
    return Path(folder) / name if isinstance(filesystem, fs.LocalFileSystem) else None


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


_totals: dict[str, Totals] = {}
"""By location, of the checkpoints whose batches this process commits."""
