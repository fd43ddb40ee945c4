"""Crash points: what happens when a process reaches one.

`DELIVERED_CRASH` names them, separated by commas; `DELIVERED_CRASH_DIR` is a folder that all processes share:

    commit.apply:after#2@batch=3      the second time in one process that the step was done for a shard of batch 3
    write.prepare:after@shard=1!kill  the process that prepared shard 1 kills itself

`#n` counts per process the hits that satisfy the conditions after `@`. What follows `!` happens on the hit:

    halt   (default) write the hit, then block forever: an outside supervisor kills the process tree
    kill   write the hit, then SIGKILL this process
    raise  write the hit, then raise `Crashed`: Spark retries the task
    wait   write the hit, then block until a file with the hit's name and .released exists: an outside script injects a
           fault meanwhile

A point is hit once per folder across all processes and restarts, so that a restarted pipeline goes on.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

from delivered.model.errors import UsageError
from delivered.model.step import Moment, StepId, install

CRASH = "DELIVERED_CRASH"
CRASH_DIR = "DELIVERED_CRASH_DIR"
HIT_SUFFIX = ".hit.json"
RELEASED_SUFFIX = ".released"
_POLL_S = 0.02

_SPEC = re.compile(
    r"(?P<step>[a-z._]+):(?P<moment>[a-z]+)(?:#(?P<nth>[1-9][0-9]*))?"
    r"(?P<conditions>(?:@[a-z_]+=[A-Za-z0-9._-]+)*)(?:!(?P<action>[a-z]+))?"
)


class Crashed(Exception):
    """A crash point with `!raise` was hit."""


class CrashAction(StrEnum):
    HALT = "halt"
    KILL = "kill"
    RAISE = "raise"
    WAIT = "wait"


@dataclass(frozen=True)
class CrashPoint:
    """
    Attributes:
        nth: 1-based, counted per process.
        where: facts of the point, as text, that must match.
    """

    step: StepId
    moment: Moment
    nth: int = 1
    where: Mapping[str, str] = field(default_factory=dict)
    action: CrashAction = CrashAction.HALT

    @property
    def name(self) -> str:
        return f"{self.step}:{self.moment}"

    def __str__(self) -> str:
        nth = f"#{self.nth}" if self.nth > 1 else ""
        action = f"!{self.action}" if self.action is not CrashAction.HALT else ""
        return self.name + nth + "".join(f"@{k}={v}" for k, v in self.where.items()) + action

    def matches(self, point: str, facts: Mapping[str, Any]) -> bool:
        return point == self.name and all(k in facts and str(facts[k]) == v for k, v in self.where.items())


def parse(text: str) -> tuple[CrashPoint, ...]:
    """Parse `DELIVERED_CRASH`.

    Raises:
        UsageError: a part is malformed, or names a step, moment or action that does not exist.
    """
    return tuple(_parse_one(part.strip()) for part in text.split(",") if part.strip())


def _parse_one(text: str) -> CrashPoint:
    found = _SPEC.fullmatch(text)
    known = {
        "step": [s.value for s in StepId],
        "moment": [m.value for m in Moment],
        "action": [a.value for a in CrashAction],
    }
    if found is None:
        raise UsageError("CRASH_POINT.SYNTAX", text=text, known=", ".join(known["step"]))
    for part, values in known.items():
        value = found[part]
        if value is not None and value not in values:
            raise UsageError("CRASH_POINT.UNKNOWN", text=text, part=part, value=value, known=", ".join(values))
    conditions = [c.partition("=") for c in found["conditions"].split("@") if c]
    return CrashPoint(
        StepId(found["step"]),
        Moment(found["moment"]),
        int(found["nth"] or 1),
        {key: value for key, _, value in conditions},
        CrashAction(found["action"] or CrashAction.HALT),
    )


class Handler:
    """Called by `delivered.model.step.reach`. Thread-safe."""

    def __init__(self, points: tuple[CrashPoint, ...], folder: Path) -> None:
        self._points = points
        self._folder = folder
        self._seen = [0] * len(points)
        self._lock = threading.Lock()

    def __call__(self, point: str, facts: dict[str, Any]) -> None:
        for i, spec in enumerate(self._points):
            if not spec.matches(point, facts):
                continue
            with self._lock:
                self._seen[i] += 1
                due = self._seen[i] == spec.nth
            path = self._folder / f"{i:02d}-{spec.step}-{spec.moment}{HIT_SUFFIX}"
            if due and self._claim(path, spec, facts):
                _act(spec, path)

    def _claim(self, path: Path, spec: CrashPoint, facts: Mapping[str, Any]) -> bool:
        """Write the hit; False if another process already has. The file appears atomically."""
        hit = {"point": str(spec), "pid": os.getpid(), "facts": facts, "at_ms": time.time_ns() // 1_000_000}
        draft = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        draft.write_text(json.dumps(hit, default=str), encoding="utf-8")
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True


def _act(spec: CrashPoint, hit: Path) -> None:
    match spec.action:
        case CrashAction.WAIT:
            while not hit.with_suffix(RELEASED_SUFFIX).exists():
                time.sleep(_POLL_S)
        case CrashAction.HALT:
            _halt()
        case CrashAction.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
            _halt()
        case CrashAction.RAISE:
            raise Crashed(f"crash point {spec} was hit")


def _halt() -> NoReturn:
    while True:
        threading.Event().wait()


def install_from_environment() -> bool:
    """Arm the crash points of this process; False if the environment names none.

    Raises:
        UsageError: `DELIVERED_CRASH` is malformed, or `DELIVERED_CRASH_DIR` is not a folder.
    """
    points = parse(os.environ.get(CRASH, ""))
    if not points:
        return False
    folder = os.environ.get(CRASH_DIR, "")
    if not folder or not Path(folder).is_dir():
        raise UsageError("CRASH_DIR", folder=folder)
    install(Handler(points, Path(folder)))
    return True
