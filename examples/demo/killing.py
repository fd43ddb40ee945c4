"""Run a pipeline in a process of its own, kill its whole process tree at each crash point, start it again."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from delivered_lab.supervisor import Outcome, hits, run

TIMEOUT_S = 900.0
"""For all runs of one pipeline together; a quiet machine takes 40 s."""
_POLL_S = 0.2

JVM = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""A JVM that lives for ten seconds starts faster without its optimising compiler."""


@dataclass(frozen=True)
class Life:
    """What happened to one pipeline.

    Attributes:
        kills: "commit.decide:after in batch 2", in their order.
        runs: how often it was started.
    """

    kills: tuple[str, ...]
    runs: int


def live_and_die(
    pipeline: Path,
    crashes: Sequence[str],
    folder: Path,
    checkpoint: Path,
    show: Callable[[int, list[str]], None],
    timeout_s: float = TIMEOUT_S,
) -> Life:
    """Run until the pipeline ended by itself.

    Args:
        pipeline: its file.
        show: called now and then with how many batches are done and what was hit so far.
        timeout_s: for all runs together.

    Raises:
        RuntimeError: it ended with an error, or a crash point was never met: the demo would show nothing.
    """
    command = [sys.executable, "-m", "delivered.cli.main", "run", str(pipeline)]
    ended: list[Outcome | BaseException] = []
    log = folder / "pipeline.log"

    def supervise() -> None:
        try:
            with log.open("wb") as output:
                ended.append(run(command, ",".join(crashes), folder / "hits", timeout_s=timeout_s, output=output))
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=supervise, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_S)
        show(_batches(checkpoint), [_said(h.point, h.facts.get("batch")) for _, h in hits(folder / "hits")])
    outcome = ended[0]
    if isinstance(outcome, BaseException):
        raise outcome
    if outcome.exit_code != 0:
        tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise RuntimeError(f"the pipeline ended with exit code {outcome.exit_code}; its log {log} ends:\n{tail}")
    if len(outcome.kills) != len(crashes):
        met = [k.hit.point for k in outcome.kills]
        raise RuntimeError(f"of the crash points {list(crashes)} only {met} were met; see {log}")
    return Life(tuple(_said(k.hit.point, k.hit.facts.get("batch")) for k in outcome.kills), outcome.runs)


def _said(point: str, batch: object) -> str:
    return f"{point.partition('@')[0]}, batch {batch}"


def _batches(checkpoint: Path) -> int:
    """Batches in Spark's commit log: files with a number for a name."""
    folder = checkpoint / "commits"
    return sum(1 for f in folder.iterdir() if f.name.isdigit()) if folder.is_dir() else 0
