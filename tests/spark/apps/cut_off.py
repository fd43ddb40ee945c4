"""The job of `portable.py`, whose JVM dies after the tasks of a batch, while Python reads what they returned.

python -m tests.spark.apps.cut_off FOLDER GUARANTEE
"""

from __future__ import annotations

import signal
from typing import Any

import psutil
import pyspark.util
from tests.spark.apps import portable


def main() -> None:
    connect = pyspark.util._create_local_socket

    def connected(address: Any) -> Any:
        """The kernel accepts the connection; the JVM does not live to write to it."""
        address = list(address)  # asks the JVM
        (java,) = [p for p in psutil.Process().children(recursive=True) if p.name() == "java"]
        java.send_signal(signal.SIGSTOP)
        stream = connect(address)
        java.send_signal(signal.SIGKILL)
        return stream

    pyspark.util._create_local_socket = connected
    portable.main()


if __name__ == "__main__":
    main()
