"""Real servers for development, demo and tests, on 127.0.0.1 and free ports.

    broker = brokers.start("kafka", Path("build/kafka"))
    broker.bootstrap                 # "127.0.0.1:21877"
    broker.kill(); broker.restart()  # the same data, the same ports
    brokers.status(Path("build/kafka"))
    broker.stop()

A server is identified by process id and start time, kept in the data folder: a process that reuses the id is never
touched.
"""

from __future__ import annotations

from delivered.machine import cache_folder, java_home
from delivered_lab.brokers.run import (
    KINDS,
    Broker,
    Status,
    attach,
    default_folder,
    prefetch,
    require_kind,
    start,
    status,
    stop,
)

__all__ = [
    "KINDS",
    "Broker",
    "Status",
    "attach",
    "cache_folder",
    "default_folder",
    "java_home",
    "prefetch",
    "require_kind",
    "start",
    "status",
    "stop",
]
