"""What is checked: configurations of the model, and which invariants fail once one of its rules is taken out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from model.tlc import Constants, explore

INVARIANTS = (
    "NothingBeforeItsDecision",
    "NoneDoubled",
    "NoneLost",
    "LoggedIsDecided",
    "OneWriter",
    "NoFalseAlarm",
)
RULES = ("Evidence", "LedgerOrder", "Grant", "LeaderEnd", "EveryStart", "AsItEnded")
_EXACTLY = Constants(last=(1, 0), shards=1, claims=3, restarts=1, expired=1)
_TWO_RUNS = Constants(last=(0, 0), shards=1, claims=3, expired=1)
_AT_MOST = Constants(last=(1, 0), shards=1, claims=3, retries=2, at_most_once=True)


@dataclass(frozen=True)
class Run:
    """One configuration.

    Attributes:
        without: the rule that is taken out; "": none, the protocol as it is.
        fails: the invariants that then fail, all of them.
        quick: part of the tests.
    """

    name: str
    constants: Constants
    without: str = ""
    fails: frozenset[str] = field(default_factory=frozenset)
    quick: bool = False


_NOTHING, _DOUBLED, _LOST = INVARIANTS[:3]
_ALARM = INVARIANTS[-1]

RUNS = (
    Run("exactly_once, small", replace(_EXACTLY, claims=2, expired=0), quick=True),
    Run("exactly_once", replace(_EXACTLY, restarts=2, expired=2)),
    Run("exactly_once, tasks retried", replace(_EXACTLY, claims=2, restarts=2, retries=1)),
    Run("exactly_once, two shards", replace(_EXACTLY, shards=2, claims=2)),
    Run("exactly_once, three runs", replace(_EXACTLY, last=(0, 0, 0))),
    Run("at_most_once", replace(_AT_MOST, shards=2)),
    Run(
        "A: without Evidence",
        replace(_EXACTLY, claims=2, expired=0),
        "Evidence",
        frozenset({_NOTHING, _DOUBLED, _LOST}),
        True,
    ),
    Run("C: without LedgerOrder", _TWO_RUNS, "LedgerOrder", frozenset({_DOUBLED, _LOST})),
    Run("D: without Grant", replace(_AT_MOST, claims=2, retries=1), "Grant", frozenset({_DOUBLED}), True),
    Run("E: without LeaderEnd", _EXACTLY, "LeaderEnd", frozenset({_ALARM, _DOUBLED, _LOST})),
    Run("without EveryStart", replace(_EXACTLY, restarts=0, expired=0), "EveryStart", frozenset({_DOUBLED})),
    Run("without AsItEnded", replace(_EXACTLY, claims=2), "AsItEnded", frozenset({_DOUBLED, _LOST})),
)


def check(say: Callable[[str], None], *, quick: bool = False) -> bool:
    """Run all; whether each found what it must find, and nothing else."""
    held = True
    for run in RUNS:
        if quick and not run.quick:
            continue
        left, failed, states, seconds = list(INVARIANTS), set[str](), 0, 0.0
        while True:
            found = explore(
                run.constants, dict.fromkeys(RULES, True) | ({run.without: False} if run.without else {}), left
            )
            states, seconds = states + found.states, seconds + found.seconds
            if found.violated is None:
                break
            failed.add(found.violated)
            left.remove(found.violated)
        good = failed == run.fails
        held = held and good
        say(
            f"{'ok ' if good else 'BAD'} {run.name:32} {states:>9} states {seconds:6.1f} s   "
            f"{', '.join(sorted(failed)) or 'all invariants hold'}"
            + ("" if good else f"   expected: {', '.join(sorted(run.fails)) or 'none'}")
        )
    return held
