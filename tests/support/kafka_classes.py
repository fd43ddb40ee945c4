"""An archive of the classes that Kafka's broker loads, which halves the processor time of its start.

python -m tests.support.kafka_classes       `make test` creates it, once
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from delivered.machine import cache_folder, java_home
from delivered.model.errors import DeliveredError
from delivered_lab import brokers
from delivered_lab.brokers import kafka

OPTIONS = "JDK_JAVA_OPTIONS"
SILENT = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")


def archive() -> Path:
    """Of this Java and this Kafka, whether it exists or not."""
    java = hashlib.sha256(str(java_home().resolve()).encode()).hexdigest()[:12]
    return cache_folder() / "classes" / f"kafka-{kafka.VERSION}-{java}.jsa"


def java_options() -> list[str]:
    """For all JVMs: those of other classes, or with an archive of their own, ignore it."""
    try:
        file = archive()
    except DeliveredError:  # without Java
        return []
    return [f"-XX:SharedArchiveFile={file}", *SILENT] if file.is_file() else []


def make() -> None:
    """The JVM writes what it has loaded when it ends: those of a tool, and then those of the broker."""
    file = archive()
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    os.environ[OPTIONS] = " ".join([f"-XX:ArchiveClassesAtExit={fresh}", *SILENT])
    try:
        with tempfile.TemporaryDirectory(prefix="delivered-classes-") as folder:
            broker = brokers.start("kafka", Path(folder), dies_with_parent=True)
            kafka.make_topics(broker.bootstrap, ["t"], 2)
            kafka.produce(broker.bootstrap, "t", 10)
            assert len(list(kafka.consume(broker.bootstrap, "t"))) == 10
            broker.stop()
        fresh.replace(file)
    finally:
        fresh.unlink(missing_ok=True)


if __name__ == "__main__" and not archive().is_file():
    make()
