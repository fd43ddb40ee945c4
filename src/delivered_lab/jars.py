"""JARs that a Spark without them needs, from Maven, each with the SHA-256 that is known here.

python -m delivered_lab.jars s3a FOLDER      Hadoop's client for S3: into the folder; without one, prints where they are
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
import sys
from pathlib import Path

from delivered import UsageError
from delivered_lab.brokers.servers import Say, fetch_jars

log = logging.getLogger(__name__)

HADOOP = "3.5.0"
"""Of Spark 4.3."""
_AWS = "2.35.4"
_SDK = (
    *("annotations", "apache-client", "arns", "auth", "aws-core", "aws-query-protocol", "aws-xml-protocol"),
    *("checksums", "checksums-spi", "crt-core", "endpoints-spi", "http-auth", "http-auth-aws"),
    *("http-auth-aws-eventstream", "http-auth-spi", "http-client-spi", "identity-spi", "json-utils", "metrics-spi"),
    *("netty-nio-client", "profiles", "protocol-core", "regions", "retries", "retries-spi", "s3"),
    *("s3-transfer-manager", "sdk-core", "sts", "third-party-jackson-core", "utils", "utils-lite"),
)
S3A = (
    ("org.apache.hadoop", "hadoop-aws", HADOOP),
    *(("software.amazon.awssdk", name, _AWS) for name in _SDK),
    ("software.amazon.eventstream", "eventstream", "1.0.1"),
    ("software.amazon.s3.analyticsaccelerator", "analyticsaccelerator-s3", "1.3.1"),
    ("org.apache.httpcomponents", "httpclient", "4.5.13"),
    ("org.apache.httpcomponents", "httpcore", "4.4.16"),
    ("commons-logging", "commons-logging", "1.2"),
    ("org.reactivestreams", "reactive-streams", "1.0.4"),
)
"""hadoop-aws asks for the SDK's bundle of all of Amazon's services, 640 MB; these are its parts for S3, 15 MB."""


def s3a(say: Say) -> Path:
    """The folder with Hadoop's client for S3.

    Raises:
        UsageError: Spark has another Hadoop, which these do not fit.
        DeliveredError: the download failed.
    """
    spec = importlib.util.find_spec("pyspark")
    jars = Path(str(spec.origin)).parent / "jars" if spec is not None else Path()
    found = [f.stem.rpartition("-")[2] for f in jars.glob("hadoop-client-api-*.jar")]
    if found and found != [HADOOP]:
        raise UsageError("JARS_HADOOP", found=found[0], hadoop=HADOOP)
    return fetch_jars(f"hadoop-aws/{HADOOP}", S3A, say, transitive=False)


def main(arguments: list[str]) -> None:
    if arguments[:1] != ["s3a"] or len(arguments) > 2:
        sys.exit(str(__doc__))
    folder = s3a(log.info)
    for jar in sorted(folder.iterdir()) if arguments[1:] else ():
        shutil.copy(jar, arguments[1])
    sys.stdout.write(f"{arguments[1] if arguments[1:] else folder}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
