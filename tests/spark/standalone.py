"""A Spark standalone cluster on 127.0.0.1: one master, workers that can be killed."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import psutil
import pyspark
import tenacity

from delivered.machine import java_home

SPARK_HOME = Path(pyspark.__file__).parent
_DEPLOY = "org.apache.spark.deploy"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@tenacity.retry(stop=tenacity.stop_after_delay(60), wait=tenacity.wait_fixed(0.1), reraise=True)
def _wait_for(port: int) -> None:
    socket.create_connection(("127.0.0.1", port), 1).close()


def kill_tree(process: psutil.Process) -> None:
    """SIGKILL a process and everything below it."""
    tree = [process, *process.children(recursive=True)]
    for one in tree:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(tree, 30)


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


class Standalone:
    """Context manager. `env` reaches every process of the cluster, executors and their Python workers included.

    Args:
        cores: of each worker, which has 1 GiB for each.
        several_hosts: each worker has an address of its own. Spark reads shuffle files of a dead executor on the same
            host from its disk, and starts no speculative copy on the host of the first one.
    """

    def __init__(
        self,
        folder: Path,
        python: str,
        env: dict[str, str],
        workers: int = 2,
        *,
        cores: int = 1,
        several_hosts: bool = False,
    ) -> None:
        self.folder = folder
        self._cores = cores
        self.port = free_port()
        self.url = f"spark://127.0.0.1:{self.port}"
        self._hosts = [f"127.0.0.{1 + n if several_hosts else 1}" for n in range(workers)]
        self._env = os.environ | {
            "JAVA_HOME": str(java_home()),
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": python,
            "SPARK_DAEMON_MEMORY": "256m",
            **env,
        }
        self.master: psutil.Process | None = None
        self.workers: list[psutil.Process] = []

    def _start(self, name: str, *arguments: str, host: str = "127.0.0.1") -> psutil.Process:
        log = (self.folder / f"{name}.log").open("a")
        return psutil.Popen(
            [str(SPARK_HOME / "bin" / "spark-class"), *arguments],
            env=self._env | {"SPARK_LOCAL_IP": host},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Standalone:
        try:
            self.start_master()
            self.workers = [self.start_worker(number) for number in range(len(self._hosts))]
        except BaseException:
            self.__exit__()
            raise
        return self

    def start_master(self) -> None:
        """A new one knows neither workers nor applications: the workers register again, the applications end."""
        self.master = self._start(
            "master", f"{_DEPLOY}.master.Master", "--host", "127.0.0.1", "--port", str(self.port), "--webui-port", "0"
        )
        _wait_for(self.port)

    def start_worker(self, number: int) -> psutil.Process:
        host = self._hosts[number]
        return self._start(
            f"worker-{number}",
            *(f"{_DEPLOY}.worker.Worker", "--host", host, "--webui-port", "0", "--cores", str(self._cores)),
            *("--memory", f"{self._cores}g", "--work-dir", str(self.folder / f"work-{number}"), self.url),
            host=host,
        )

    def executors(self) -> list[psutil.Process]:
        """Those that run now."""
        found = [p for w in self.workers if w.is_running() for p in _below(w)]
        return [p for p in found if "CoarseGrainedExecutorBackend" in " ".join(_arguments(p))]

    def worker_of(self, pid: int) -> psutil.Process:
        """The cluster worker below which a process runs."""
        above = {p.pid for p in psutil.Process(pid).parents()}
        return next(w for w in self.workers if w.pid in above)

    def submit(self, app: Path, *arguments: str, conf: dict[str, str] | None = None) -> psutil.Popen:
        """Run an application in client mode; its output goes to driver.log."""
        settings = {"spark.executor.cores": "1", "spark.executor.memory": "512m", "spark.cores.max": "2"} | (conf or {})
        pairs = [part for k, v in settings.items() for part in ("--conf", f"{k}={v}")]
        log = (self.folder / "driver.log").open("a")
        return psutil.Popen(
            [str(SPARK_HOME / "bin" / "spark-submit"), "--master", self.url, *pairs, str(app), *arguments],
            env=self._env,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __exit__(self, *_: object) -> None:
        for process in [*self.workers, *([self.master] if self.master else [])]:
            if process.is_running():
                kill_tree(process)
