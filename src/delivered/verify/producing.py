"""A producer application beside the pipeline: a process of its own that can be killed and started again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from delivered.verify.history import End, History
from delivered.verify.producer import read_notes, write_records
from delivered.verify.services import VerifierError
from delivered.verify.systems.base import SourceClient, address
from delivered.verify.workloads import Record


class Producer:
    """A producer application that can be killed and started again.

    Args:
        again: started again, it sends again what it had begun and was not told about; else it leaves that out.
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
        write_records(records_file, list(left))
        self._order = {
            "source": address(source),
            "records": str(records_file),
            "notes": str(self._notes),
            "portion": portion,
            "pause_s": pause_s,
            "again": again,
        }
        self._told = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, stop_at: int | None = None, moment: str = "before") -> Path:
        """Start it, to stand still `moment` ("before", "after") it sends portion `stop_at`; None: not at all.

        Returns the file that appears when it stands there.
        """
        stands = self._folder / f"producer.{moment}-{stop_at}"
        stop = {} if stop_at is None else {"stop": {"portion": stop_at, "moment": moment, "file": str(stands)}}
        with (self._folder / "producer.log").open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "delivered.verify.producer", json.dumps(self._order | stop)],
                stdout=out,
                stderr=out,
            )
        return stands

    @property
    def acknowledged(self) -> int:
        """Portions that were acknowledged."""
        return sum(n["end"] == "ok" for n in read_notes(self._notes))

    def kill(self) -> None:
        """SIGKILL, wherever it is: before it sends, or while it waits for the acknowledgement."""
        if self._process is not None:
            psutil.Process(self._process.pid).kill()
            self._process.wait()
        self._note()

    def finish(self, timeout_s: float, most: int = 1) -> None:
        """Wait until it has sent everything; if it fails, start it again, at most so often in all.

        Raises:
            VerifierError: it failed.
        """
        for left in reversed(range(most)):
            if self._process is None or self._process.wait(timeout_s) == 0:
                break
            if not left:
                raise VerifierError("PRODUCER_FAILED", f"The producer of {self._folder.name} failed; see producer.log.")
            self.start()
        self._note()

    def _note(self) -> None:
        notes = read_notes(self._notes)
        for n in notes[self._told :]:
            self._history.add("producer", "send", End.OK if n["end"] == "ok" else End.BEGUN, {"ids": n["ids"]})
        self._told = len(notes)
