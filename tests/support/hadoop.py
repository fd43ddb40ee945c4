"""Hadoop's parts, from Maven: the client for S3, and a cluster of one name node."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import psutil
import tenacity

from delivered.machine import java_home
from delivered_lab.brokers.servers import fetch_jars
from delivered_lab.jars import HADOOP, s3a
from delivered_lab.supervisor import kill_tree

MINICLUSTER = [
    ("org.apache.hadoop", "hadoop-client-minicluster", HADOOP),
    ("org.apache.hadoop", "hadoop-client-api", HADOOP),
    ("org.apache.hadoop", "hadoop-client-runtime", HADOOP),
    ("commons-logging", "commons-logging", "1.3.0"),
    ("org.slf4j", "slf4j-api", "1.7.36"),
    ("org.slf4j", "slf4j-simple", "1.7.36"),
    ("org.xerial.snappy", "snappy-java", "1.1.10.4"),
    ("org.junit.jupiter", "junit-jupiter-api", "5.13.3"),
    ("org.mockito", "mockito-core", "4.11.0"),
]


def s3a_jars() -> str:
    """For Spark's class path."""
    return f"{s3a(print)}/*"


def s3a_settings(s3: dict[str, str]) -> dict[str, str]:
    """Hadoop's settings of the test's server."""
    return {
        "fs.s3a.endpoint": s3["storage.aws_endpoint_url"],
        "fs.s3a.endpoint.region": s3["storage.aws_region"],
        "fs.s3a.path.style.access": "true",
        "fs.s3a.access.key": s3["storage.aws_access_key_id"],
        "fs.s3a.secret.key": s3["storage.aws_secret_access_key"],
    }


class Hdfs:
    """Context manager: a name node and a data node on 127.0.0.1.

    Attributes:
        url: of the file system.
    """

    url = ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: psutil.Popen | None = None

    def __enter__(self) -> Hdfs:
        jars = fetch_jars(f"hadoop-minicluster/{HADOOP}", MINICLUSTER, print, transitive=False)
        details, data = self._folder / "details.json", self._folder / "data"
        command = [
            *(str(java_home() / "bin" / "java"), "-Xmx384m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"),
            *("-cp", f"{jars}/*", "org.apache.hadoop.mapreduce.MiniHadoopClusterManager"),
            *("-nomr", "-format", "-nnport", "0", "-nnhttpport", "0", "-datanodes", "1"),
            *("-writeDetails", str(details), "-D", f"hadoop.tmp.dir={data}", "-D", f"hdfs.minidfs.basedir={data}"),
        ]
        with (self._folder / "hdfs.log").open("w") as log:
            self._process = psutil.Popen(
                command, cwd=self._folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

        @tenacity.retry(stop=tenacity.stop_after_delay(120), wait=tenacity.wait_fixed(0.2), reraise=True)
        def port() -> int:
            assert self._process is not None and self._process.poll() is None, (self._folder / "hdfs.log").read_text()
            found = int(json.loads(details.read_text())["namenode_port"])
            socket.create_connection(("127.0.0.1", found), 1).close()
            return found

        try:
            self.url = f"hdfs://127.0.0.1:{port()}"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            kill_tree(self._process)
            self._process.wait()
