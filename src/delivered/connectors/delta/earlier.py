"""What other incarnations of a pipeline, and other pipelines, left in a table's ledger: read, and forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from delivered.connectors.delta.records import Names, Records
from delivered.model.archive import Archived
from delivered.model.errors import InvariantBroken
from delivered.model.identity import OtherLedger, Scope, named_first
from delivered.model.limits import LEDGER_INCARNATIONS, OWNERS_REMEMBERED
from delivered.model.work import Begun, Decision


@dataclass(frozen=True)
class Earlier:
    """
    Attributes:
        decisions: the newest of each other incarnation, newest first.
        begun: batches of other incarnations that decided none.
    """

    decisions: tuple[Decision, ...]
    begun: tuple[tuple[str, Begun], ...]


def read(records: Records, table: Any) -> Earlier:
    own = records.names.scope.incarnation
    found = [_last(records, table, i) for i in records.incarnations() if i != own]
    decisions = sorted((d for d in found if d is not None), key=lambda d: -d.decided_at_ms)
    return Earlier(tuple(decisions), tuple((i, b) for i, b in records.only_begun(table) if i != own))


def outdated(records: Records, table: Any, earlier: Earlier, claim: int) -> list[str]:
    """Files that nobody needs any more, once what is left of old incarnations is in the archive.

    Args:
        claim: the newest.
    """
    own, names = records.names.scope.incarnation, records.names
    kept = {d.scope.incarnation for d in earlier.decisions[:LEDGER_INCARNATIONS]} | {own}
    open_batches = {i for i, _ in earlier.begun[:LEDGER_INCARNATIONS]}
    old = [d.archived for d in earlier.decisions[LEDGER_INCARNATIONS:]]
    records.archive.add([*old, *(Archived.begun(i) for i, _ in earlier.begun[LEDGER_INCARNATIONS:])])
    gone: list[str] = []
    for incarnation in records.incarnations():
        newest = records.newest(table, incarnation)
        keep = {names.decided_file(incarnation, *newest)} if newest and incarnation in kept else set()
        if incarnation != own:
            gone += [f for f in records.store.files(names.decided_folder(incarnation)) if f not in keep]
    for incarnation in records.begun_incarnations():
        if incarnation not in kept | open_batches:
            gone += list(records.store.files(names.begun_folder(incarnation)))
    # Some are kept: somebody may just read one that was the newest a moment ago. Files of claims that are under way are
    # newer than the newest that counts. What has no claim for a name is a file that another driver is just writing.
    files = records.store.files(f"{names.folder}/owner")
    owners = sorted((f for f in files if _claim_of(f)), key=_claim_of)
    return gone + [f for f in owners[:-OWNERS_REMEMBERED] if _claim_of(f) < claim]


def other_ledgers(records: Records, table: Any) -> list[OtherLedger]:
    """As `delivered.contract.powers.KnowsOthers.others`."""
    own, found = records.names.scope, []
    for p in records.store.folders("_delivered"):
        for s in records.store.folders(f"_delivered/{p}"):
            names = Names(Scope(p.removeprefix("p-"), s.removeprefix("s-"), own.incarnation))
            known = (names.batch(own.incarnation), names.begun(own.incarnation))
            holds = any(table.transaction_version(name) is not None for name in known)
            found.append(OtherLedger(names.scope.pipeline, names.scope.sink, holds))
    return named_first(o for o in found if (o.pipeline, o.sink) != (own.pipeline, own.sink))


def _last(records: Records, table: Any, incarnation: str) -> Decision | None:
    """The newest decision of another incarnation; None, too, if that is archived, and half taken away."""
    try:
        return records.last(table, incarnation)
    except InvariantBroken:
        if records.archive.read().find(incarnation) is None:
            raise
        return None


def _claim_of(name: str) -> int:
    digits = name.rpartition("/")[2].removesuffix(".json")
    return int(digits) if digits.isdigit() else 0
