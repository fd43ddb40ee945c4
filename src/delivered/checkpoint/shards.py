"""Settings by which Spark divides a batch into shards, stored in the checkpoint's sidecar.

Shards whose prepared rows expired are written again after a restart, and compared with the decided ones: a rerun must
divide the batch alike. Spark keeps none of these settings for stateless queries, and derives some from the number of
cores.
"""

from __future__ import annotations

from collections.abc import Mapping

from delivered.checkpoint import folder

FILE = "delivered/shards.json"


def keep(location: str, now: Mapping[str, str]) -> dict[str, str]:
    """The settings for a query that starts: `now`, unless a batch is unfinished; then those that it was started with.

    Runs on the driver, before the query starts, and stores them.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read or written to.
    """
    what = "the settings of a checkpoint's shards"
    before = folder.read_record(location, FILE, what, _settings, "SHARDS_DAMAGED")
    _, newest = folder.logged(location)
    if before is not None and newest is not None and not folder.is_done(location, newest):
        return before
    if before != now:
        folder.write_record(location, FILE, {"settings": dict(now)})
    return dict(now)


def _settings(found: Mapping[str, dict[str, str]]) -> dict[str, str]:
    return {str(k): str(v) for k, v in found["settings"].items()}
