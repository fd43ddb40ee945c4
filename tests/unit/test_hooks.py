"""What the hooks in PySpark's classes do if a release of it hides what they read."""

from __future__ import annotations

import logging

import pytest

from delivered.spark import hooks
from delivered.spark.internals import StreamWrite


def test_a_checkpoint_that_does_not_reach_the_source_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def hidden(_: object) -> None:
        raise AttributeError("_jdf")

    monkeypatch.setattr("delivered.spark.internals.stream_sources", hidden)
    with caplog.at_level(logging.WARNING):
        hooks._pass_checkpoint(object(), StreamWrite("delivered_kafka", {}, "append", str), {})
        assert not caplog.records, "without a checkpoint there is nothing to pass"
        hooks._pass_checkpoint(
            object(), StreamWrite("delivered_kafka", {"checkpointlocation": "/c"}, "append", str), {}
        )
    assert "cannot pass the query's checkpoint to the source on this PySpark (_jdf)" in caplog.text
    assert hooks._sources(object()) == ()
