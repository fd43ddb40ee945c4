"""Which pipelines to look at: files, folders of them, and ledgers.

A file with `ledger: {format: postgres, url: ..., dbtable: ...}` names a ledger, in the options of a sink to it: the
status of each of its pipelines, without their files, is what their decisions and owners say.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from delivered.engine.context import open_ledger
from delivered.model.errors import DeliveredError, UsageError
from delivered.model.identity import Scope
from delivered.model.patience import within
from delivered.model.secrets import shown
from delivered.operate.page import Flow, flow_of
from delivered.operate.state import Problem, SinkStatus, Status
from delivered.operate.status import ASK_S_MAX, from_ledger, status
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint, as_text
from delivered.pipeline.file import load_yaml
from delivered.pipeline.spec import NO_INCARNATION

_PIPELINES_AT_ONCE = 8
_PIPELINE, _LEDGER = "pipeline", "ledger"
_NOBODY = "-"


def files(paths: Iterable[Path]) -> list[Path]:
    """The pipeline files of these files and folders, in order. A folder's other YAML files are passed over.

    Raises:
        UsageError: there are none.
    """
    pipelines = [f for path in paths for f in (_pipelines_in(path) if path.is_dir() else [path])]
    if not pipelines:
        raise UsageError("NO_PIPELINES", paths=", ".join(map(str, paths)), key=_PIPELINE)
    return pipelines


def look(paths: Sequence[Path]) -> list[Status]:
    """The status of every pipeline, asked at the same time, and of those of ledgers. A file that cannot be read is a
    problem of its status."""
    ledgers = [path for path in paths if _holds(path, _LEDGER)]
    pipelines = look_with_flow([path for path in paths if path not in ledgers])
    return [s for s, _ in pipelines] + [s for path in ledgers for s in _look_at_ledger(path)]


def look_with_flow(paths: Sequence[Path]) -> list[tuple[Status, Flow]]:
    """As `look` at pipeline files, with how the data of each pipeline travels: for the page."""

    def one(path: Path) -> tuple[Status, Flow]:
        try:
            pipeline = Definition.from_file(path)
            return _with_its_name(path, status(pipeline)), flow_of(pipeline)
        except DeliveredError as error:
            return _failed(path, error), Flow()

    with ThreadPoolExecutor(_PIPELINES_AT_ONCE) as pool:
        return list(pool.map(one, paths))


def _look_at_ledger(path: Path) -> list[Status]:
    """Every pipeline and sink in a ledger, each with its newest decision of any checkpoint."""
    try:
        options = load_yaml(path.read_text(encoding="utf-8"))[_LEDGER]
        if not isinstance(options, Mapping) or "format" not in options:
            raise UsageError("LEDGER_FILE", file=path, key=_LEDGER, value=shown(options))
        endpoint = Endpoint(options["format"], {k: as_text(k, v) for k, v in options.items() if k != "format"})
        sink = endpoint.sink()
        with within(ASK_S_MAX):
            with contextlib.closing(open_ledger(sink, Scope(_NOBODY, _NOBODY, NO_INCARNATION))) as ledger:
                others = ledger.others()
            return [_status_of(sink, endpoint.system, o.pipeline, o.sink) for o in sorted(others, key=str)]
    except DeliveredError as error:
        return [_failed(path, error)]


def _status_of(sink: Any, system: str, pipeline: str, name: str) -> Status:
    with contextlib.closing(open_ledger(sink, Scope(pipeline, name, NO_INCARNATION))) as ledger:
        state = ledger.look()
    last = state.last or next(iter(state.earlier), None)
    guarantee = last.guarantee.value if last is not None else ""
    return Status(pipeline, guarantee, "", **from_ledger(state, last, [SinkStatus(name, system, 0, 0)]))


def _failed(path: Path, error: DeliveredError) -> Status:
    return Status(path.stem, "", "", problems=(Problem(error.code, error.message, error.next_step),))


def _with_its_name(path: Path, answer: Status) -> Status:
    """With commands that run as they are."""
    named = [
        (p, p.next_step.replace("PIPELINE.yaml", shlex.quote(str(path))) if p.next_step else None)
        for p in answer.problems
    ]
    return replace(answer, problems=tuple(replace(p, next_step=step) for p, step in named))


def _pipelines_in(folder: Path) -> list[Path]:
    return [f for f in sorted(folder.iterdir()) if f.suffix in (".yaml", ".yml") and _holds(f, _PIPELINE)]


def _holds(file: Path, key: str) -> bool:
    try:
        data = load_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return False
    except (yaml.YAMLError, UsageError):
        return key == _PIPELINE  # its fault is reported
    return isinstance(data, dict) and key in data and (key == _PIPELINE or _PIPELINE not in data)
