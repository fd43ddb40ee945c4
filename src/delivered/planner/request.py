"""The request, and the facts gathered about it. Frozen; callers query servers, the planner does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from delivered.contract.finding import Finding
from delivered.model.bad_row import OnBadRow
from delivered.model.capability import LedgerPlace, SinkCapability, SourceCapability
from delivered.model.dedup import Dedup
from delivered.model.guarantee import Guarantee
from delivered.model.identity import by_source
from delivered.model.work import Owner


class Trigger(StrEnum):
    """When Spark starts batches."""

    AVAILABLE_NOW = "available_now"
    PROCESSING_TIME = "processing_time"
    CONTINUOUS = "continuous"
    REAL_TIME = "real_time"


@dataclass(frozen=True)
class SourceFacts:
    """
    Attributes:
        name: distinguishes this source from others of the pipeline; empty: it is the only one.
        label: system and what is read from it, for display: "kafka orders".
        findings: what preflight found at the live source; empty if it did not run.
    """

    label: str
    capability: SourceCapability
    findings: tuple[Finding, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class SinkFacts:
    """
    Attributes:
        name: distinguishes this sink from others of the pipeline.
        checked: what preflight looked at in its target.
    """

    name: str
    label: str
    capability: SinkCapability
    findings: tuple[Finding, ...] = ()
    checked: tuple[str, ...] = ()


@dataclass(frozen=True)
class TransformFacts:
    """
    Attributes:
        kind: "none", "sql", "python" (DataFrame -> DataFrame) or "arrow" (record batch -> record batch).
        text: the SQL, or the function's name.
        stateful: it keeps state between batches, as declared or detected.
        deterministic: the same input gives the same rows; None: not declared.
        changing: nondeterministic functions that it calls: "uuid()".
        findings: of checking it against the source's columns, and its columns against the sinks.
    """

    kind: str = "none"
    text: str = ""
    stateful: bool = False
    deterministic: bool | None = None
    changing: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    def seen(self, changing: tuple[str, ...], stateful: bool = False) -> TransformFacts:
        """Completed with what its code shows. Declared values take precedence."""
        if self.deterministic is not None:
            changing = ()
        deterministic = False if changing else self.deterministic
        stateful = stateful or self.stateful
        return replace(self, stateful=stateful, deterministic=deterministic, changing=(*self.changing, *changing))


@dataclass(frozen=True)
class Execution:
    """
    Attributes:
        async_progress: Spark logs a batch's offsets while or after it runs.
        cluster: executors run on other machines than the driver.
        batch_s_max: how long a batch may take, as the user declared it; None: not declared.
    """

    trigger: Trigger = Trigger.AVAILABLE_NOW
    async_progress: bool = False
    cluster: bool = False
    batch_s_max: float | None = None


@dataclass(frozen=True)
class EarlierFacts:
    """What another checkpoint of the same pipeline wrote to this sink, up to `batch`."""

    incarnation: str
    batch: int
    offsets: str


@dataclass(frozen=True)
class CheckpointFacts:
    """
    Attributes:
        incarnation: None: the checkpoint is new.
        newest: the newest batch whose offsets Spark logged; None: none.
        ledger_newest: the newest batch that the ledger holds for this incarnation; None: none, or not read.
        owner: another live driver that owns the ledger; None: there is none.
        takeover: the user wants that driver fenced.
        earlier: what the ledger has of another checkpoint, if it has nothing of this one; else None.
        accepts_new: the user accepts that this checkpoint starts over.
        transform_changed: first and newest batch that ran with another transform than the current one; None: the newest
            one ran with the current one, or it is unknown.
        unwritable: why Spark could not write it; None: it could, or it is unknown.
        ledger_behind: the ledger has lost decided batches, and the user did not accept that.
        ledger_offsets: where the ledger's last decided batch of this incarnation ended; empty: there is none.
        ledger_others: further sinks that it was decided for.
        ledger_missing: the ledger has none of the checkpoint's batches, and the user did not accept that.
        offsets_text: the sources' offsets of the newest batch, as Spark logged them; empty: none.
        unfinished: Spark has not committed that batch.
        other_decider: the sink that decided this checkpoint's batches, if the pipeline no longer has it and the ledger
            of the deciding one may lack the newest batch; else None.
        removed: where sources ended that were removed from the query earlier, by name.
        other_dedup: the checkpoint's dedup, for display, if the pipeline's differs; else None.
    """

    location: str
    incarnation: str | None = None
    newest: int | None = None
    ledger_newest: int | None = None
    owner: Owner | None = None
    takeover: bool = False
    earlier: EarlierFacts | None = None
    accepts_new: bool = False
    other_dedup: str | None = None
    unwritable: str | None = None
    ledger_missing: bool = False
    ledger_behind: bool = False
    ledger_offsets: str = ""
    ledger_others: tuple[str, ...] = ()
    transform_changed: tuple[int, int] | None = None
    offsets_text: str = ""
    unfinished: bool = False
    other_decider: str | None = None
    removed: Mapping[str, str] = field(default_factory=dict)

    @property
    def offsets(self) -> dict[str, str]:
        """Of the newest batch, by source."""
        return by_source(self.offsets_text)


@dataclass(frozen=True)
class Alternatives:
    """Systems that a refusal recommends.

    Attributes:
        transactional: their sinks can prepare a batch until it is decided; key_tables: they can keep a dedup's keys.
    """

    transactional: tuple[str, ...] = ()
    key_tables: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """A pipeline, and what is known about it.

    Attributes:
        on_bad_row: what happens to a row that is invalid for a sink.
        dead_letters: name of the dead-letter sink, which is the last one; None: there is none.
        dedup: which duplicates in the source are dropped; None: none.
        output_mode: of the query, as Spark spells it.
    """

    pipeline: str
    guarantee: Guarantee
    sources: tuple[SourceFacts, ...]
    sinks: tuple[SinkFacts, ...]
    checkpoint: CheckpointFacts
    transform: TransformFacts = TransformFacts()
    execution: Execution = Execution()
    on_bad_row: OnBadRow = OnBadRow.FAIL
    dead_letters: str | None = None
    dedup: Dedup | None = None
    alternatives: Alternatives = Alternatives()
    output_mode: str = "append"

    @property
    def ledger(self) -> LedgerPlace:
        return LedgerPlace.among([s.capability for s in self.sinks])

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Of every source and sink, and of the transform."""
        parts: tuple[SourceFacts | SinkFacts | TransformFacts, ...] = (*self.sources, *self.sinks, self.transform)
        return tuple(f for part in parts for f in part.findings)

    @property
    def decider(self) -> SinkFacts:
        """The sink that keeps the ledger."""
        return self.sinks[self.ledger.sink]

    def by_count(self, one: str, several: str) -> str:
        """What a sentence says if there is one sink, or if there are several."""
        return one if len(self.sinks) == 1 else several

    @property
    def keeps_state(self) -> bool:
        """Whether Spark's checkpoint holds state of the query."""
        return self.transform.stateful or (self.dedup is not None and not self.dedup.in_table)
