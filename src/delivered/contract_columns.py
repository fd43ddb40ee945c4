"""What a source implements whose columns its system tells: they may change while a query runs. Opt-in."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from delivered.contract import Source


@runtime_checkable
class Planned(Protocol):
    def planned(self) -> Source:
        """The same source with the columns of now, whatever comes later; of one that has them already, itself.

        Runs on the driver, once for each query, before `schema`. Asks the system; raises UsageError if there are none.
        """


def planned(source: Source) -> Source:
    """What has to be called before a query is built on any source."""
    return source.planned() if isinstance(source, Planned) else source
