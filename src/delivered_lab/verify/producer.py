"""A killable producer application: sends the records of a file in small portions and journals the acknowledgements; and
the controller that starts, kills and restarts it in a process of its own.

    python -m delivered_lab.verify.producer '{"source": ..., "records": file, "notes": file, "portion": 20, ...}'

It writes a note before it sends a portion and one after the acknowledgement, each on disk before it goes on. After a
restart it resends what was started and not acknowledged: the source may then hold these twice. With `"again": false` it
skips them: the source may then hold them or not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from delivered_lab.verify.evidence import End, History
from delivered_lab.verify.services import VerifierError
from delivered_lab.verify.systems import from_address
from delivered_lab.verify.systems.base import SourceClient, address
from delivered_lab.verify.workloads import Record


class Producer:
    """A producer application that can be killed and restarted.

    Args:
        again: after a restart, resend what was not acknowledged; else skip it.
    """

    def __init__(
        self,
        folder: Path,
        source: SourceClient,
        history: History,
        left: Sequence[Record],
        portion: int,
        pause_s: float,
        again: bool = True,
    ) -> None:
        self._folder = folder
        self._history = history
        self._notes = folder / "producer.notes"
        records_file = folder / "producer.records"
        records_file.write_text("".join(json.dumps(asdict(r)) + "\n" for r in left), encoding="utf-8")
        self._order = {
            "source": address(source),
            "records": str(records_file),
            "notes": str(self._notes),
            "portion": portion,
            "pause_s": pause_s,
            "again": again,
        }
        self._reported = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, stop_at: int | None = None, moment: str = "before") -> Path:
        """Start it, to stop `moment` ("before", "after") it sends portion `stop_at`; None: never.

        Returns the file that appears when it has stopped there.
        """
        stands = self._folder / f"producer.{moment}-{stop_at}"
        stop = {} if stop_at is None else {"stop": {"portion": stop_at, "moment": moment, "file": str(stands)}}
        with (self._folder / "producer.log").open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "delivered_lab.verify.producer", json.dumps(self._order | stop)],
                stdout=out,
                stderr=out,
            )
        return stands

    @property
    def acknowledged(self) -> int:
        """Number of acknowledged portions."""
        return sum(n["end"] == "ok" for n in read_notes(self._notes))

    def kill(self) -> None:
        """SIGKILL it, before a send or while it waits for the acknowledgement."""
        if self._process is not None:
            psutil.Process(self._process.pid).kill()
            self._process.wait()
        self._note()

    def finish(self, timeout_s: float, most: int = 1) -> None:
        """Wait until it has sent everything; if it fails, restart it, at most `most` starts in all.

        Raises:
            VerifierError: it failed.
        """
        for left in reversed(range(most)):
            if self._process is None or self._process.wait(timeout_s) == 0:
                break
            if not left:
                raise VerifierError("PRODUCER_FAILED", name=self._folder.name)
            self.start()
        self._note()

    def _note(self) -> None:
        notes = read_notes(self._notes)
        for n in notes[self._reported :]:
            self._history.add("producer", "send", End.OK if n["end"] == "ok" else End.STARTED, {"ids": n["ids"]})
        self._reported = len(notes)


def read_notes(path: Path) -> list[dict[str, Any]]:
    """A producer's notes: {"at": portion, "end": "started" | "ok", "ids": [...]}."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # killed in the middle of a write
    return found


def main() -> None:
    order = json.loads(sys.argv[1])
    source = from_address(order["source"])
    records = [Record(**json.loads(line)) for line in Path(order["records"]).read_text(encoding="utf-8").splitlines()]
    notes = Path(order["notes"])
    done = {n["at"] for n in read_notes(notes) if n["end"] == "ok" or not order.get("again", True)}
    portion = int(order["portion"])
    with notes.open("a", encoding="utf-8") as file:
        file.write("\n")  # ends a line that a kill truncated

        def note(at: int, end: str, ids: list[str]) -> None:
            file.write(json.dumps({"at": at, "end": end, "ids": ids}) + "\n")
            file.flush()
            os.fsync(file.fileno())

        def stand(at: int, moment: str) -> None:
            stop = order.get("stop")
            if stop is not None and (at // portion, moment) == (stop["portion"], stop["moment"]):
                Path(stop["file"]).touch()
                while True:
                    time.sleep(1)

        for at in range(0, len(records), portion):
            if at in done:
                continue
            part = records[at : at + portion]
            ids = [r.id for r in part]
            note(at, "started", ids)
            stand(at, "before")
            source.send(part)
            stand(at, "after")
            note(at, "ok", ids)
            time.sleep(float(order["pause_s"]))


if __name__ == "__main__":
    main()
