"""Found by the verifier: a driver was paused before write.prepare, another took over and finished. Woken up, the first
one prepared its shards, was fenced, and left their transactions open: they blocked read-committed readers of the sink
until the transaction time-out, although the pipeline itself was long done.
"""

from __future__ import annotations

import pytest
from tests.crash.sim import END, Crash, Sim

from delivered.model.capability import Guarantee


@pytest.mark.parametrize("same_owner", [False, True])
@pytest.mark.parametrize("point", ["write.stage:before", "write.prepare:before", "commit.decide:before"])
def test_a_fenced_driver_gives_back_what_it_prepared_too_late(point: str, same_owner: bool) -> None:
    crash = Crash(point, how="zombie", resume=END, same_owner=same_owner)
    sim = Sim(Guarantee.EXACTLY_ONCE, crashes=(crash,)).run()
    assert crash.hit
    assert sim.world.unsettled() == []
    assert sim.verdict() == []
