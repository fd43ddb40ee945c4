"""The size of a message that a server accepts, which only it knows: an administrator sets it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from delivered.model.message_limits import too_long


@dataclass
class _Found:
    accepted: int = -1
    limit: int | None = None


class ServerLimits:
    """What this process found out, by server: nothing is asked twice.

    A limit that is changed later is found by the next process; until then, the server itself refuses the message.
    """

    def __init__(self, system: str) -> None:
        self._system = system
        self._found: dict[Hashable, _Found] = {}

    def refused(self, batch: pa.RecordBatch, server: Hashable, ask: Callable[[int], int | None]) -> pa.Array | None:
        """See `delivered.contract.trial.TriesRows`: rows whose value is longer than the server accepts.

        Args:
            ask: the server's limit, if a value of so many bytes is above it; None: it is accepted.
        """
        lengths = pc.fill_null(pc.binary_length(batch.column("value").cast(pa.large_binary())), 0).cast(pa.int64())
        longest, known = pc.max(lengths).as_py() or 0, self._found.setdefault(server, _Found())
        if longest > known.accepted and known.limit is None:
            known.limit = ask(longest)
            if known.limit is None:
                known.accepted = longest
        if known.limit is None or longest <= known.limit:
            return None
        reasons = [
            too_long(self._system, "value", n, known.limit).message if n > known.limit else None
            for n in lengths.to_pylist()
        ]
        return pa.array(reasons, pa.string())
