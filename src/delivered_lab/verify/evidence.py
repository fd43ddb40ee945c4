"""Everything a judge may look at: input, output, observations during the run, and the faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from delivered.model.guarantee import Guarantee


@dataclass(frozen=True)
class Seen:
    """One effect, as a reader of the sink found it.

    Attributes:
        effect: its identity: the record's id and a digest of its content.
        partition: the part of the sink that keeps order: a partition, a table.
        position: grows within a partition in the order in which effects became visible.
        key, number: the record's key, and its position in the key's sequence; None: the workload has no sequences.
        at_s: when this reader saw it, in seconds since the run began.
    """

    effect: str
    partition: str = ""
    position: int = 0
    key: str | None = None
    number: int | None = None
    at_s: float = 0.0


@dataclass(frozen=True)
class Stop:
    """How a run of the pipeline had to end, and how it did.

    Attributes:
        wanted: codes of the errors that are correct here, without prefix; empty: it had to run to the end.
        got: code of the run's error; None: it succeeded. "?" if it failed without a code.
        when: the moment in the case.
    """

    wanted: tuple[str, ...] = ()
    got: str | None = None
    when: str = ""

    @property
    def right(self) -> bool:
        return self.got in self.wanted if self.wanted else self.got is None


@dataclass
class Evidence:
    """
    Attributes:
        expected: effect -> copies, from the source as read at the end. A record that is in the source twice is
            expected twice.
        wanted: for an operator, key -> the effect its newest row must be; None: rows have no such keys.
        states: for an operator whose rows replace others, the effects present after each batch, from the first one on;
            None: all rows stay.
        acknowledged: ids of records whose sends were confirmed.
        in_source: ids found in the source.
        offered: ids ever sent, whatever the outcome.
        seen: by the continuous reader, in its order.
        final: by the last reader, after everything ended; None: there was no final read.
        snapshots: moments at which the reader saw the whole sink at once, as (seconds, effects visible).
        batches: effects of each batch, from the checkpoint and the source; None: unknown.
        batch_atomic: whether the sink claims that a batch becomes visible atomically.
        ordered: whether effects of one key must become visible in the order in which they were sent.
        given_up: records that the product reports as given up; None: it reports none.
        audit_verdict: of the product's own audit, "held", "broken" or "unknown"; None: it was not run.
        open_transactions: what blocks readers after the end; None: not checked.
        required, fired: names of faults.
        stops: ends of the runs whose outcome matters; the last one is the end of the case.
        stays_down: the pipeline is right to stay stopped: what it did not reach is not lost.
        recovery_s: seconds from each restart after a SIGKILL to the first new effect; plain_s: of a plain restart.
    """

    guarantee: Guarantee
    expected: Counter[str] = field(default_factory=Counter)
    wanted: Mapping[str, str] | None = None
    states: Sequence[frozenset[str]] | None = None
    acknowledged: frozenset[str] = frozenset()
    in_source: Counter[str] = field(default_factory=Counter)
    offered: frozenset[str] | None = None
    seen: Sequence[Seen] = ()
    final: Sequence[Seen] | None = None
    snapshots: Sequence[tuple[float, frozenset[str]]] = ()
    batches: Mapping[int, frozenset[str]] | None = None
    batch_atomic: bool = False
    ordered: bool = False
    given_up: int | None = None
    audit_verdict: str | None = None
    open_transactions: Sequence[str] | None = None
    required: Sequence[str] = ()
    fired: Sequence[str] = ()
    stops: Sequence[Stop] = ()
    stays_down: bool = False
    recovery_s: Sequence[float] = ()
    plain_s: float | None = None

    @property
    def found(self) -> Counter[str]:
        """Effect -> copies in the final read.

        Raises:
            ValueError: there was none.
        """
        if self.final is None:
            raise ValueError("nobody read the sink at the end")
        return Counter(s.effect for s in self.final)
