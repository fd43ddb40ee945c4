"""Starts, stops, pauses and kills a pipeline and its receivers, as a user runs them; and a cluster, if a fault needs
one."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from delivered import DeliveredError, MissingExtra
from delivered.crash import CRASH, CRASH_DIR
from delivered.machine import java_home
from delivered_lab.supervisor import Hit, hits, kill_tree, release, start_with_us
from delivered_lab.verify.evidence import End, History, Stop
from delivered_lab.verify.systems.base import QueueSource, wait_for
from delivered_lab.verify.workloads import Workload

_POLL_S = 0.02
AUDIT_TIMEOUT_S = 240.0
_LOG_TIMEOUT_S = _STOP_TIMEOUT_S = _CLUSTER_TIMEOUT_S = 60.0
_STARTS_MAX = 40
_HOSTS = ("127.0.0.2", "127.0.0.3")
_DEPLOY = "org.apache.spark.deploy"
DRIVER, RECEIVER = "driver", "receiver"
_CODE = re.compile(r"\[DELIVERED_([A-Z0-9_]+)\]")
DELIVERED = (sys.executable, "-m", "delivered.cli.main")
"""`delivered` as on the command line, but with the interpreter's path."""

LOOP_MODULE = "delivered_lab.verify.loop"
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
"""A short-lived JVM starts faster without its second compiler."""


class Process(Protocol):
    """What is asked of a `subprocess.Popen`, and of what stands for one."""

    returncode: Any

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired: it did not end in time."""

    def terminate(self) -> None: ...


class Runs(Protocol):
    """A driver that takes commands of `delivered`."""

    def ask(self, arguments: Sequence[str], environment: Mapping[str, str], output: Path, errors: Path) -> Process: ...


@dataclass
class Run:
    """One start of `delivered run` or `delivered receive`, in a session of its own.

    Attributes:
        number: 1 for the first of a case.
        output: file with its output.
        after_kill: started because the previous run was killed.
        ahead: its driver had been started before.
        role: for display.
    """

    number: int
    process: Process
    crash_folder: Path
    output: Path
    started_s: float = 0.0
    after_kill: bool = False
    ahead: bool = False
    role: str = DRIVER
    _known: set[Path] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def wait_hit(self, timeout_s: float) -> tuple[Path, Hit] | None:
        """The next crash point reached; None: the run ended before.

        Raises:
            TimeoutError: neither happened in time. The run goes on.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            lives = self.lives
            for path, hit in hits(self.crash_folder):
                if path not in self._known:
                    self._known.add(path)
                    return path, hit
            if not lives:
                return None
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} reached no crash point within {timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def wait_end(self, timeout_s: float) -> int:
        """Its exit code. Raises TimeoutError: it did not end in time. It goes on."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name} did not end within {timeout_s:.0f} s") from None

    @property
    def code(self) -> str | None:
        """None: it succeeded. Else the code of its last error, "?" if it named none."""
        if self.process.poll() == 0:
            return None
        found = _CODE.findall(self.output.read_text(encoding="utf-8", errors="replace"))
        return found[-1] if found else "?"

    def go_on(self, hit: Path) -> None:
        """Release it from a crash point at which it waits."""
        release(hit)

    def stop(self, timeout_s: float) -> int:
        """SIGTERM: a graceful stop. Returns its exit code. Raises TimeoutError: it did not end in time. It goes on."""
        self.process.terminate()
        return self.wait_end(timeout_s)

    def kill(self) -> int:
        """SIGKILL the driver, its JVM and its workers; return the number of processes. May be called again."""
        killed = kill_tree(self.process) if self.lives else 0
        self.process.wait()
        return killed

    def pause(self) -> int:
        """SIGSTOP all of the tree; return the number of processes."""
        return self._signal(signal.SIGSTOP)

    def resume(self) -> int:
        return self._signal(signal.SIGCONT)

    def wait_stopped(self) -> None:
        """Wait until it has stopped itself. Raises RuntimeError if it ended instead."""
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self.process.returncode = os.waitstatus_to_exitcode(status)
            raise RuntimeError(f"{self.name} ended with {self.process.returncode}: {last_words(self)}")

    def kill_one(self, pid: int) -> bool:
        """SIGKILL one process of the tree; False if it has ended or is not in this tree."""
        for p in self._tree():
            if p.pid == pid:
                p.kill()
                psutil.wait_procs([p], timeout=10)
                return True
        return False

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _signal(self, number: signal.Signals) -> int:
        count = 0
        for p in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                p.send_signal(number)
                count += 1
        return count


def start(
    role: str,
    number: int,
    folder: Path,
    command: list[str],
    crash: str = "",
    env: Mapping[str, str] | None = None,
    driver: Runs | None = None,
) -> Run:
    """Start a driver or a receiver.

    Args:
        folder: of the case; receives the run's output and crash points.
        crash: crash points, as in DELIVERED_CRASH.
        driver: that takes the command; None: a process of its own.
    """
    name = f"{'run' if role == DRIVER else role}{number}"
    crash_folder, output = folder / f"{name}.hits", folder / f"{name}.log"
    crash_folder.mkdir(exist_ok=True)
    points = {CRASH: crash, CRASH_DIR: str(crash_folder)} if crash else {}
    if driver is not None:
        running = driver.ask(command[len(DELIVERED) :], {**(env or {}), **points}, output, output)
        return Run(number, running, crash_folder, output, ahead=True, role=role)
    with output.open("wb") as out:
        process = start_with_us(
            command, env=variables(env) | points, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
    return Run(number, process, crash_folder, output, role=role)


def variables(env: Mapping[str, str] | None) -> dict[str, str]:
    """Of a process of the product, without crash points."""
    found = {**os.environ, "JDK_JAVA_OPTIONS": QUICK_JAVA, "PYTHONUNBUFFERED": "1", **(env or {})}
    found.pop(CRASH, None)
    return found


def skewed(env: Mapping[str, str], seconds: int, read: Path) -> dict[str, str]:
    """Variables of a pipeline whose Python processes read a clock that is so far ahead.

    Args:
        read: a file that appears once the commit engine has read it.
    """
    path = env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return {
        **env,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "skew"), *([path] if path else [])]),
        "DELIVERED_VERIFY_CLOCK_S": str(seconds),
        "DELIVERED_VERIFY_CLOCK_READ": str(read),
    }


def _asked(command: list[str], log: Path, env: Mapping[str, str] | None) -> dict[str, Any]:
    """The JSON output of a product command. Raises VerifierError: it printed none."""
    with log.open("wb") as errors:
        done = subprocess.run(
            command,
            env=variables(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            timeout=AUDIT_TIMEOUT_S,
            check=False,
        )
    return _report(done.stdout, " ".join(command[1:4]), done.returncode, log)


def _report(output: bytes, command: str, exit_code: int, log: Path) -> dict[str, Any]:
    """Raises VerifierError: the output is none."""
    try:
        report: dict[str, Any] | list[dict[str, Any]] = json.loads(output)
    except ValueError:
        end = log.read_text(encoding="utf-8", errors="replace")[-500:]
        raise VerifierError("AUDIT_FAILED", command=command, exit_code=exit_code, output=end) from None
    return report if isinstance(report, dict) else _combined(report)


def _combined(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The account of several sinks, as of one whose rows are all of theirs."""
    verdicts = {r["verdict"] for r in reports}
    counts: Counter[str] = Counter()
    for report in reports:
        counts.update(report["counts"])
    return {"verdict": next(v for v in ("broken", "unknown", "held") if v in verdicts), "counts": dict(counts)}


def _spark_command(pipeline: Path, spark_log: Path) -> list[str]:
    return [*DELIVERED, "run", str(pipeline), "--spark-log", str(spark_log)]


def _spark_audit(
    pipeline: Path, folder: Path, env: Mapping[str, str] | None, driver: Runs | None = None
) -> dict[str, Any]:
    command = [*DELIVERED, "audit", str(pipeline), "--output", "json"]
    command += ["--spark-log", str(folder / "audit.spark.log")]
    log, output = folder / "audit.log", folder / "audit.json"
    if driver is None:
        return _asked(command, log, env)
    task = driver.ask(command[len(DELIVERED) :], env or {}, output, log)
    code = task.wait(AUDIT_TIMEOUT_S)
    return _report(output.read_bytes(), "audit", code, log)


def _engine_command(pipeline: Path, _: Path | None = None) -> list[str]:
    return [sys.executable, "-m", LOOP_MODULE, str(pipeline)]


def _engine_accounts(
    pipeline: Path, folder: Path, env: Mapping[str, str] | None, _: Runs | None = None
) -> dict[str, Any]:
    """Without Spark there is no audit job, but the ledger still has the count of given-up records."""
    counts = _asked([*_engine_command(pipeline), "--accounts"], folder / "audit.log", env)
    return {"verdict": None, "counts": counts}


@dataclass(frozen=True)
class Service:
    """What runs a pipeline.

    Attributes:
        command: (pipeline file, file for Spark's log) -> what to start.
        audit: (pipeline file, the case's folder, env, a driver that takes it) -> the product's own account.
        sql: whether it can run a transform in SQL or over DataFrames.
    """

    name: str
    command: Callable[[Path, Path], list[str]]
    audit: Callable[[Path, Path, Mapping[str, str] | None, Runs | None], dict[str, Any]]
    sql: bool

    def can_run(self, workload: Workload) -> bool:
        return self.sql or not workload.needs_spark


SPARK, ENGINE = "spark", "engine"
PRODUCER, CONSUMER = "producer", "consumer"
ENDS = (PRODUCER, CONSUMER)
"""What is killed is no pipeline, but what is before or behind one: `verify.ends`."""
SERVICES = {
    SPARK: Service(SPARK, _spark_command, _spark_audit, sql=True),
    ENGINE: Service(ENGINE, _engine_command, _engine_accounts, sql=False),
}
"""`spark`: the product as a user runs it. `engine`: the same connectors and commit engine in a small loop that stands
in for Spark, a hundred times cheaper to kill and restart; its verdicts say nothing about Spark."""


def last_words(run: Run) -> str:
    """The end of a run's output, for errors of the judge."""
    lines = [x for x in run.output.read_text(encoding="utf-8", errors="replace").splitlines() if x.strip()]
    return " | ".join(lines[-5:])[-800:]


class VerifierError(DeliveredError):
    """The verifier itself could not go on; the case is unknown, not broken."""

    exit_code = 3


# -- receivers of a queue ----------------------------------------------------------------------------------------------


@dataclass
class Receivers:
    """Receivers of a queue next to the pipeline: one at a time, unless a script starts another alongside. Not
    thread-safe.

    Attributes:
        pipeline: a file of which only the source is read.
        stops: ends of receivers that were not killed; they must have been asked to stop.
    """

    folder: Path
    queue: QueueSource
    pipeline: Path
    history: History
    env: Mapping[str, str]
    stops: list[Stop] = field(default_factory=list)
    _runs: list[Run] = field(default_factory=list)
    _over: set[int] = field(default_factory=set)
    _given_up: frozenset[str] = frozenset()

    def ready(self) -> None:
        """Ensure that the log exists: without it no pipeline can be planned.

        Raises:
            VerifierError: the receiver that was started for it ended.
        """
        log = self.queue.log / "_delta_log"
        if log.exists():
            return
        run = next((r for r in self._runs if r.lives), None) or self.start()
        wait_for(lambda: log.exists() or not run.lives, _LOG_TIMEOUT_S, "a receiver makes its log")
        if not run.lives:
            raise VerifierError("RECEIVER_FAILED.FIRST", exit_code=run.code, output=last_words(run))

    def start(self, crash: str = "", *, alongside: bool = False) -> Run:
        """Start a receiver with these crash points. Args: alongside: leave others running; else stop them first."""
        if not alongside:
            self.stop()
        if len(self._runs) >= _STARTS_MAX:
            raise VerifierError("RECEIVER_FAILED.STARTS", starts_max=_STARTS_MAX, output=last_words(self._runs[-1]))
        number = len(self._runs) + 1
        command = [*DELIVERED, "receive", str(self.pipeline), "--output", "json"]
        run = start(RECEIVER, number, self.folder, command, crash, self.env)
        self._runs.append(run)
        self.history.add(run.name, "run", End.STARTED, {"crash": crash})
        return run

    def stop(self) -> None:
        """Stop all running receivers and wait: what they hold is persisted and acknowledged."""
        for run in self._runs:
            if run.lives:
                run.stop(_STOP_TIMEOUT_S)
        self._record_ends()

    def kill(self, run: Run) -> None:
        """SIGKILL a receiver."""
        self.history.add(run.name, "run", End.UNKNOWN, {"killed": run.kill()})
        self._over.add(run.number)

    def close(self) -> None:
        """Kill all that are running. May be called again."""
        for run in self._runs:
            if run.lives:
                self.history.add(run.name, "run", End.OK, {"ended with the case": run.kill()})

    def settle(self, sent: Collection[str]) -> None:
        """Wait until all of these ids are in the log, or no more can arrive. Ids that were waited for in vain are not
        waited for again.

        Starts a receiver if none is running.
        """
        wanted = frozenset(sent) - self._given_up
        grew_at, before = time.monotonic(), self.queue.arrived()
        while not wanted <= before:
            if not any(run.lives for run in self._runs):
                self._record_ends()
                self.start()
            now = self.queue.arrived()
            begins = not any(run.lives and run.output.stat().st_size for run in self._runs)
            if now != before or begins:
                grew_at, before = time.monotonic(), now
            if time.monotonic() - grew_at > self.queue.patience_s:
                self.stop()  # what it held is now in the log and acknowledged; the rest is in the queue
                left = self.queue.left()
                if left or self.queue.arrived() != before:
                    grew_at = time.monotonic()
                    continue
                missing = sorted(wanted - before)
                if left is not None:
                    self._given_up |= wanted - before
                self.history.add("receivers", "settle", End.UNKNOWN, {"missing": len(missing), "some": missing[:10]})
                return
            time.sleep(_POLL_S)

    def _record_ends(self) -> None:
        for run in self._runs:
            if not run.lives and run.number not in self._over:
                self._over.add(run.number)
                self.stops.append(Stop((), run.code, run.name))
                end = End.OK if run.code is None else End.FAILED
                self.history.add(run.name, "run", end, {"code": run.code, "output": last_words(run)})


# -- a Spark with executors on two hosts -------------------------------------------------------------------------------


class Cluster:
    """Context manager. One core per worker."""

    def __init__(self, folder: Path) -> None:
        found = importlib.util.find_spec("pyspark")
        if found is None or found.origin is None:
            raise MissingExtra("spark")
        self._home = Path(found.origin).parent
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self._port = int(s.getsockname()[1])

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self._port}"

    def conf(self, crash: str, crash_folder: Path) -> dict[str, str]:
        """Spark configuration of a driver on this cluster whose executors know a crash point."""
        return {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.cores": "1",
            "spark.executor.memory": "512m",
            "spark.executorEnv.DELIVERED_CRASH": crash,
            "spark.executorEnv.DELIVERED_CRASH_DIR": str(crash_folder),
        }

    def __enter__(self) -> Cluster:
        try:
            self._start("127.0.0.1", "master", f"{_DEPLOY}.master.Master", "--port", str(self._port))
            wait_for(self._answers, _CLUSTER_TIMEOUT_S, "the master answers")
            for n, host in enumerate(_HOSTS):
                work = ("--cores", "1", "--memory", "1g", "--work-dir", str(self._folder / f"work{n}"))
                self._start(host, f"worker{n}", f"{_DEPLOY}.worker.Worker", *work, self.url)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            kill_tree(process)
            process.wait()

    def _answers(self) -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self._port)) == 0

    def _start(self, host: str, name: str, role: str, *arguments: str) -> None:
        env = {
            **os.environ,
            "JAVA_HOME": str(java_home()),
            "JDK_JAVA_OPTIONS": QUICK_JAVA,
            "SPARK_HOME": str(self._home),
            "SPARK_LOCAL_IP": host,
            "SPARK_DAEMON_MEMORY": "256m",
            "PYSPARK_PYTHON": sys.executable,
        }
        with (self._folder / f"{name}.log").open("wb") as out:
            command = [str(self._home / "bin" / "spark-class"), role, "--host", host, "--webui-port", "0", *arguments]
            self._processes.append(start_with_us(command, env=env, stdout=out, stderr=subprocess.STDOUT))
