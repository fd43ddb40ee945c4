"""Hadoop's parts, from Maven: the client for S3 with what it needs of the AWS SDK, and a cluster of one name node."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import psutil
import tenacity

from delivered.machine import java_home
from delivered_lab.brokers.servers import fetch_jars
from delivered_lab.supervisor import kill_tree

VERSION = "3.5.0"
AWS = "2.35.4"
S3A = [
    ("org.apache.hadoop", "hadoop-aws", VERSION),
    *(
        ("software.amazon.awssdk", name, AWS)
        for name in (
            *("annotations", "apache-client", "arns", "auth", "aws-core", "aws-query-protocol", "aws-xml-protocol"),
            *("checksums", "checksums-spi", "crt-core", "endpoints-spi", "http-auth", "http-auth-aws"),
            *("http-auth-aws-eventstream", "http-auth-spi", "http-client-spi", "identity-spi", "json-utils"),
            *("metrics-spi", "netty-nio-client", "profiles", "protocol-core", "regions", "retries", "retries-spi"),
            *("s3", "s3-transfer-manager", "sdk-core", "sts", "third-party-jackson-core", "utils", "utils-lite"),
        )
    ),
    ("software.amazon.eventstream", "eventstream", "1.0.1"),
    ("software.amazon.s3.analyticsaccelerator", "analyticsaccelerator-s3", "1.3.1"),
    ("org.apache.httpcomponents", "httpclient", "4.5.13"),
    ("org.apache.httpcomponents", "httpcore", "4.4.16"),
    ("commons-logging", "commons-logging", "1.2"),
    ("org.reactivestreams", "reactive-streams", "1.0.4"),
]
"""The AWS SDK's own bundle has all of Amazon's services: 640 MB. These are 14 MB."""
MINICLUSTER = [
    ("org.apache.hadoop", "hadoop-client-minicluster", VERSION),
    ("org.apache.hadoop", "hadoop-client-api", VERSION),
    ("org.apache.hadoop", "hadoop-client-runtime", VERSION),
    ("commons-logging", "commons-logging", "1.3.0"),
    ("org.slf4j", "slf4j-api", "1.7.36"),
    ("org.slf4j", "slf4j-simple", "1.7.36"),
    ("org.xerial.snappy", "snappy-java", "1.1.10.4"),
    ("org.junit.jupiter", "junit-jupiter-api", "5.13.3"),
    ("org.mockito", "mockito-core", "4.11.0"),
]


def s3a_jars() -> str:
    """For Spark's class path."""
    return f"{fetch_jars(f'hadoop-aws/{VERSION}', S3A, print, transitive=False)}/*"


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
        jars = fetch_jars(f"hadoop-minicluster/{VERSION}", MINICLUSTER, print, transitive=False)
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
            kill_tree(self._process.pid)
            self._process.wait()
