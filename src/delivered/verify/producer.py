"""A producer application, to be killed: sends the records of a file in small portions and notes what was acknowledged.

    python -m delivered.verify.producer '{"source": ..., "records": file, "notes": file, "portion": 20, "pause_s": 0.1}'

A note is written before a portion leaves and after it was acknowledged, each on disk before it goes on. Started again,
it sends again what it had begun and was not told about: the source may then hold these twice. With `"again": false` it
leaves that out: the source may then hold it or not.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from delivered.verify.systems import from_address
from delivered.verify.workloads import Record


def write_records(path: Path, records: list[Record]) -> None:
    path.write_text("".join(json.dumps(asdict(r)) + "\n" for r in records), encoding="utf-8")


def read_notes(path: Path) -> list[dict[str, Any]]:
    """What a producer noted: {"at": portion, "end": "begun" | "ok", "ids": [...]}."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # killed while it wrote
    return found


def main() -> None:
    order = json.loads(sys.argv[1])
    source = from_address(order["source"])
    records = [Record(**json.loads(line)) for line in Path(order["records"]).read_text(encoding="utf-8").splitlines()]
    notes = Path(order["notes"])
    done = {n["at"] for n in read_notes(notes) if n["end"] == "ok" or not order.get("again", True)}
    portion = int(order["portion"])
    with notes.open("a", encoding="utf-8") as file:
        file.write("\n")  # a line that was cut off by a kill stays alone

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
            note(at, "begun", ids)
            stand(at, "before")
            source.send(part)
            stand(at, "after")
            note(at, "ok", ids)
            time.sleep(float(order["pause_s"]))


if __name__ == "__main__":
    main()
