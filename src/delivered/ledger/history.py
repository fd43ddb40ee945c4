"""What a ledger keeps of the checkpoints of one pipeline and sink, and what it may forget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from delivered.model.archive import Archived
from delivered.model.identity import Scope
from delivered.model.limits import LEDGER_INCARNATIONS
from delivered.model.work import Begun, Decision, LedgerState, Owner


def state_of(
    scope: Scope,
    owner: Owner | None,
    epoch: int,
    decisions: Iterable[Decision],
    begun: Mapping[str, Begun],
    archived: Callable[[str], Archived | None],
) -> LedgerState:
    """A ledger's state, from the records that its store holds.

    Args:
        decisions: the newest of each incarnation, in any order.
        begun: incarnation -> its last begun batch, oldest first.
        archived: finds the archived entry of an incarnation.
    """
    newest = {d.scope.incarnation: d for d in decisions}
    last = newest.pop(scope.incarnation, None)
    return LedgerState(
        owner=owner,
        last=last,
        begun=begun.get(scope.incarnation),
        earlier=tuple(sorted(newest.values(), key=lambda d: d.decided_at_ms, reverse=True)),
        earlier_begun=tuple(
            (i, b) for i, b in reversed([*begun.items()]) if i != scope.incarnation and i not in newest
        ),
        epoch=epoch,
        archived=archived(scope.incarnation) if last is None else None,
    )


@dataclass(frozen=True)
class Outdated:
    """
    Attributes:
        incarnations: whose records are deleted, except for their entries in the archive.
        entries: what is kept of them permanently.
    """

    incarnations: tuple[str, ...]
    entries: tuple[Archived, ...]


def outdated(state: LedgerState) -> Outdated:
    """Which incarnations a claim forgets: those beyond the newest ones, but never this checkpoint's."""
    decided, begun = state.earlier[LEDGER_INCARNATIONS:], state.earlier_begun[LEDGER_INCARNATIONS:]
    return Outdated(
        (*(d.scope.incarnation for d in decided), *(i for i, _ in begun)),
        (*(d.archived for d in decided), *(Archived.begun(i) for i, _ in begun)),
    )
