"""A disk that is full, a folder that may not be written, limits of files and memory, a clock that jumps: the run ends
with a clear error or goes on, and the next one, in order again, has lost and doubled nothing."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.crash.killed import RECORDS
from tests.support.embedded_pipeline import TABLE
from tests.support.scans import scanned
from tests.support.sweeps import sweep

from delivered.pipeline.registry import find_sink

ROOT = Path(__file__).parents[2]
GUARANTEE = "exactly_once"
OUR_ERROR, NO_ERROR = 3, 0
IDS = {f"id-{i}" for i in range(RECORDS)}
FORMATS = ("sqlite", "files", "delta", "iceberg")
ONE_OF_THEM = sweep(FORMATS, lambda name: name == "sqlite")


class Place:
    """A pipeline's folder on a small disk of its own, if this user may mount one."""

    def __init__(self, folder: Path, log: Path, system: str) -> None:
        self.folder, self._log, self.system = folder, log, system
        self._runs = 0

    @property
    def options(self) -> dict[str, str]:
        at = self.folder / "sink"
        return {
            "sqlite": {"path": f"{at}.db", "table": TABLE},
            "iceberg": {"table": f"shop.{TABLE}", "warehouse": str(at), "ifNotExists": "true"},
        }.get(self.system, {"path": str(at)})

    def run(self, prefix: tuple[str, ...] = (), **limits: Any) -> tuple[int, str]:
        """Exit code and errors of a run."""
        self._runs += 1
        (self.folder.parent / "checkpoint").mkdir(exist_ok=True)
        sink = {"database": self.options["path"]} if self.system == "sqlite" else {self.system: self.options}
        given = {
            "log": str(self._log), **sink, "checkpoint": str(self.folder.parent / "checkpoint"),
            "guarantee": GUARANTEE, "owner": f"o{self._runs}", "limits": limits,
        }  # fmt: skip
        done = subprocess.run(
            [*prefix, sys.executable, "-m", "tests.support.limited", json.dumps(given)],
            capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
        )  # fmt: skip
        return done.returncode, done.stderr

    def rows(self) -> Counter[str]:
        sink = find_sink(self.system, self.options)
        return Counter(id_ for batch in scanned(sink) for id_ in batch.column("id").to_pylist())


@pytest.fixture
def place(tmp_path: Path, log: Path) -> Callable[[str], Place]:
    (tmp_path / "disk").mkdir()
    return lambda system: Place(tmp_path / "disk", log, system)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], bool]]:
    """`mount("size=1m")`: the folder is a disk of its own; again, its options change. False: not permitted."""
    libc, target = ctypes.CDLL(None, use_errno=True), str(tmp_path / "disk").encode()
    mounted = list[bool]()

    def made(options: str) -> bool:
        flags = 32 if mounted else 0  # MS_REMOUNT
        flags |= 1 if options.startswith("ro") else 0
        if libc.mount(b"none", target, b"tmpfs", flags, options.removeprefix("ro,").encode()) != 0:
            return False
        mounted.append(True)
        return True

    yield made
    if mounted:
        libc.umount2(target, 2)  # MNT_DETACH


def is_clear(code: int, error: str, *words: str) -> bool:
    """Our error, on one line, that names what is missing."""
    line = next((x for x in error.splitlines() if x.startswith("[DELIVERED_")), "")
    return code == OUR_ERROR and any(w in line.lower() for w in words) and " Next: " in line


@pytest.mark.parametrize("system", ONE_OF_THEM)
def test_a_full_disk(system: str, place: Callable[[str], Place], mount: Callable[[str], bool]) -> None:
    made, refused = place(system), 0
    for kilobytes in (16, 32, 64, 128, 256, 512, 1 << 16):  # each time it gets a little further
        limited = mount(f"size={kilobytes}k")
        code, error = made.run() if limited else made.run(file_bytes=kilobytes << 10)
        if code == NO_ERROR:
            break
        assert is_clear(code, error, "space", "full", "large"), error[-2_000:]
        refused += 1
    assert refused
    assert made.run()[0] == NO_ERROR
    assert made.rows() == Counter(IDS)


@pytest.mark.matrix
@pytest.mark.parametrize("system", FORMATS)
def test_a_disk_that_becomes_read_only(
    system: str, place: Callable[[str], Place], mount: Callable[[str], bool]
) -> None:
    made = place(system)
    if not mount("size=64m"):
        pytest.skip("this user may not mount a disk")
    assert mount("ro,size=64m")
    code, error = made.run()
    assert is_clear(code, error, "read-only", "readonly", "not permitted", "denied"), error[-2_000:]
    assert mount("size=64m")
    assert made.run()[0] == NO_ERROR
    assert made.rows() == Counter(IDS)


@pytest.mark.matrix
@pytest.mark.parametrize("system", FORMATS)
def test_a_folder_without_permission(system: str, place: Callable[[str], Place]) -> None:
    made = place(system)
    drop: tuple[str, ...] = ()
    if os.geteuid() == 0:
        if (setpriv := shutil.which("setpriv")) is None:
            pytest.skip("root may write everywhere")
        without = "-dac_override,-dac_read_search,-fowner"
        drop = (setpriv, f"--bounding-set={without}", f"--inh-caps={without}")
    made.folder.chmod(0o500)
    code, error = made.run(drop)
    assert is_clear(code, error, "permission", "denied", "read-only", "readonly", "unable to open"), error[-2_000:]
    made.folder.chmod(0o700)
    assert made.run()[0] == NO_ERROR
    assert made.rows() == Counter(IDS)


@pytest.mark.matrix
@pytest.mark.parametrize("system", FORMATS)
def test_too_many_open_files(system: str, place: Callable[[str], Place]) -> None:
    made = place(system)
    code, error = made.run(open_files=8)
    assert code != NO_ERROR
    assert any(w in error.lower() for w in ("too many open files", "unable to open")), error[-2_000:]
    assert made.run()[0] == NO_ERROR
    assert made.rows() == Counter(IDS)


@pytest.mark.matrix
@pytest.mark.parametrize("system", FORMATS)
def test_out_of_memory(system: str, place: Callable[[str], Place]) -> None:
    """However it ends: by an error, or killed by the allocator; delta-rs may wait for a thread that it could not start,
    until it is killed."""
    made = place(system)
    for memory_bytes in (1 << 16, 1 << 22, 1 << 24):
        with suppress(subprocess.TimeoutExpired):
            made.run(memory_bytes=memory_bytes)
    assert made.run()[0] == NO_ERROR
    assert made.rows() == Counter(IDS)


@pytest.mark.parametrize("system", ONE_OF_THEM)
def test_a_clock_that_jumps_an_hour_back_and_forth(system: str, place: Callable[[str], Place]) -> None:
    made = place(system)
    code, error = made.run(clock_s=[0, 3_600, -3_600, 0, -7_200])
    assert code == NO_ERROR, error[-2_000:]
    assert made.rows() == Counter(IDS)
