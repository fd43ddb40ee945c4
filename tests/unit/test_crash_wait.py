"""A waiting crash point: the process resumes when it is released from outside."""

from __future__ import annotations

import threading
from pathlib import Path

from delivered.crash import Handler, parse
from delivered.model.step import Moment, StepId
from delivered_lab.supervisor import hits, release


def test_a_process_waits_at_a_point_until_it_is_released_and_never_again(tmp_path: Path) -> None:
    handler = Handler(parse("commit.decide:after!wait"), tmp_path)
    passed = threading.Event()

    def run() -> None:
        handler(f"{StepId.COMMIT_DECIDE}:{Moment.AFTER}", {"batch": 1})
        passed.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not hits(tmp_path):
        assert thread.is_alive()
    assert not passed.wait(0.2)
    ((path, hit),) = hits(tmp_path)
    assert (hit.point, hit.facts) == ("commit.decide:after!wait", {"batch": 1})
    release(path)
    assert passed.wait(5)
    handler(f"{StepId.COMMIT_DECIDE}:{Moment.AFTER}", {"batch": 2})
    assert len(hits(tmp_path)) == 1
