"""One committer for the participants of all sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from delivered.contract.sink import Committer, OpenTransaction, Shards
from delivered.model.errors import InvariantBroken
from delivered.model.identity import Scope, Target, Work
from delivered.model.outcome import Ok, Outcome, Unknown
from delivered.model.work import Prepared


def _at(sink: str, shards: Shards) -> Shards:
    return [(work, p) for work, p in shards if p.sink == sink]


def _earlier_at(sink: str, earlier: Callable[[], Sequence[Prepared]]) -> Sequence[Prepared]:
    return [p for p in earlier() if p.sink == sink]


class Committers:
    """The committers of a pipeline's sinks; a participant's is found by its sink.

    Attributes:
        by_name: by sink, in the order in which they are applied.
    """

    def __init__(self, committers: Mapping[str, Committer], scope: Scope) -> None:
        self._scope = scope
        self.by_name = committers
        self._is_set_up = False

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        return self._named(work.scope.sink).commit(work, prepared)

    def commit_all(self, shards: Shards) -> list[Outcome[None]]:
        """See `delivered.contract.sink.Committer`: by sink, for those that can."""
        outcomes: list[Outcome[None]] = [Unknown("not asked yet")] * len(shards)
        for sink, committer in self.by_name.items():
            own = [i for i, (work, _) in enumerate(shards) if work.scope.sink == sink]
            if own:
                for i, outcome in zip(own, committer.commit_all([shards[i] for i in own]), strict=True):
                    outcomes[i] = outcome
        return outcomes

    def settle_ends(self, decided: Shards, earlier: Callable[[], Sequence[Prepared]]) -> Outcome[int]:
        """See `delivered.contract.sink.Committer`: of every sink that does."""
        count = 0
        for sink, committer in self.by_name.items():
            match committer.settle_ends(_at(sink, decided), partial(_earlier_at, sink, earlier)):
                case Ok(lost):
                    count += lost
                case other:
                    return other
        return Ok(count)

    def ends_hold(self, applied: Sequence[Prepared]) -> bool:
        """See `delivered.contract.sink.Committer`."""
        return all(
            committer.ends_hold([p for p in applied if p.sink == sink]) for sink, committer in self.by_name.items()
        )

    def was_committed(self, work: Work, prepared: Prepared) -> bool:
        return self._named(work.scope.sink).was_committed(work, prepared)

    def abort(self, prepared: Prepared) -> Outcome[None]:
        return self._named(prepared.sink).abort(prepared)

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        """Abort every sink's orphans, even if another sink is unreachable: open transactions block readers."""
        self._set_up()
        count = 0
        failure: Outcome[int] | None = None
        for sink, committer in self.by_name.items():
            match committer.abort_orphans([p for p in keep if p.sink == sink]):
                case Ok(gone):
                    count += gone
                case other:
                    failure = failure or other
        return failure or Ok(count)

    def targets(self) -> dict[str, Target]:
        """See `delivered.contract.sink.Committer`: of every sink that has it."""
        every = [committer.targets() for committer in self.by_name.values()]
        return {sink: target for targets in every for sink, target in targets.items()}

    def open_transactions(self) -> list[OpenTransaction]:
        """Of every sink that holds them."""
        return [
            transaction for committer in self.by_name.values() for transaction in committer.open_transactions() or ()
        ]

    def close(self) -> None:
        for committer in self.by_name.values():
            committer.close()

    def _set_up(self) -> None:
        """Create what a claim of the sink's own ledger would have created."""
        if self._is_set_up:
            return
        for sink, committer in self.by_name.items():
            if sink != self._scope.sink:
                committer.set_up()
        self._is_set_up = True

    def _named(self, name: str) -> Committer:
        found = self.by_name.get(name)
        if found is None:
            raise InvariantBroken(
                "SINK_UNKNOWN",
                f"A participant belongs to the sink {name!r}, but pipeline {self._scope.pipeline!r} has "
                f"{sorted(self.by_name)}.",
                next_step="start once with the previous sinks, let one batch finish, stop, then change them",
            )
        return found
