"""What a sink implements whose database remembers keys: a table of dedup that changes with the decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from delivered.model.identity import Scope

KEY_BYTES = 16
"""Of a key's hash: nobody makes two keys that meet in it, nor do they meet by chance."""


class KeyMemory(Protocol):
    """Keys of the records that decided batches delivered. Runs on executors; used by one thread.

    A key that is noted counts for nothing. The transaction of the decision makes those of its batch count, and forgets
    old ones. So a batch that runs again finds what it found before: never its own keys, and none of a batch that was
    not decided.
    """

    def known(self, batch: int, keys: Sequence[bytes]) -> dict[bytes, list[int]]:
        """For those of the keys that batches before this one delivered: until when each record of them is remembered,
        in microseconds since 1970, without those that were to be forgotten before this batch.

        May be called again, also after the batch was decided: the answer is the same.
        """

    def note(self, batch: int, keys: Sequence[bytes], times: Sequence[int], untils: Sequence[int]) -> None:
        """Note keys of a batch that runs: a record of this time was let in, and is remembered until then.

        Durable when it returns, and before any of the records goes on. May be called again by another attempt, with the
        same keys. What attempts under an earlier claim of the ledger noted is void.
        """

    def close(self) -> None:
        """Give connections back. May be called again."""


@runtime_checkable
class Remembers(Protocol):
    """A sink that keeps such a table in its database, beside the ledger. Opt-in; for the sink that decides."""

    def key_memory(self, scope: Scope) -> KeyMemory:
        """Runs on an executor. The ledger of the same scope was claimed before."""
