"""Spark's errors about unreadable state become one error that names the location."""

from __future__ import annotations

import pytest

from delivered.model.translate import translated

DELETED = """[STREAM_FAILED] Query [id = 1] terminated with exception: [FOREACH_BATCH_USER_FUNCTION_ERROR] Reason: ...
py4j.protocol.Py4JJavaError: An error occurred while calling o717.save.
: org.apache.spark.SparkException: [CANNOT_LOAD_STATE_STORE.CANNOT_READ_DELTA_FILE_NOT_EXISTS] An error occurred \
during loading state. Error reading delta file file:/t/ck/state/0/1/3.delta of HDFSStateStoreProvider[ \
storeId=StateStoreId[ operatorId=0, partitionId=1, storeName=default ]]: does not exist.  SQLSTATE: 58030
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.failedToReadDeltaFileNotExistsError(QueryExecutionErrors.scala:1)
Caused by: java.io.FileNotFoundException: File file:/t/ck/state/0/1/3.delta does not exist
"""
CUT_OFF = """[STREAM_FAILED] Query [id = 1] terminated with exception: ...
: org.apache.spark.SparkException: [CANNOT_LOAD_STATE_STORE.UNCATEGORIZED] An error occurred during loading state.  \
SQLSTATE: 58030
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.cannotLoadStore(QueryExecutionErrors.scala:2941)
Caused by: java.io.EOFException: Stream ended prematurely
"""


@pytest.mark.parametrize(
    ("said", "place", "why"),
    [
        (DELETED, "operator 0, partition 1 (state/0/1 of the checkpoint)", "3.delta does not exist"),
        (
            CUT_OFF,
            "the state of a partition (Spark does not name it here",
            "java.io.EOFException: Stream ended prematurely",
        ),
    ],
    ids=["deleted", "cut off"],
)
def test_the_place_and_the_cause_are_named(said: str, place: str, why: str) -> None:
    """A truncated file must not be mistaken for a dead worker's connection, which ends the same way."""
    found = translated(RuntimeError(said))
    assert found is not None
    assert found.code == "DELIVERED_STATE_UNREADABLE"
    assert place in str(found)
    assert why in str(found)
    assert "nothing is lost" in str(found)
