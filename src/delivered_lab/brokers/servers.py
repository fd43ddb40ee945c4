"""Servers: fetched into the user's cache, started, found again and stopped; their ports, state and certificates.

They come from Maven Central with pyspark's Ivy, or from Debian's packages, of which nothing is installed. Each file
from Maven must have the SHA-256 that `hashes.txt` holds: by the registry's own checksums, a file that was replaced
there is right. Processes are identified by id and start time, so that no other process is touched; the state of a
server is in its data folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import json
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

import psutil

from delivered import DeliveredError, MissingExtra
from delivered.machine import cache_folder, java_home
from delivered_lab.supervisor import start_with_us, wait_dead

PORTS_LOW, PORTS_HIGH = 20_000, 32_000
"""Below Linux's ephemeral ports: while a server is down, no outgoing connection can take its port."""

STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Identity:
    """Identity of a process: ids are reused, an id with its start time is not.

    Attributes:
        started: seconds since 1970, from the system.
    """

    pid: int
    started: float

    def find(self) -> psutil.Process | None:
        """The process, if it is still running."""
        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.started) > 1.0 or process.status() == psutil.STATUS_ZOMBIE:
                return None
        except psutil.NoSuchProcess:
            return None
        return process


def launch(command: Sequence[str], log: Path, dies_with_parent: bool) -> Identity:
    """Start a program in a session of its own, with its output appended to `log`."""
    with log.open("ab") as out:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        if dies_with_parent:
            process = start_with_us(command, **streams)
        else:
            process = subprocess.Popen(command, start_new_session=True, **streams)
    return Identity(process.pid, psutil.Process(process.pid).create_time())


def end(identity: Identity, kill: bool = False, ask: signal.Signals = signal.SIGTERM) -> bool:
    """Terminate a process, and kill it if it does not end or if `kill`. Returns whether it was running.

    `kill` includes its child processes, as in a crash of the machine.
    """
    process = identity.find()
    if process is not None:
        with suppress(psutil.NoSuchProcess):
            below = process.children(recursive=True) if kill else []
            process.send_signal(signal.SIGKILL if kill else ask)
            for child in below:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            try:
                process.wait(STOP_TIMEOUT_S)
            except psutil.TimeoutExpired:
                process.kill()
                process.wait(STOP_TIMEOUT_S)
            wait_dead(below, STOP_TIMEOUT_S)
    with suppress(ChildProcessError):  # if it is our child, it is a zombie until it is waited for
        os.waitpid(identity.pid, os.WNOHANG)
    return process is not None


def telling_lines(output: str) -> str:
    """The end of a program's output on one line, without Java stack frames."""
    lines = [x.strip() for x in output.splitlines() if x.strip() and not x.startswith(("\tat ", "\t..."))]
    return " | ".join(lines[-6:])[-900:] or "nothing"


def free_ports(count: int) -> list[int]:
    """Free ports of 127.0.0.1."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(PORTS_LOW, PORTS_HIGH)  # noqa: S311
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                if port not in found:
                    found.append(port)
    return found


@dataclass(frozen=True)
class State:
    """A server's state in its data folder.

    Attributes:
        listeners: security protocol -> "127.0.0.1:port"; the first one has no TLS and no passwords.
        identity: the last process, running or not; None: never started.
    """

    kind: str
    listeners: dict[str, str]
    settings: dict[str, Any]
    identity: Identity | None = None

    @property
    def main(self) -> str:
        """Address of the listener without TLS and passwords."""
        return next(iter(self.listeners.values()))

    def save(self, folder: Path) -> None:
        fresh = folder / f".state.{os.getpid()}"
        write_private(fresh, json.dumps(asdict(self), indent=1))  # settings may contain secrets
        fresh.replace(folder / "state.json")

    @classmethod
    def load(cls, folder: Path) -> State | None:
        """None: no server was ever started in this folder."""
        try:
            data = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        identity = Identity(**data["identity"]) if data["identity"] else None
        return cls(data["kind"], data["listeners"], data["settings"], identity)


@dataclass(frozen=True)
class Server:
    """What a kind of server needs.

    Attributes:
        listeners: settings -> names of its listeners, one port each; the first one has no TLS and no passwords.
        prepare: fetches it if missing, writes configuration and storage; returns the command to run. Raises
            DeliveredError: it is not available here, or the download failed.
        answers: whether the server accepts requests.
        fetch: downloads it into the cache; None: part of the package or the system.
        hidden: listeners that are not for clients.
        url: of clients, with `{}` for the address.
        version: of the server, once it is fetched.
        takes: which of tls and scram it supports.
        stop: signal that stops it, even with open connections.
        pipeline: a source or sink of a pipeline file, with `{url}`, and `{HTTP}` for a listener's address.
        first_steps: purpose and command to run after the start, `{url}` likewise.
    """

    listeners: Callable[[Mapping[str, Any]], list[str]]
    prepare: Callable[[Path, State, Say], list[str]]
    answers: Callable[[State], bool]
    fetch: Callable[[Say], object] | None
    url: str
    pipeline: str
    version: Callable[[], str]
    hidden: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset()
    stop: signal.Signals = signal.SIGTERM
    first_steps: tuple[tuple[str, str], ...] = ()


@contextmanager
def connected(address: str, timeout_s: float = 2.0) -> Iterator[socket.socket]:
    """A connection for a question to a server that may not answer yet."""
    host, port = split_address(address)
    with socket.create_connection((host, int(port)), timeout_s) as peer:
        peer.settimeout(timeout_s)
        yield peer


def split_address(address: str) -> tuple[str, str]:
    """Host and port."""
    host, _, port = address.rpartition(":")
    return host, port


def java_command(heap_mb: int, jars: Path | None, *options: str) -> list[str]:
    """Java with the JARs of a folder; the main class and its arguments follow."""
    common = (f"-Xmx{heap_mb}m", "-Djava.net.preferIPv4Stack=true", *options)
    return [str(java_home() / "bin" / "java"), *common, *(() if jars is None else ("-cp", str(jars / "*")))]


def open_packages(*packages: str) -> list[str]:
    """Java's own packages that a server's libraries reach into."""
    return [f"--add-opens={package}=ALL-UNNAMED" for package in packages]


def log_level() -> str:
    return os.environ.get("DELIVERED_BROKER_LOG", "warn")


def as_lines(settings: Mapping[str, object], sign: str = "=") -> str:
    return "".join(f"{name}{sign}{value}\n" for name, value in settings.items())


def run_tool(command: Sequence[str], failed: str, folder: Path, **options: Any) -> str:
    """The output of a program that prepares a server.

    Args:
        failed: code and condition of its failure.
        folder: that it writes to.

    Raises:
        DeliveredError: it failed. The message ends with its output.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)
    if done.returncode != 0:
        raise DeliveredError(failed, folder=folder, output=telling_lines(done.stdout + done.stderr))
    return str(done.stdout + done.stderr)


def version_line(command: Sequence[str]) -> str:
    """What a program prints with --version."""
    return subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout


def make_certificate(java_home: Path, folder: Path) -> tuple[Path, str]:
    """A self-signed certificate for 127.0.0.1 and localhost, valid for ten years; created once per folder, by Java's
    keytool. Clients trust the PEM file ca.pem in the folder.

    Returns:
        The server's key store (PKCS12), and its password.
    """
    store, trusted, file = folder / "server.p12", folder / "ca.pem", folder / "keystore.password"
    if not file.is_file():
        write_private(file, secrets.token_hex(16))
    password = file.read_text(encoding="utf-8")
    if trusted.is_file():
        return store, password
    same = ["-alias", "server", "-keystore", str(store), "-storetype", "PKCS12", "-storepass", password]
    names = ["-dname", "CN=localhost", "-ext", "SAN=dns:localhost,ip:127.0.0.1", "-ext", "BC:critical=ca:true"]
    for arguments in (
        ["-genkeypair", *same, "-keyalg", "RSA", "-keysize", "2048", "-validity", "3650", *names],
        ["-exportcert", *same, "-rfc", "-file", str(trusted)],
    ):
        run_tool([str(java_home / "bin" / "keytool"), *arguments], "CERTIFICATE_FAILED", store)
    return store, password


def write_private(file: Path, text: str) -> None:
    """Write a file that only this user may read."""
    file.touch(mode=0o600)
    file.write_text(text, encoding="utf-8")


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
    suite: str | None = None,
) -> Path:
    """The folder with the files of Debian's packages, fetched once.

    Args:
        system: its name, for messages.
        root: the folder.
        size: of the download, for messages.
        fix: called with the folder of the unpacked files, and with their final place.
        suite: of Debian, instead of the one installed here: packages come with all that they depend on.

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
        _download(system, packages, work, suite)
        unpacked = work / "root"
        for package in sorted(work.glob("**/*.deb")):
            _run_debian(system, ["dpkg-deb", "-x", str(package), str(unpacked)], work)
        if fix is not None:
            fix(unpacked, root)
        (unpacked / ".ready").touch()
        with suppress(OSError):  # another process has fetched the same
            unpacked.rename(root)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return root


_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


def _download(system: str, packages: Sequence[str], work: Path, suite: str | None) -> None:
    """Packages as files in `work`; of another suite, from the mirror that this machine uses for its own."""
    if suite is None:
        _run_debian(system, ["apt-get", "download", "-q", *packages], work)
        return
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Label: Debian", "Origin: Debian"]
    failed, output = _run(command, work)
    if failed or not output.strip():
        raise DeliveredError("DOWNLOAD_FAILED.APT", command=" ".join(command), system=system, output=output[-600:])
    mirror = output.split()[0]
    for folder in ("lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True)
    (work / "suite.list").write_text(f"deb [signed-by={_KEYS}] {mirror} {suite} main\n", encoding="utf-8")
    settings = {
        "Dir::Etc::sourcelist": work / "suite.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": work / "lists",
        "Dir::State::status": "/dev/null",  # as if nothing were installed: every library comes along
        "Dir::Cache": work / "cache",
        "APT::Sandbox::User": pwd.getpwuid(os.geteuid()).pw_name,
        "APT::Install-Recommends": "false",
        "Debug::NoLocking": "true",
    }
    (work / "apt.conf").write_text(as_lines({k: f'"{v}";' for k, v in settings.items()}, " "), encoding="utf-8")
    run = partial(_run_debian, system, folder=work, variables={"APT_CONFIG": str(work / "apt.conf")})
    run(command=["apt-get", "update", "-q"])
    run(command=["apt-get", "install", "-q", "--yes", "--download-only", *packages])


def _run_debian(system: str, command: list[str], folder: Path, variables: Mapping[str, str] | None = None) -> None:
    failed, output = _run(command, folder, variables)
    if failed:
        raise DeliveredError("DOWNLOAD_FAILED.APT", command=command[0], system=system, output=output.strip()[-600:])


def _run(command: list[str], folder: Path, variables: Mapping[str, str] | None = None) -> tuple[bool, str]:
    """Whether a command failed, and its output."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C", **(variables or {})},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True, f"not finished after {FETCH_TIMEOUT_S:.0f} s"
    return done.returncode != 0, done.stdout + done.stderr


def _found() -> dict[str, Server]:
    names = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))
    modules = [importlib.import_module(f"{__package__}.{name}") for name in names]
    servers = {m.__name__.rpartition(".")[2]: m.SERVER for m in modules if hasattr(m, "SERVER")}
    return dict(sorted({"mariadb": importlib.import_module(f"{__package__}.mysql").MARIADB, **servers}.items()))


SERVERS: Mapping[str, Server] = _found()
"""By kind; collected from this folder's modules."""
