"""What the process that plans a source tells the one that plans the sink of the same batch.

Spark logs where a batch ends and tells a source nothing of the checkpoint; the sink knows it. Both processes run on the
driver's machine and carry the same driver id, so a small file between them is enough. From it the sink keeps in the
checkpoint's sidecar where batch 0 began (first_offsets.py) and, in the bare idiom, what the source knows of its offsets
(offset_metadata.py).
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from delivered.contract.source import Offsets


@dataclass(frozen=True)
class SourceFacts:
    """
    Attributes:
        start: where the batch begins, if it is the first of a checkpoint.
        bare: the source does not know the checkpoint, and cannot ask where its first batch began.
        metadata: of the batch's end, where the source does not know the checkpoint.
        lasting, identities, strict: what the source says of it; see `HasOffsetMetadata`.
    """

    start: Offsets | None = None
    bare: bool = False
    metadata: Offsets = field(default_factory=dict)
    lasting: Sequence[str] = ()
    identities: Sequence[str] = ()
    strict: bool = True


class Teller:
    """The source's side: keeps the facts of its newest batch in a file, until the source stops."""

    def __init__(self, driver_id: str) -> None:
        self._driver_id = driver_id
        self._name = uuid.uuid4().hex
        self._told: Path | None = None
        self._stops_at_exit = False

    def tell(self, end: Offsets, facts: SourceFacts) -> None:
        """Say this of the batch that ends at `end`. May be called again. Where there is no place for the file, nothing
        is told: that costs what the sink would have kept, and nothing else."""
        path = _folder(self._driver_id, end) / f"{os.getpid()}-{self._name}"
        if path != self._told:
            self.stop()
        if not self._stops_at_exit:  # Spark ends this process without a word to the source
            atexit.register(self.stop)
            self._stops_at_exit = True
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
            draft = path.with_suffix(".draft")
            draft.write_text(json.dumps(asdict(facts)))
            draft.replace(path)
            self._told = path

    def stop(self) -> None:
        """Take it back."""
        if self._told is not None:
            with contextlib.suppress(OSError):
                self._told.unlink(missing_ok=True)
                self._told.parent.rmdir()  # only an empty one goes
                self._told.parent.parent.rmdir()
            self._told = None


def told(driver_id: str, logged: str) -> SourceFacts:
    """What was told of the batch whose end Spark logged as `logged`; empty if nothing was.

    Queries of one driver whose batches end at one place cannot be told apart: what they do not agree on is left out.

    Args:
        logged: the sources' offsets, a line each; of several sources nothing is told.
    """
    found: list[SourceFacts] = []
    with contextlib.suppress(OSError, ValueError):
        for path in sorted(_folder(driver_id, json.loads(logged)).iterdir()):
            # What a killed process told may be of a time before the topic was made again.
            if not path.suffix and psutil.pid_exists(int(path.name.split("-")[0])):
                found.append(SourceFacts(**json.loads(path.read_text())))

    def agreed(name: str, otherwise: Any) -> Any:
        values = [getattr(facts, name) for facts in found]
        return values[0] if values and all(v == values[0] for v in values) else otherwise

    return SourceFacts(
        agreed("start", None),
        any(f.bare for f in found),
        agreed("metadata", {}),
        agreed("lasting", ()),
        agreed("identities", ()),
        any(f.strict for f in found),
    )


def _folder(driver_id: str, end: Offsets) -> Path:
    # The id is random, so nobody else can have made this folder.
    name = hashlib.blake2b(json.dumps(end, sort_keys=True).encode(), digest_size=16).hexdigest()
    return Path(tempfile.gettempdir()) / f"delivered-batch-{driver_id}" / name
