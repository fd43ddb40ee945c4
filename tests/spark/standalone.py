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


class Standalone:
    """Context manager. `env` reaches every process of the cluster, executors and their Python workers included.

    Args:
        several_hosts: each worker has an address of its own. Spark reads shuffle files of a dead executor on the same
            host from its disk, and starts no speculative copy on the host of the first one.
    """

    def __init__(
        self, folder: Path, python: str, env: dict[str, str], workers: int = 2, *, several_hosts: bool = False
    ) -> None:
        self.folder = folder
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
        log = (self.folder / f"{name}.log").open("w")
        return psutil.Popen(
            [str(SPARK_HOME / "bin" / "spark-class"), *arguments],
            env=self._env | {"SPARK_LOCAL_IP": host},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Standalone:
        kind = "org.apache.spark.deploy"
        self.master = self._start(
            "master", f"{kind}.master.Master", "--host", "127.0.0.1", "--port", str(self.port), "--webui-port", "0"
        )
        try:
            _wait_for(self.port)
            for number, host in enumerate(self._hosts):
                work = self.folder / f"work-{number}"
                self.workers.append(
                    self._start(
                        f"worker-{number}",
                        *(f"{kind}.worker.Worker", "--host", host, "--webui-port", "0", "--cores", "1"),
                        *("--memory", "1g", "--work-dir", str(work), self.url),
                        host=host,
                    )
                )
        except BaseException:
            self.__exit__()
            raise
        return self

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
