"""A Spark standalone cluster of two "machines" on one host: a master, and workers on addresses of their own, because
Spark never runs a speculative attempt on the host of the first one."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

from delivered.machine import java_home
from delivered.model.errors import MissingExtra
from delivered_lab.supervisor import kill_tree
from delivered_lab.verify.services import QUICK_JAVA, wait_for

_HOSTS = ("127.0.0.2", "127.0.0.3")
_START_TIMEOUT_S = 60.0
_KIND = "org.apache.spark.deploy"


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
            self._start("127.0.0.1", "master", f"{_KIND}.master.Master", "--port", str(self._port))
            wait_for(self._answers, _START_TIMEOUT_S, "the master answers")
            for n, host in enumerate(_HOSTS):
                work = ("--cores", "1", "--memory", "1g", "--work-dir", str(self._folder / f"work{n}"))
                self._start(host, f"worker{n}", f"{_KIND}.worker.Worker", *work, self.url)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            kill_tree(process.pid)
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
            self._processes.append(
                subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
            )
