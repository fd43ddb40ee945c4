"""Where each pipeline is killed: three points of its plan, in three batches.

The batch is given, so that every kill meets another one: batch 0 and the last one go through undisturbed.
"""

from __future__ import annotations

BATCH_ROWS = 60_000
"""Six batches out of 336,776 flights."""

CRASHES: dict[str, tuple[str, ...]] = {
    "exactly_once": (
        "write.prepare:after@batch=1",  # a shard promised to commit, nothing is decided: the batch runs again
        "commit.decide:after@batch=2",  # the decision is durable, the driver dies: recovery finishes the batch
        "commit.apply:after@batch=4",  # between the first shard made visible and the second one
    ),
    "at_least_once": (
        "write.send:after@batch=1",  # some rows left
        "write.flush:after@batch=2",  # all rows of a shard are in
        "commit.record:before@batch=4",  # all rows of the batch are in, and nobody wrote it down
    ),
    "at_most_once": (
        "batch.begin:after@batch=1",  # the batch is recorded as started, no row left: all of it is given up
        "write.send:after@batch=2",  # some rows left, the rest is given up
        "commit.record:before@batch=4",  # all rows are in, and nobody can know: given up, not lost
    ),
}
"""Guarantee -> crash points, as `delivered.crash` writes them."""
