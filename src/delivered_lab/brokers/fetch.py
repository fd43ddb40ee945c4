"""Fetches servers into the user's cache folder: from Maven Central with pyspark's Ivy, or from Debian's packages, of
which nothing is installed.

Each file from Maven must have the SHA-256 that `hashes.txt` holds: by the registry's own checksums, a file that was
replaced there is right.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from xml.sax.saxutils import quoteattr

from delivered import DeliveredError, MissingExtra
from delivered.machine import cache_folder, java_home

FETCH_TIMEOUT_S = 900.0
HASHES = Path(__file__).with_name("hashes.txt")
Say = Callable[[str], None]


def fetch_jars(name: str, artifacts: Sequence[tuple[str, str, str]], say: Say, transitive: bool = True) -> Path:
    """The folder with the JARs of `artifacts` and their runtime dependencies; fetched once.

    Args:
        name: of the folder, with the version: "kafka/4.3.0".
        artifacts: Maven's (group, artifact, version).
        transitive: False: without dependencies.

    Raises:
        DeliveredError: the download failed; the message ends with Ivy's output.
        MissingExtra: pyspark, which includes Ivy, is not installed.
    """
    needs = "".join(
        f"<dependency org={quoteattr(g)} name={quoteattr(a)} rev={quoteattr(v)} conf='default'"
        f" transitive='{str(transitive).lower()}'/>"
        for g, a, v in artifacts
    )

    def fetch(work: Path) -> Path:
        _run_ivy(name, needs, ("jar", "bundle"), work, poms=True)  # some JARs are OSGi bundles
        check_hashes(name, work / "lib")
        return work / "lib"

    return _once(name, "lib", "", fetch, say)


def fetch_archive(
    name: str,
    artifact: tuple[str, str, str],
    folders: Sequence[str] | None,
    size: str,
    say: Say,
    classifier: str = "bin",
) -> Path:
    """The folder with `folders` of an artifact that is a .tar.gz; fetched once.

    Args:
        name, artifact: as for `fetch_jars`.
        folders: of the archive, below its top folder; others are skipped. None: it has no top folder, and all is kept.
        size: of the download, for messages.

    Raises:
        DeliveredError, MissingExtra: as `fetch_jars`.
    """
    group, module, version = artifact
    need = (
        f"<dependency org={quoteattr(group)} name={quoteattr(module)} rev={quoteattr(version)} conf='default'"
        f" transitive='false'><artifact name={quoteattr(module)} type='tar.gz' ext='tar.gz'"
        f" m:classifier={quoteattr(classifier)}/></dependency>"
    )

    def fetch(work: Path) -> Path:
        _run_ivy(name, need, ("tar.gz",), work, poms=False)
        check_hashes(name, work / "lib")
        unpacked = work / "unpacked"
        (packed,) = (work / "lib").glob("*.tar.gz")
        with tarfile.open(packed) as archive:
            for member in archive:
                inside = member.name.removeprefix("./")
                if folders is not None:
                    inside = inside.partition("/")[2]
                if folders is None or inside.startswith(tuple(f"{f}/" for f in folders)):
                    member.name = inside
                    archive.extract(member, unpacked, filter="data")
        return unpacked

    return _once(name, "server", f" ({size})", fetch, say)


def check_hashes(name: str, folder: Path) -> None:
    """Raises DeliveredError: a file of this download has not the hash that we know, or no hash is known."""
    lines = HASHES.read_text(encoding="utf-8").splitlines()
    known = {path: digest for digest, _, path in (line.partition(" ") for line in lines)}
    for file in sorted(folder.iterdir()):
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        expected = known.get(f"{name}/{file.name}")
        if found != expected:
            raise DeliveredError(
                "DOWNLOAD_CHANGED", file=file.name, name=name, actual=found, expected=expected or "no such file"
            )


def _once(name: str, what: str, size: str, fetch: Callable[[Path], Path], say: Say) -> Path:
    """The folder that `fetch` created, now or earlier; created atomically."""
    home = cache_folder() / name
    ready = home / what
    if ready.is_dir():
        return ready
    home.mkdir(parents=True, exist_ok=True)
    with _lock(home / ".lock"):
        if ready.is_dir():  # another process fetched it while this one waited
            return ready
        say(f"fetching {name} from Maven Central, once{size}, into {home}")
        work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=home))
        try:
            fetch(work).rename(ready)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return ready


def _run_ivy(name: str, needs: str, types: Sequence[str], work: Path, poms: bool) -> None:
    """Download `needs`, in Ivy's notation of dependencies, into `work`/lib.

    Args:
        poms: read the artifacts' descriptors; False: they may be unavailable.
    """
    settings, module = work / "settings.xml", work / "ivy.xml"
    settings.write_text(
        '<ivysettings><settings defaultResolver="central"/>'
        f"<caches defaultCacheDir={quoteattr(str(work / 'cache'))}/>"
        '<resolvers><ibiblio name="central" m2compatible="true"'
        f' usepoms="{str(poms).lower()}"/></resolvers></ivysettings>\n',
        encoding="utf-8",
    )
    module.write_text(
        '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">'
        '<info organisation="delivered" module="server"/>'
        '<configurations><conf name="default"/></configurations>'
        f"<dependencies>{needs}</dependencies></ivy-module>\n",
        encoding="utf-8",
    )
    pattern = str(work / "lib" / "[artifact]-[revision](-[classifier]).[ext]")
    command = [
        str(java_home() / "bin" / "java"),
        "-XX:TieredStopAtLevel=1",
        "-cp",
        str(_spark_jars() / "*"),
        "org.apache.ivy.Main",
    ]
    command += ["-settings", str(settings), "-ivy", str(module), "-confs", "default"]
    command += ["-retrieve", pattern, "-types", *types]
    failed, output = _run(command, work)
    # Ivy exits with 0 even if an artifact was not found.
    if failed or "UNRESOLVED DEPENDENCIES" in output or not list(work.glob("lib/*.*")):
        lines = [x.strip() for x in output.splitlines() if x.strip(" \t:")]
        bad = [x for x in lines if any(w in x.lower() for w in ("not found", "error", "unresolved", "exception"))]
        raise DeliveredError("DOWNLOAD_FAILED.MAVEN", name=name, output=" | ".join((bad or lines)[-4:])[:600])


def _spark_jars() -> Path:
    # Only locate pyspark: importing it takes seconds.
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise MissingExtra("spark")
    jars = Path(spec.origin).parent / "jars"
    if not list(jars.glob("ivy-*.jar")):
        raise DeliveredError("IVY_MISSING", parent=jars.parent)
    return jars


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch_packages(
    system: str,
    root: Path,
    packages: Sequence[str],
    size: str,
    say: Say,
    fix: Callable[[Path, Path], None] | None = None,
) -> Path:
    """The folder with the files of Debian's packages, fetched once.

    Args:
        system: its name, for messages.
        root: the folder.
        size: of the download, for messages.
        fix: called with the folder of the unpacked files, and with their final place.

    Raises:
        DeliveredError: no Debian system, or the download failed.
    """
    if (root / ".ready").exists():
        return root
    if None in [shutil.which(p) for p in ("apt-get", "dpkg-deb")]:
        raise DeliveredError("RABBITMQ_MISSING" if system == "RabbitMQ" else "MARIADB_MISSING", system=system)
    root.parent.mkdir(parents=True, exist_ok=True)
    say(f"fetching {system} from Debian's packages, once ({size})")
    work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=root.parent))
    try:
        _run_debian(system, ["apt-get", "download", "-q", *packages], work)
        unpacked = work / "root"
        for package in sorted(work.glob("*.deb")):
            _run_debian(system, ["dpkg-deb", "-x", str(package), str(unpacked)], work)
        if fix is not None:
            fix(unpacked, root)
        (unpacked / ".ready").touch()
        with suppress(OSError):  # another process has fetched the same
            unpacked.rename(root)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return root


def _run_debian(system: str, command: list[str], folder: Path) -> None:
    failed, output = _run(command, folder)
    if failed:
        raise DeliveredError("DOWNLOAD_FAILED.APT", command=command[0], system=system, output=output.strip()[-600:])


def _run(command: list[str], folder: Path) -> tuple[bool, str]:
    """Whether a command failed, and its output."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True, f"not finished after {FETCH_TIMEOUT_S:.0f} s"
    return done.returncode != 0, done.stdout + done.stderr
