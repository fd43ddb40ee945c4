"""The seals of a sink, as an audit reads and extends them. No Spark."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from delivered.audit.continuation import (
    EXPIRED_IN_SINK,
    Auditor,
    Chain,
    Compared,
    Cut,
    Start,
    Unaudited,
    audited,
    check_ledger,
    continuable,
    ended_unaudited,
    is_behind,
    is_firm,
    is_placed,
    never_audited,
    replaced_checkpoint,
    shared,
    unaudited_by,
)
from delivered.audit.evidence import LedgerAccount, read_ledger
from delivered.audit.judge import Result, report_of_ledger
from delivered.audit.report import AuditReport, Continuation
from delivered.audit.request import AuditRequest, Positions, Sealing, SourceSet, as_text, parsed
from delivered.audit.seal import Seal, chain_faults, digest_of, stored_seal
from delivered.checkpoint import read_view
from delivered.checkpoint.history import last_seal
from delivered.checkpoint.sidecar import read_first, stream_driver
from delivered.contract.sink import BoundedScan, Changes
from delivered.contract.source import Offsets
from delivered.engine import Sinks
from delivered.engine.context import open_shared_ledger
from delivered.ledger import Ledger
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError
from delivered.model.identity import Scope
from delivered.model.work import Account, Failed, Ok, Unknown

_CUT_TRIES = 3
_CUT_WAIT_S = 5.0
"""How long a batch in flight is waited for, under a guarantee that lets its rows show before its decision."""
_SHARES_READ = 200
"""Newest seals in which the share of the keys is found that was compared last."""
_NO_ORDER = "its rows have no order that lasts"


def read_account(request: AuditRequest, scope: Scope) -> LedgerAccount:
    return read_ledger(request.sink, scope, request.guarantee, request.decided_by, request.dead_letters)


def why_read_again(request: AuditRequest) -> str:
    return request.sink.capability().why_read_again(dedup=request.dedup is not None)


def open_sources(request: AuditRequest) -> SourceSet:
    at = request.checkpoint
    return SourceSet(
        {n: stream_driver(s, at, writes=False, name=n) for n, s in request.sources.items()},
        {n: read_first(at, n) for n in request.sources},
    )


def find_cut(request: AuditRequest, scope: Scope, scan: BoundedScan, *, positions: bool) -> Cut:
    """Where the audit stops: read the ledger, the sink's position, the checkpoint, the ledger again.

    Rows of batches that the first look at the ledger shows lie before the position. If the second one shows the same,
    rows of all others lie behind it, and batches and positions meet there.

    Args:
        positions: the sink has them.
    """
    after = read_account(request, scope)
    if not positions:
        return Cut(after)
    firm: Cut | None = None
    for _ in range(_CUT_TRIES):
        before, position = after, scan.position()
        started = read_view(request.checkpoint).batch
        after = _settled(request, scope, started)
        if position is None:
            return Cut(after)
        if not is_firm(request.guarantee, after, started):
            continue
        settled = -1 if before.visible is None else before.visible.batch
        firm = Cut(after, position, position, settled)
        if after.visible is not None and settled == after.visible.batch:
            return replace(firm, kept=scan.kept(position))
    until = scan.position()
    if firm is None or firm.position is None:
        return Cut(after, until=until)
    return replace(firm, until=until, kept=scan.kept(firm.position))


def unchanged_cut(
    guarantee: Guarantee, ledger: LedgerAccount, position: Offsets | None, started: int, scan: BoundedScan
) -> Cut:
    """Where an audit stops that has read the sink while its ledger did not change.

    Args:
        position: of the sink; read, as `started`, between two looks at the ledger.
        started: the newest batch by the checkpoint.
    """
    if position is None or ledger.visible is None or not is_firm(guarantee, ledger, started):
        return Cut(ledger, until=position)
    return Cut(ledger, position, position, ledger.visible.batch, scan.kept(position))


def _settled(request: AuditRequest, scope: Scope, started: int) -> LedgerAccount:
    """The ledger, once it has decided the batch that had started, or after a while."""
    deadline = time.monotonic() + _CUT_WAIT_S
    while True:
        account = read_account(request, scope)
        decided = -1 if account.visible is None else account.visible.batch
        if request.guarantee is Guarantee.EXACTLY_ONCE or decided >= started or time.monotonic() > deadline:
            return account
        time.sleep(0.2)


class Seals:
    """Of one sink, for one audit.

    Args:
        request: with `sealing`.
        scope: of the sink, in this checkpoint.
    """

    def __init__(self, request: AuditRequest, scope: Scope) -> None:
        self._request, self._scope, self._sink = request, scope, request.named_sink
        self._how = request.sealing or Sealing()

    def start(self, scan: BoundedScan, ledger: LedgerAccount) -> Start:
        """Where this audit starts.

        Raises:
            DeliveredError: a seal, the ledger and the sink do not fit together, so that it cannot continue.
        """
        reads_all = why_read_again(self._request)
        if not reads_all and scan.position() is None:
            reads_all = _NO_ORDER
        with self._ledger() as seals:
            chain = self._chain(seals, ledger)
            if reads_all:
                return Start(replace(chain, base=None), reads_all)
            base = self._readable_base(seals, ledger) if self._how.full else chain.base
            if base is not None and base.scope == self._scope and not is_placed(base):
                base = next(reversed(self._continuable(seals.seals(self._sink))), None)
            chain = replace(chain, base=base)
            if base is None:
                return Start(chain, unread=self._unread(Changes()))
            behind = [unaudited_by(s) for s in self._behind(seals, base)]
            replaced, after, account = None, base.last, base.account
            if base.scope.incarnation == self._scope.incarnation:
                check_ledger(base, ledger, self._sink)
            else:
                after, account = -1, Account()
                earlier = {d.scope.incarnation: d for d in seals.look().earlier}
                replaced = replaced_checkpoint(base, earlier.get(base.scope.incarnation), self._sink)
        changes = self._changes(scan, base)
        behind += [replaced] if replaced is not None else []
        return Start(chain, "", after, account, tuple(behind), replaced, self._unread(changes), changes)

    def from_now(self, scan: BoundedScan, start: Start) -> AuditReport:
        """Compare nothing: seal everything up to now as never audited."""
        cut = find_cut(self._request, self._scope, scan, positions=not start.reads_all)
        report = report_of_ledger(self._request, cut.ledger, start.unread)
        visible = cut.ledger.visible
        if visible is None or visible.batch <= start.after:
            return self._reported(report, start, start.after, [], "")
        if cut.position is None and not start.reads_all:
            return self._reported(report, start, visible.batch, [], "batches follow each other too fast; try again")
        base = start.chain.own(self._scope)
        if base is not None:
            begin = base.end
        else:
            with closing(open_sources(self._request)) as sources:
                begin = as_text(sources.first)
        total = Account(visible.total, visible.given_up)
        everything = Unaudited(
            self._scope,
            start.after + 1,
            visible.batch,
            begin,
            visible.offsets,
            total - start.account,
            total,
            start.unread,
        )
        chain, seals = self._with_replaced(start)
        seals.append(ended_unaudited(chain, everything, cut, self._auditor()))
        return self._added(report, start, visible.batch, seals)

    def seal(self, report: AuditReport, compared: Compared | None, cut: Cut, start: Start) -> AuditReport:
        """The report of an audit, sealed."""
        report = _with_changes(report, start)
        visible = cut.ledger.visible
        if visible is None or compared is None:
            why = "nothing was compared" if compared is None else "no batch is decided"
            return self._reported(report, start, start.after, [], why)
        if visible.batch <= start.after:
            return self._reported(report, start, start.after, [], "")
        chain, seals = self._with_replaced(start)
        by = self._auditor()
        for one in compared.skipped:
            is_last = one is compared.skipped[-1] and compared.first > visible.batch
            seal = ended_unaudited(chain, one, cut, by, report) if is_last else never_audited(chain, one, by, report)
            seals.append(seal)
            chain = Chain.after(seal)
        if compared.first <= visible.batch:
            behind = (*start.behind, *compared.skipped)
            own = report if compared.rest else _without_unaudited(report)
            version_ = self._request.transform_version
            seals.append(audited(chain, self._scope, compared, behind, cut, own, version_, by))
        return self._added(report, start, visible.batch, seals)

    def seal_all(self, report: AuditReport, cut: Cut, begin: Positions) -> AuditReport:
        """The report of a recomputation, sealed."""
        with self._ledger() as seals:
            chain = self._chain(seals, cut.ledger)
        start = Start(replace(chain, base=None), "a recomputation compares all batches")
        compared = Compared(0, as_text(begin), Account(), Result(report.counts))
        return self.seal(report, compared, cut, start)

    def seal_share(self, report: AuditReport, ledger: LedgerAccount, begin: str) -> AuditReport:
        """The report on a share of the keys, sealed. Args: begin: where batch 0 starts in the source."""
        visible = ledger.visible
        if visible is None:
            return report
        with self._ledger() as seals:
            chain = self._chain(seals, ledger)
        seal = shared(chain, self._scope, begin, ledger, report, self._request.transform_version, self._auditor())
        return self._added(report, Start(), visible.batch, [seal])

    def shares(self) -> list[Mapping[str, Any]]:
        """The newest seals of shares of the keys, oldest first, as `KeyShare.after` takes them."""
        with self._ledger() as ledger:
            text = ledger.last_seal(self._sink)
            first = 0 if text is None else max(0, self._parsed(text).number + 1 - _SHARES_READ)
            seals = [self._parsed(text) for text in ledger.seals(self._sink, first)]
        return [{"sink": self._sink, "keys": seal.keys} for seal in seals if seal.keys is not None]

    def _with_replaced(self, start: Start) -> tuple[Chain, list[Seal]]:
        if start.replaced is None:
            return start.chain, []
        seal = never_audited(start.chain, start.replaced, self._auditor())
        return Chain.after(seal), [seal]

    def _added(self, report: AuditReport, start: Start, last: int, seals: Sequence[Seal]) -> AuditReport:
        """The report, once the seals are in the ledger; or with why they are not."""
        added: list[Seal] = []
        with self._ledger() as ledger:
            for seal in seals:
                if why := self._add(ledger, seal):
                    return self._reported(report, start, last, added, why)
                added.append(seal)
        return self._reported(report, start, last, added, "")

    def _add(self, ledger: Ledger, seal: Seal) -> str:
        """Why it could not be added; empty: it is in the ledger."""
        try:
            match ledger.add_seal(self._sink, seal.number, seal.text):
                case Ok():
                    return ""
                case Unknown(why):
                    return "" if seal.text in ledger.seals(self._sink, seal.number) else why
                case Failed(why):
                    newest = ledger.last_seal(self._sink)
                    if newest is not None and Seal.parse(newest).number >= seal.number:
                        return f"another audit has sealed these batches meanwhile, as number {seal.number}"
                    return why
        except DeliveredError as error:
            return str(error)

    def _reported(
        self, report: AuditReport, start: Start, last: int, seals: Sequence[Seal], not_sealed: str
    ) -> AuditReport:
        known = Continuation(
            start.after + 1, last, start.base, tuple(seals), not_sealed, start.reads_all, start.changes.expired
        )
        return replace(report, continuation=known)

    def _auditor(self) -> Auditor:
        return Auditor(f"delivered {version('delivered')}", time.time_ns() // 1_000_000)

    @contextmanager
    def _ledger(self) -> Iterator[Ledger]:
        sinks = self._request.decided_by or Sinks.one(self._request.sink, self._sink)
        with closing(open_shared_ledger(sinks, replace(self._scope, sink=sinks.decider.name))) as ledger:
            yield ledger

    def _chain(self, ledger: Ledger, account: LedgerAccount) -> Chain:
        text = ledger.last_seal(self._sink)
        recorded = last_seal(self._request.checkpoint, self._sink)
        if text is None:
            if recorded is not None:
                self._check_recorded(recorded, -1, "")
            return Chain()
        digest = digest_of(text)
        if self._how.full:
            return Chain(len(list(ledger.seals(self._sink))), digest)
        last = self._parsed(text)
        full = last.number if last.keys is None else last.full
        texts = list(ledger.seals(self._sink, max(0, full - 1)))
        faults = list(chain_faults(texts))
        if faults:
            raise DeliveredError("AUDIT_SEAL.CHANGED", sink=self._sink, faults="; ".join(faults))
        if recorded is not None:
            self._check_recorded(recorded, last.number, digest)
        since = self._how.since
        if since is None:
            base = next((s for s in map(self._parsed, reversed(texts)) if s.keys is None), None)
            return Chain(last.number + 1, digest, base)
        newest = -1 if account.visible is None else account.visible.batch
        if since > newest:
            raise DeliveredError("AUDIT_SEAL.SINCE", since=since, sink=self._sink, batch=newest)
        own = [s for s in self._continuable(ledger.seals(self._sink)) if s.last < since]
        return Chain(last.number + 1, digest, own[-1] if own else None)

    def _readable_base(self, ledger: Ledger, account: LedgerAccount) -> Seal | None:
        """Of an audit that reads everything: the oldest seal behind which the sources still have all records; None:
        they have all of the checkpoint's, or the seals do not fit to the ledger."""
        texts = list(ledger.seals(self._sink))
        if not texts or list(chain_faults(texts)):
            return None
        own = self._continuable(texts)
        with closing(open_sources(self._request)) as sources:
            if not own or sources.unknown or sources.is_readable(sources.first):
                return None
            base = next((s for s in own if sources.is_readable(parsed(s.end))), own[-1])
        try:
            check_ledger(base, account, self._sink)
        except DeliveredError:
            return None
        return base

    def _continuable(self, texts: Iterable[str]) -> list[Seal]:
        return continuable(s for s in map(self._parsed, texts) if s.scope == self._scope)

    def _check_recorded(self, recorded: dict[str, object], newest: int, digest: str) -> None:
        """Compare with what the checkpoint says of its last audit."""
        number = int(str(recorded["number"]))
        if self._how.full or number < newest:
            return
        if number > newest:
            raise DeliveredError(
                "AUDIT_SEAL.MISSING",
                checkpoint=self._request.checkpoint,
                number=number,
                sink=self._sink,
                newest="none" if newest < 0 else newest,
            )
        if recorded["sha256"] != digest:
            faults = f"seal {number} has another hash than the checkpoint recorded"
            raise DeliveredError("AUDIT_SEAL.CHANGED", sink=self._sink, faults=faults)

    def _parsed(self, text: str) -> Seal:
        return stored_seal(text, self._sink)

    def _behind(self, ledger: Ledger, base: Seal) -> list[Seal]:
        """Seals of batches that were not compared, and whose rows are still to be read; oldest first."""
        found: list[Seal] = []
        seal: Seal | None = base
        while seal is not None and is_behind(seal):
            found.insert(0, seal)
            seal = self._before(ledger, seal)
        return found

    def _before(self, ledger: Ledger, seal: Seal) -> Seal | None:
        """The seal of all keys before this one."""
        number = seal.number - 1
        while number >= 0 and (text := next(iter(ledger.seals(self._sink, number)), None)) is not None:
            before = self._parsed(text)
            if before.keys is None:
                return before
            number = before.full
        return None

    def _changes(self, scan: BoundedScan, base: Seal) -> Changes:
        if base.sink_end is None:
            return Changes()
        changes = scan.changes(base.sink_end, base.sink_kept)
        if not changes.continues:
            what = "; ".join((*changes.altered, *changes.missed, *changes.unknown))
            raise DeliveredError("AUDIT_SEAL.SINK", sink=self._sink, number=base.number, changes=what)
        return changes

    def _unread(self, changes: Changes) -> str:
        if self._how.from_now:
            return "not audited before: sealed from here on"
        if changes.missed:
            return f"the sink had dropped records before they were audited: {'; '.join(changes.missed)}"
        return ""


def _with_changes(report: AuditReport, start: Start) -> AuditReport:
    """The report, with what happened to the sealed part of the sink."""
    if start.base is None or not (start.changes.altered or start.changes.unknown):
        return report
    altered = [
        f"what seal {start.base.number} and earlier ones proved is no longer what the sink holds: {what}; "
        "`delivered audit FILE --full` compares everything once more"
        for what in start.changes.altered
    ]
    notes = [f"of what was sealed before: {what}" for what in start.changes.unknown]
    return replace(report, unknowns=(*report.unknowns, *altered), notes=(*report.notes, *notes))


def _without_unaudited(report: AuditReport) -> AuditReport:
    """The report on what was compared alone."""
    report = replace(report, unknowns=tuple(u for u in report.unknowns if not u.startswith(EXPIRED_IN_SINK)))
    if report.earlier is None:
        return report
    clause = report.earlier.clause
    return replace(report, earlier=None, unknowns=tuple(u for u in report.unknowns if not u.startswith(clause)))
