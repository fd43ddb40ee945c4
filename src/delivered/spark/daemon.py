"""PySpark's worker daemon, which imports what tasks need before it forks workers, and hides it from the collector.

    spark.python.daemon.module=delivered.spark.daemon      a session's setting, where executors have this package

PySpark's own daemon imports nothing, so that no thread exists when it forks: each worker imports pyspark, pyarrow and
numpy itself, 0.5 s of CPU, and collects garbage over their objects after every task. Of these imports only jemalloc, in
pyarrow, starts a thread, which survives a fork; Spark limits OpenMP to the task's cores, so numpy starts none.
"""

from __future__ import annotations

import gc
from importlib import import_module

from delivered.spark.internals import PYTHON_SOURCES, TASK_MODULE, run_daemon

_IMPORTED = (
    *(TASK_MODULE, "pyarrow.compute", "delivered.spark.writers"),
    *(("delivered.spark.readers",) if PYTHON_SOURCES else ()),
)


def main() -> None:
    """Import, then serve until Spark closes the daemon's standard input."""
    for module in _IMPORTED:
        import_module(module)
    gc.collect()
    gc.freeze()
    run_daemon()


if __name__ == "__main__":
    main()
