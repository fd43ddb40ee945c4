"""The judges of `delivered verify` on handwritten histories: bad ones are caught, good ones pass."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from delivered.model.capability import Guarantee
from delivered_lab.verify import judge as judges
from delivered_lab.verify.evidence import End, Evidence, History, Operation, Seen, Stop, fired, load, sends
from delivered_lab.verify.judge import FORBIDDEN, Verdict, judge

AT_MOST, AT_LEAST, EXACTLY = Guarantee


def rows(*effects: str, partition: str = "t") -> list[Seen]:
    """Each as `effect` or `effect/key/number`, in the order of the sink."""
    found = []
    for position, text in enumerate(effects):
        effect, _, rest = text.partition("/")
        key, _, number = rest.partition("/")
        found.append(Seen(effect, partition, position, key or None, int(number) if number else None, float(position)))
    return found


def evidence(*final: str, sent: str = "a b c", guarantee: Guarantee = EXACTLY, **more: object) -> Evidence:
    """A good run of the records `sent`, except where arguments override it."""
    ids = sent.split()
    there = rows(*final) if final else rows(*ids)
    base = Evidence(
        guarantee,
        expected=Counter(ids),
        acknowledged=frozenset(ids),
        in_source=Counter(ids),
        offered=frozenset(ids),
        seen=there,
        final=there,
        open_transactions=(),
        required=("kill",),
        fired=("kill",),
    )
    return replace(base, **more)  # type: ignore[arg-type]


def verdicts(found: Evidence) -> dict[str, Verdict]:
    return {f.checker: f.verdict for f in judge(found).findings}


def test_a_good_run_is_held_under_every_guarantee() -> None:
    for guarantee in Guarantee:
        assert judge(evidence(guarantee=guarantee)).verdict is Verdict.HELD


@pytest.mark.parametrize(
    ("checker", "bad"),
    [
        ("lost", evidence("a", "c")),
        ("lost", evidence("a", "b", sent="a a b")),
        ("duplicated", evidence("a", "b", "b", "c")),
        ("duplicated", evidence("a", "a", "a", "b", sent="a a b")),
        ("unexpected", evidence("a", "b", "c", "z")),
        ("source_kept", evidence(in_source=Counter("ab"))),
        ("source_kept", evidence(in_source=Counter("abcz"))),
        ("unseen", evidence(seen=rows("a", "b"))),
        ("unseen", evidence("a", "b", sent="a b", seen=rows("a"))),
        ("aborted_read", evidence(seen=[*rows("a", "b", "c"), Seen("x", "t", 7)])),
        ("aborted_read", evidence(seen=rows("b", "a", "c"))),
        ("order", evidence("a/k/0", "c/k/2", "b/k/1", ordered=True)),
        ("hanging", evidence(open_transactions=("delivered.orders.0",))),
        ("accounts", evidence(audit_verdict="broken")),
        ("accounts", evidence("a", "b", "c", "c", audit_verdict="held")),
        ("accounts", evidence("a", guarantee=AT_MOST, given_up=1)),
        ("stopped_right", evidence(stops=(Stop((), "?"),))),
        ("stopped_right", evidence(stops=(Stop(("LEDGER_AHEAD",), None), Stop()))),
        ("stopped_right", evidence(stops=(Stop(("LEDGER_AHEAD",), "LEDGER_BEHIND"),))),
        ("recovery", evidence(plain_s=5.0, recovery_s=(6.0, 10.5))),
    ],
)
def test_each_kind_of_damage_is_caught_by_its_checker(checker: str, bad: Evidence) -> None:
    assert verdicts(bad)[checker] is Verdict.BROKEN
    assert judge(bad).count(checker) > 0
    if checker in FORBIDDEN[bad.guarantee]:
        assert judge(bad).verdict is Verdict.BROKEN


def test_a_batch_seen_in_part_is_torn_only_where_the_sink_claims_atomic_batches() -> None:
    batches = {0: frozenset("ab"), 1: frozenset("c")}
    whole = [(1.0, frozenset("ab")), (2.0, frozenset("abc"))]
    torn = [(1.0, frozenset("a")), (2.0, frozenset("abc"))]
    good = evidence(batches=batches, snapshots=whole, batch_atomic=True)
    assert judge(good).verdict is Verdict.HELD
    assert judge(replace(good, snapshots=torn)).verdict is Verdict.BROKEN
    assert judge(replace(good, snapshots=torn, batch_atomic=False)).verdict is Verdict.HELD
    assert judge(replace(good, batches=None)).verdict is Verdict.UNKNOWN


def test_a_record_of_two_batches_does_not_tell_which_of_them_was_seen() -> None:
    both = evidence(batches={0: frozenset("ab"), 1: frozenset("bcd")}, batch_atomic=True)
    assert judge(replace(both, snapshots=[(1.0, frozenset("ab"))])).verdict is Verdict.HELD
    assert judge(replace(both, snapshots=[(1.0, frozenset("abc"))])).verdict is Verdict.BROKEN


def test_the_oracle_belongs_to_the_guarantee() -> None:
    twice, missing = ("a", "b", "b", "c"), ("a", "c")
    assert judge(evidence(*twice, guarantee=AT_LEAST)).verdict is Verdict.HELD
    assert judge(evidence(*missing, guarantee=AT_LEAST)).verdict is Verdict.BROKEN
    assert judge(evidence(*twice, guarantee=AT_MOST, given_up=9)).verdict is Verdict.BROKEN
    assert judge(evidence(*missing, guarantee=AT_MOST, given_up=1)).verdict is Verdict.HELD
    assert judge(evidence(*missing, guarantee=AT_MOST, given_up=None)).verdict is Verdict.UNKNOWN
    assert judge(evidence(*twice, guarantee=AT_LEAST)).count("duplicated") == 1


def test_a_pair_that_doubled_and_a_pair_that_vanished_do_not_cancel() -> None:
    """Invisible to an XOR of ids: the sums of both sides are equal."""
    found = judge(evidence("a", "a", "a", "b", sent="a b c c"))
    assert found.verdict is Verdict.BROKEN
    assert (found.count("lost"), found.count("duplicated")) == (2, 2)


def test_a_record_that_is_in_the_source_twice_must_come_out_twice() -> None:
    assert judge(evidence("a", "b", "a", sent="a a b")).verdict is Verdict.HELD


def test_a_run_whose_fault_did_not_fire_is_invalid() -> None:
    assert judge(evidence(fired=())).verdict is Verdict.INVALID
    assert judge(evidence(required=("kill", "kill"))).verdict is Verdict.INVALID


def test_a_run_that_nobody_read_at_the_end_is_invalid() -> None:
    found = judge(evidence(final=None))
    assert found.verdict is Verdict.INVALID
    assert next(f for f in found.findings if f.checker == "lost").verdict is Verdict.UNKNOWN


def test_a_run_without_records_is_invalid() -> None:
    assert judge(evidence(sent="", final=[])).verdict is Verdict.INVALID


def test_broken_beats_invalid() -> None:
    assert judge(evidence("a", "b", "b", "c", fired=())).verdict is Verdict.BROKEN


def test_a_checker_that_throws_gives_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def throws(_: Evidence) -> judges.Finding:
        raise RuntimeError("out of cheese")

    monkeypatch.setitem(judges.CHECKERS, "duplicated", throws)
    found = judge(evidence())
    assert found.verdict is Verdict.UNKNOWN
    assert "out of cheese" in found.reasons[0]


def test_nobody_looking_for_open_transactions_is_unknown() -> None:
    assert judge(evidence(open_transactions=None)).verdict is Verdict.UNKNOWN


def test_what_a_stopped_pipeline_did_not_get_to_is_not_lost() -> None:
    stopped = evidence("a", "b", stops=(Stop(("REPLAY_DIFFERS",), "REPLAY_DIFFERS"),), stays_down=True)
    assert judge(stopped).verdict is Verdict.HELD
    assert judge(replace(stopped, final=rows("a", "b", "b"))).verdict is Verdict.BROKEN


def test_every_checker_that_a_guarantee_names_exists() -> None:
    for guarantee in Guarantee:
        assert FORBIDDEN[guarantee] <= judges.CHECKERS.keys()


def test_worst_of_verdicts() -> None:
    assert Verdict.worst([Verdict.HELD, Verdict.UNKNOWN]) is Verdict.UNKNOWN
    assert Verdict.worst([Verdict.UNKNOWN, Verdict.INVALID, Verdict.BROKEN]) is Verdict.BROKEN
    assert Verdict.worst([]) is Verdict.UNKNOWN


def test_a_history_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with History(path) as history:
        history.add("producer", "send", End.STARTED, {"ids": ["a", "b"]})
        history.add("fault", "kill", End.OK, {"batch": 3})
        written = list(history)
    assert load(path) == written
    with path.open("a") as file:
        file.write('{"at_s": 3, "proc')  # the judge died in the middle of a line
    assert load(path) == written
    with path.open("a") as file:
        file.write("\n" + written[0].to_json() + "\n")
    with pytest.raises(ValueError, match="line 3"):
        load(path)


def test_how_a_send_ended() -> None:
    def send(end: End, *ids: str) -> Operation:
        return Operation(0, "producer 1", "send", end, {"ids": list(ids)})

    history = [send(End.STARTED, "a", "b", "c"), send(End.OK, "a"), send(End.FAILED, "c"), send(End.STARTED, "d")]
    assert sends(history) == {"a": End.OK, "b": End.UNKNOWN, "c": End.UNKNOWN, "d": End.UNKNOWN}
    assert sends([send(End.FAILED, "a")]) == {"a": End.FAILED}
    assert fired([Operation(0, "fault", "kill", End.STARTED), Operation(1, "fault", "kill", End.OK)]) == ["kill"]
