"""Which pipelines to look at: files, and folders of them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import yaml

from delivered.model.errors import DeliveredError, UsageError
from delivered.operate import ledgers as ledgers_of
from delivered.operate.page import Way, way_of
from delivered.operate.state import Problem, Status
from delivered.operate.status import status
from delivered.pipeline.definition import Definition
from delivered.pipeline.file import load_yaml

T = TypeVar("T")

_AT_ONCE = 8
_KEY = "pipeline"


def files(paths: Iterable[Path]) -> list[Path]:
    """The pipeline files of these files and folders, in order. A folder's other YAML files are passed over.

    Raises:
        UsageError: there are none.
    """
    found = [f for path in paths for f in (_below(path) if path.is_dir() else [path])]
    if not found:
        raise UsageError(
            "NO_PIPELINES",
            f"No pipeline file is in {', '.join(map(str, paths))}: a .yaml file with the key {_KEY!r}.",
            next_step="name the files or their folder, or write one: delivered init",
        )
    return found


def look(paths: Sequence[Path]) -> list[Status]:
    """The status of every pipeline, asked at the same time, and of those of ledgers. A file that cannot be read is a
    problem of its status."""
    ledgers = [path for path in paths if _holds(path, ledgers_of.KEY)]
    pipelines = [path for path in paths if path not in ledgers]
    found = [found for found, _ in _asked(pipelines, lambda _: None)]
    return found + [s for path in ledgers for s in _in_ledger(path)]


def _in_ledger(path: Path) -> list[Status]:
    try:
        return ledgers_of.statuses(path)
    except DeliveredError as error:
        return [_failed(path, error)]


def seen(paths: Sequence[Path]) -> list[tuple[Status, Way]]:
    """As `look`, with how the data of each pipeline travels: for the page."""
    return [(found, way or Way()) for found, way in _asked(paths, way_of)]


def _asked(paths: Sequence[Path], more: Callable[[Definition], T]) -> list[tuple[Status, T | None]]:
    def one(path: Path) -> tuple[Status, T | None]:
        try:
            pipeline = Definition.from_file(path)
            return _naming(path, status(pipeline)), more(pipeline)
        except DeliveredError as error:
            return _failed(path, error), None

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(one, paths))


def _failed(path: Path, error: DeliveredError) -> Status:
    return Status(path.stem, "", "", problems=(Problem(error.code, error.message, error.next_step),))


def _naming(path: Path, found: Status) -> Status:
    """With commands that run as they are."""

    def named(text: str | None) -> str | None:
        return text.replace("PIPELINE.yaml", shlex.quote(str(path))) if text is not None else None

    return replace(found, problems=tuple(replace(p, next_step=named(p.next_step)) for p in found.problems))


def _below(folder: Path) -> list[Path]:
    return [f for f in sorted(folder.iterdir()) if f.suffix in (".yaml", ".yml") and _holds(f, _KEY)]


def _holds(file: Path, key: str) -> bool:
    try:
        data = load_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return False
    except (yaml.YAMLError, UsageError):
        return key == _KEY  # its fault is told
    return isinstance(data, dict) and key in data and (key == _KEY or _KEY not in data)
