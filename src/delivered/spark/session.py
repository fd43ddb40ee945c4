"""Sessions: registering the formats in one, creating one that starts fast on this machine, and ending one whose
standalone cluster has forgotten it.

An owner's id identifies the driver, and must reach each of its processes: those that plan and commit streams, and those
that write for df.write and INSERT INTO. PySpark passes only options to a data source, and INSERT INTO has none to add
to. But it pickles the registered class by value, so the id is an attribute of a class that `register` creates.
`formats.py` copies it into the spec; nothing else reads it.

Most of a session's start is spent loading 20,000 classes from 250 JARs. Java's class data sharing archives them once
(class_archive.py: about 25 s and 160 MB), which saves about 3 s per start. The JVM ignores an archive that does not
match its version and JARs, so a stale one is harmless. See "Class Data Sharing" in Oracle's HotSpot guide, and JEP 350.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import pyspark
from pyspark.sql import SparkSession

from delivered.engine.context import new_owner
from delivered.machine import cache_folder, java_home, prepare_environment
from delivered.model.errors import DeliveredError, Refused
from delivered.model.options import check_argument
from delivered.model.patience import LOST_S, Loss
from delivered.model.step import LOG_FORMAT, as_json
from delivered.pipeline.registry import names
from delivered.prefork import socket_folder, start_server, worker_python
from delivered.spark import internals
from delivered.spark.check import OUR_DAEMON, advice, check_session, owners, sender_of
from delivered.spark.hooks import install
from delivered.spark.internals import Setting

_CONF = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # Larger Arrow batches cost less between Python and the JVM.
    Setting.ARROW_BATCH_ROWS: "32768",
    Setting.SHUFFLE_PARTITIONS: "4",
}

JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_PREFORKED = (
    *(internals.WORKER_MODULES if internals.PYTHON_SOURCES else (internals.TASK_MODULE,)),
    *(("delivered.spark.formats", "delivered.spark.readers") if internals.PYTHON_SOURCES else ()),
    "pyarrow.compute",
    "delivered.spark.writers",
    "delivered.checkpoint.history",
    "delivered.engine.decide",
    "delivered.engine.recover",
)
"""What planning and committing processes import."""
log = logging.getLogger(__name__)


def is_registered(spark: SparkSession) -> bool:
    """Whether the session has the formats: registering again makes Spark warn about each."""
    return spark in owners


def register(spark: SparkSession) -> None:
    """Register every format in a session, and make the session active in this thread. May be called again.

    Sessions created from this one by `newSession` have the formats too, on every thread. From now on, errors of these
    formats start with their code, and `start()` refuses a query that cannot run (docs/spark.md).

    Args:
        spark: classic or Spark Connect.

    The registered classes carry an id of this driver, new for each call: by it the driver's processes act as one owner
    of a ledger, and a second driver on the same checkpoint is detected.

    Raises:
        UsageError: `spark` is no session.
        Refused: this Spark has no formats in Python.
    """
    check_session(spark)
    if not internals.PYTHON_SOURCES:
        raise Refused("SPARK_VERSION.FORMATS", version=spark.version)
    prepare(spark)


def prepare(spark: SparkSession) -> None:
    """Make this process the owner of what it writes in the session; register every format, if this Spark can."""
    if spark not in owners:
        for missing in advice(partial(spark.conf.get, default="")).values():
            log.warning(missing)
    _register(spark, None)
    watch(spark)
    install(spark, _register)
    internals.make_active(spark)


def _register(spark: SparkSession, parent: SparkSession | None) -> None:
    """Args: parent: a session of the same driver."""
    owners.pop(spark, None)  # it becomes the newest
    owners[spark] = (owners.get(parent) if parent is not None else None) or new_owner(internals.jvm_of(spark))
    sender = sender_of(spark)
    if not internals.PYTHON_SOURCES:
        return
    from delivered.spark.formats import DeliveredDataSource

    with internals.active(spark):  # where Spark checks for existing formats
        for name in names():
            attributes: dict[str, Any] = {"system": name, "sender": sender}
            # Not importable by name, so that Spark pickles the class by value, id included.
            spark.dataSource.register(type(f"Delivered_{name}", (DeliveredDataSource,), attributes))


def session(name: str = "delivered", master: str | None = None, conf: Mapping[str, str] | None = None) -> SparkSession:
    """A session with every format registered.

    Args:
        master: default: what `spark-submit` set, else `local[*]`.
        conf: Spark configuration, overrides the defaults.
    """
    check_argument("delivered.session", "master", master, (str, NoneType), "text", 'master="local[2]"')
    check_argument(
        "delivered.session", "conf", conf, (Mapping, NoneType), "a mapping", 'conf={"spark.ui.enabled": "false"}'
    )
    if master is None and "PYSPARK_GATEWAY_PORT" not in os.environ:
        master = "local[*]"  # spark-submit would have set a master
    local = master is not None and (master == "local" or master.startswith("local["))
    prepare_environment(worker_python() if local else None)
    builder = SparkSession.builder.appName(name)
    settings = {**_CONF, **(conf or {})}
    if master is not None:
        builder = builder.master(master)
    if local:
        # A local driver need not be reachable from the network.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", **settings}
        python, folder = os.environ["PYSPARK_PYTHON"], socket_folder()
        if folder is not None and python == worker_python() != sys.executable:
            start_server(folder, internals.TASK_MODULE, _PREFORKED)
        settings = {**local_sockets(folder), **forked_workers(python), **with_archive(settings)}
    if as_json():
        settings = {f"spark.executorEnv.{LOG_FORMAT}": "json", **settings}
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    prepare(spark)
    return spark


def archive() -> Path:
    """Path of the archive for this Java and this pyspark, whether it exists or not."""
    versions = f"{java_home().resolve()} {Path(pyspark.__file__).parent} {pyspark.__version__}"
    name = hashlib.sha256(versions.encode()).hexdigest()[:12]
    return cache_folder() / "classes" / f"spark-{pyspark.__version__}-{name}.jsa"


def with_archive(conf: Mapping[str, str]) -> dict[str, str]:
    """The configuration plus the archive, if it exists and the caller sets none."""
    options = conf.get(JAVA_OPTIONS, "")
    try:
        file = archive()
    except DeliveredError:
        return dict(conf)
    if "Archive" in options or not file.is_file():
        return dict(conf)
    return {**conf, JAVA_OPTIONS: f'{options} "-XX:SharedArchiveFile={file}" -Xlog:cds=off'.strip()}


def local_sockets(folder: str | None) -> dict[str, str]:
    """Local sockets between JVM and workers on this machine: over TCP every Python task waits about 40 ms for a delayed
    acknowledgement."""
    if folder is None or not internals.LOCAL_SOCKETS:
        return {}
    return {Setting.LOCAL_SOCKETS: "true", Setting.LOCAL_SOCKET_FOLDER: folder}


def forked_workers(python: str) -> dict[str, str]:
    """Workers on this machine, forked from a process that has imported what tasks need.

    Args:
        python: of the workers. Another one than this may lack the package, which tasks of other formats do not need.
    """
    return {Setting.DAEMON: OUR_DAEMON} if os.name == "posix" and python in (sys.executable, worker_python()) else {}


# The executors of a standalone cluster.
#
# A master that starts anew without recovery (`spark.deploy.recoveryMode`) knows no application. It has their executors
# killed and tells their drivers nothing, so that their jobs wait for executors for ever: Spark stops an application
# only when a master says that it removed it (StandaloneAppClient).

_LOOK_S = 5.0

_watched: set[str] = set()
_ended: list[DeliveredError] = []


def watch(spark: SparkSession) -> None:
    """Watch a session's executors from a thread, if its cluster may forget it."""
    _ended.clear()  # it was another session's
    if internals.is_connect(spark) or not str(spark.sparkContext.master).startswith("spark://"):
        return
    application = str(spark.sparkContext.applicationId)
    if application not in _watched:
        _watched.add(application)
        threading.Thread(target=_look, args=(spark,), daemon=True, name="delivered-executors").start()


def why_ended() -> DeliveredError | None:
    """Why this process's session was ended here; None: it was not."""
    return _ended[-1] if _ended else None


def _look(spark: SparkSession) -> None:
    loss, jobs = Loss(), spark.sparkContext.statusTracker()
    try:
        while not loss.is_final(internals.executors(spark), len(jobs.getActiveJobsIds()), time.monotonic()):
            time.sleep(_LOOK_S)
    except Exception:  # the session was stopped, or its JVM has ended
        return
    _ended.append(DeliveredError("EXECUTORS_LOST", master=spark.sparkContext.master, seconds=f"{LOST_S:.0f}"))
    log.error("%s", _ended[-1])
    internals.stop_context(spark)
