"""P28 with brokers that are killed: rounds of restart_rounds.py, which found lost and doubled rows before."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.broker.restart_rounds import INTERVAL, run, start


@pytest.mark.matrix
@pytest.mark.parametrize("client", ["arrow", "librdkafka"])
@pytest.mark.parametrize("interval_ms", ["10000", "500"])
@pytest.mark.parametrize("brokers", [1, 3])
def test_p28_no_row_is_lost_or_doubled_by_brokers_that_restart(
    brokers: int, interval_ms: str, client: str, tmp_path: Path
) -> None:
    cluster = start(tmp_path, brokers, {INTERVAL: interval_ms})
    try:
        found = run(
            cluster.kafka,
            seed=int(interval_ms) + brokers,
            kills=10,
            seconds=900,
            pipelines=20,
            kill=cluster.kill,
            restart=cluster.restart,
            options={"client": client},
            replication=brokers,
        )
    finally:
        cluster.stop()
    assert found["rounds"] >= 50
    assert (found["lost_rows"], found["doubled_rows"], found["stopped_for_good"]) == (0, 0, 0), found["bad"]
    assert found["rounds_with_missing_rows"] == found["rounds_with_unexpected_errors"] == 0, found
