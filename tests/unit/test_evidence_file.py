"""Evidence files: what is changed, missing, reordered or cut off in one is found."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.evidence_files import evidence
from tests.support.seals import chain, linked, texts

from delivered.audit.evidence_file import (
    Evidence,
    Kind,
    against_ledger,
    canonical,
    check_signature,
    parse_bound,
    read_evidence,
    select,
    sign,
)
from delivered.audit.seal import SEAL_FORMAT, Seal, digest_of
from delivered.model.errors import MissingExtra, Refused, UsageError
from delivered.model.identity import Scope

cryptography = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")


def kinds(raw: bytes) -> list[Kind]:
    return [f.kind for f in read_evidence(raw, "evidence.json")[1]]


def changed(change: Callable[[dict[str, Any]], object]) -> Evidence:
    """A file that someone wrote anew after a change of its only sink: all that covers the file is right."""
    content = json.loads(canonical(evidence().content))
    change(content["sinks"][0])
    return Evidence(content)


def faults(change: Callable[[dict[str, Any]], object]) -> list[tuple[Kind, str]]:
    found = read_evidence(changed(change).text.encode(), "evidence.json")[1]
    return [(f.kind, f.text) for f in found]


def test_a_file_is_read_as_it_was_written() -> None:
    written = evidence()
    found, wrong = read_evidence(written.text.encode(), "evidence.json")
    assert (found, wrong) == (written, ())
    assert found.chains[0].seals == tuple(texts(chain(5)))


def test_a_changed_field_is_found() -> None:
    raw = evidence().text.encode()
    _, (fault,) = read_evidence(raw.replace(b"two-phase commit", b"two-phase permit"), "evidence.json")
    assert (fault.kind, fault.text.endswith("its sha256 is another one")) == (Kind.CHANGED, True)


def test_a_file_laid_out_anew_is_found() -> None:
    data = json.loads(evidence().text)
    _, (fault,) = read_evidence(json.dumps(data).encode(), "evidence.json")
    assert "laid out anew" in fault.text


def test_a_changed_seal_is_found_and_named() -> None:
    raw = evidence().text.encode()
    before = b'\\"number\\":2,'
    assert raw.count(before) == 1
    found = read_evidence(raw.replace(before, b'\\"number\\":2,\\"x\\":1,'), "evidence.json")[1]
    assert "seal 2 was changed: its sha256 is another one" in [f.text for f in found]


def test_a_changed_seal_whose_hashes_were_changed_too_breaks_the_chain() -> None:
    def change(sink: dict[str, Any]) -> None:
        seal = replace(Seal.parse(sink["seals"][2]), notes=("nothing to see",))
        sink["seals"][2], sink["sha256"][2] = seal.text, seal.digest

    (found,) = faults(change)
    assert found == (Kind.CHAIN, "seal 2 has changed since seal 3 was made: its hash is another one")


def test_the_newest_seal_is_held_by_its_hash() -> None:
    def change(sink: dict[str, Any]) -> None:
        seal = replace(Seal.parse(sink["seals"][4]), notes=("nothing to see",))
        sink["seals"][4], sink["sha256"][4] = seal.text, seal.digest

    assert [kind for kind, _ in faults(change)] == [Kind.CHANGED]


def without(*numbers: int) -> Callable[[dict[str, Any]], None]:
    def change(sink: dict[str, Any]) -> None:
        for name in ("seals", "sha256"):
            sink[name] = [v for n, v in enumerate(sink[name]) if n not in numbers]

    return change


def test_a_missing_seal_is_found() -> None:
    assert (Kind.MISSING, "seal 2 is missing") in faults(without(2))
    assert (Kind.MISSING, "seals 0 to 1 are missing") in faults(without(0, 1))
    assert (Kind.MISSING, "seals 1, 3 are missing") in faults(without(1, 3))


def test_seals_cut_off_at_the_end_are_found() -> None:
    assert (Kind.CUT_OFF, "seals 3 to 4 are cut off") in faults(without(3, 4))
    assert (Kind.CUT_OFF, "seals 0 to 4 are cut off") in faults(without(*range(5)))


def test_reordered_seals_are_found() -> None:
    def swap(sink: dict[str, Any]) -> None:
        for name in ("seals", "sha256"):
            sink[name][1], sink[name][2] = sink[name][2], sink[name][1]

    assert faults(swap) == [(Kind.REORDERED, "the seals are in the order 0, 2, 1, 3, 4")]


def test_a_seal_that_is_there_twice_is_found() -> None:
    def twice(sink: dict[str, Any]) -> None:
        for name in ("seals", "sha256"):
            sink[name].append(sink[name][-1])

    assert [kind for kind, _ in faults(twice)] == [Kind.REORDERED]


def test_seals_of_another_pipeline_are_found() -> None:
    def other(sink: dict[str, Any]) -> None:
        seals = linked(replace(s, scope=Scope("invoices", "kafka", "5b2f")) for s in chain(5))
        sink["seals"], sink["sha256"] = texts(seals), [s.digest for s in seals]
        sink["newest"]["sha256"] = seals[-1].digest

    assert next(text for _, text in faults(other)) == "seal 0 is of invoices -> kafka"


def rewritten(change: Callable[[str], str]) -> Callable[[dict[str, Any]], None]:
    """Another text in the place of seal 2, with its hash."""

    def apply(sink: dict[str, Any]) -> None:
        sink["seals"][2] = change(sink["seals"][2])
        sink["sha256"][2] = hashlib.sha256(sink["seals"][2].encode(errors="replace")).hexdigest()

    return apply


def with_field(name: str, value: Any) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), name: value}, separators=(",", ":"), sort_keys=True)


@pytest.mark.parametrize(
    "change",
    [
        *(with_field(name, value) for name in ("number", "first", "last") for value in ("2", None, [2], 2.5, True)),
        with_field("sealed_at_ms", "now"),
        with_field("settled_end", 7),
        with_field("audited", "yes"),
        with_field("notes", [7]),
        lambda text: text.replace('"counts":{', '"counts":{"lost":Infinity,', 1).replace('"lost":0,', ""),
        lambda text: "[" * 99_999,
        lambda text: text.replace('"notes":[]', '"notes":["\ud800"]'),
    ],
)
def test_a_text_that_is_no_seal_is_a_fault(change: Callable[[str], str]) -> None:
    found = faults(rewritten(change))
    assert any(kind is Kind.CHANGED and "cannot be read" in text for kind, text in found), found
    assert (Kind.MISSING, "seal 2 is missing") in found


def test_a_file_that_names_any_number_of_seals_is_read_at_once() -> None:
    def many(sink: dict[str, Any]) -> None:
        sink["first"], sink["last"] = -(10**30), 10**30

    assert (Kind.CUT_OFF, f"seals 5 to {10**30} are cut off") in faults(many)
    assert any(kind is Kind.MISSING for kind, _ in faults(many))


def test_a_file_without_a_seal_is_not_intact() -> None:
    def emptied(sink: dict[str, Any]) -> None:
        sink.update(first=5, last=4, seals=[], sha256=[])

    assert [kind for kind, _ in faults(emptied)] == [Kind.CHANGED]
    content = {**evidence().content, "sinks": []}
    assert kinds(Evidence(content).text.encode()) == [Kind.MISSING]


def test_a_sink_that_is_there_twice_is_found() -> None:
    """Of two, a report by sink would show one."""
    content = {**evidence().content, "sinks": list(evidence().content["sinks"]) * 2}
    assert kinds(Evidence(content).text.encode()) == [Kind.CHANGED]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"[]",
        b"7",
        b"\xff",
        b'{"delivered_evidence": 1}',
        b'{"delivered_evidence": 1, "sinks": [7]}',
        pytest.param(evidence().text.replace('"number": 4', '"number": Infinity').encode(), id="infinity"),
        b"[" * 99_999,
    ],
)
def test_what_is_no_evidence_file_is_refused(raw: bytes) -> None:
    with pytest.raises(UsageError, match="DELIVERED_EVIDENCE_FILE"):
        read_evidence(raw, "evidence.json")


def test_a_file_of_a_later_format_is_refused() -> None:
    raw = evidence().text.replace('"delivered_evidence": 1', '"delivered_evidence": 2').encode()
    with pytest.raises(Refused, match="DELIVERED_FORMAT_NEWER"):
        read_evidence(raw, "evidence.json")


def test_the_sha256_is_what_jq_and_sha256sum_say(tmp_path: Path) -> None:
    file = tmp_path / "evidence.json"
    file.write_text(evidence().text, encoding="utf-8")
    say = f"jq -caSj 'del(.sha256)' {file} | sha256sum | cut -d' ' -f1; jq -r .sha256 {file}"
    one, other = subprocess.run(["sh", "-c", say], capture_output=True, text=True, check=True).stdout.split()
    assert one == other


LEDGER = texts(chain(7))


def compared(ledger: list[str]) -> tuple[list[str], list[str]]:
    (of,) = evidence().chains
    wrong, says = against_ledger(of, ledger)
    assert all(f.kind is Kind.LEDGER for f in wrong)
    return [f.text for f in wrong], says


def test_a_ledger_with_newer_seals() -> None:
    assert compared(LEDGER) == (
        [],
        ["the ledger has the same seals 0 to 4", "the ledger has 2 newer ones, up to seal 6"],
    )


def test_a_ledger_that_was_restored_has_fewer_seals() -> None:
    (fault,), _ = compared(LEDGER[:3])
    assert fault.startswith("the ledger ends with seal 2, the file with 4: the ledger was restored")
    assert compared([])[0] == ["the ledger has none of the seals 0 to 4"]


def test_a_ledger_with_another_seal() -> None:
    other = linked([*chain(3)[:2], *(replace(s, notes=("rewritten",)) for s in chain(7)[2:])])
    assert compared(texts(other))[0][:2] == [f"seal {n} is another one in the ledger" for n in (2, 3)]


def test_a_ledger_whose_newer_seals_do_not_follow() -> None:
    newer = replace(chain(6)[5], before="0" * 64)
    assert any("has changed since seal 5 was made" in text for text in compared([*LEDGER[:5], newer.text])[0])


def dated(count: int) -> list[str]:
    seals = [replace(s, sealed_at_ms=s.number * 3_600_000) for s in chain(count)]
    return texts(linked(seals))


def numbers(seals: list[str], start: str | None, end: str | None) -> list[int]:
    bounds = [None if text is None else parse_bound("--from", text) for text in (start, end)]
    parsed = [Seal.parse(text) for text in seals]
    return [seal.number for seal in parsed[select(parsed, *bounds)]]


@pytest.mark.parametrize(
    ("start", "end", "chosen"),
    [
        (None, None, [0, 1, 2, 3]),
        ("15", None, [1, 2, 3]),
        ("10", "19", [1]),
        ("19", "20", [1, 2]),
        ("40", None, []),
        ("1970-01-01T01:00:00Z", "1970-01-01T02:00", [1, 2]),
        ("1970-01-01T03:30:00+02:00", None, [2, 3]),
        ("1971-01-01", None, []),
        ("10", "1970-01-01T01:00:00Z", [1]),
    ],
)
def test_a_range_of_seals(start: str | None, end: str | None, chosen: list[int]) -> None:
    assert numbers(dated(4), start, end) == chosen


def test_batches_are_those_of_the_newest_checkpoint() -> None:
    seals = chain(4)
    seals[2] = replace(seals[2], scope=Scope("orders", "kafka", "9c1d"), first=0, last=9, start="")
    seals[3] = replace(seals[3], scope=Scope("orders", "kafka", "9c1d"), first=10, last=19, start=seals[2].end)
    assert numbers(texts(linked(seals)), "0", "9") == [2]
    assert numbers(texts(linked(seals)), "10", None) == [3]


def test_a_clock_that_jumped_leaves_no_gap() -> None:
    back = [replace(s, sealed_at_ms=at) for s, at in zip(chain(4), (1_000, 9_000, 2_000, 3_000), strict=True)]
    assert numbers(texts(linked(back)), "1970-01-01T00:00:01Z", "1970-01-01T00:00:03Z") == [0, 1, 2, 3]


def test_a_bound_is_a_batch_or_a_time() -> None:
    assert parse_bound("--to", " 12 ") == 12
    assert parse_bound("--to", "2026-11-26T03:00:00+01:00") == datetime(2026, 11, 26, 2, tzinfo=UTC)
    with pytest.raises(UsageError, match="DELIVERED_EVIDENCE_BOUND"):
        parse_bound("--to", "yesterday")
    assert datetime(2026, 1, 1, tzinfo=UTC) - parse_bound("--to", "2025-12-31") == timedelta(days=1)  # type: ignore[operator]


def pem(key: Any = None) -> tuple[bytes, bytes]:
    """A private key and its public one."""
    from cryptography.hazmat.primitives import serialization as s

    key = key or cryptography.Ed25519PrivateKey.generate()
    private = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    return private, key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)


PRIVATE, PUBLIC = pem()


def signature_fault(found: Evidence, key: bytes) -> Kind | None:
    fault = check_signature(found, key, "key.pub")
    return fault.kind if fault is not None else None


def test_a_signature_tells_wrong_key_wrong_bytes_and_no_signature_apart() -> None:
    signed = sign(evidence(), PRIVATE, "key.pem")
    assert read_evidence(signed.text.encode(), "evidence.json") == (signed, ())
    assert signature_fault(signed, PUBLIC) is None
    assert signature_fault(signed, PRIVATE) is None
    assert signature_fault(signed, pem()[1]) is Kind.OTHER_KEY
    assert signature_fault(evidence(), PUBLIC) is Kind.UNSIGNED
    # Written anew by someone who has no key: the file's own hashes are right.
    forged = Evidence({**signed.content, "pipeline": "invoices"}, signed.signature)
    assert signature_fault(forged, PUBLIC) is Kind.BAD_SIGNATURE


@pytest.mark.parametrize("value", [None, 7, "", "zz", "AAAA"])
def test_a_damaged_signature_is_a_bad_one(value: Any) -> None:
    signed = sign(evidence(), PRIVATE, "key.pem")
    assert (
        signature_fault(Evidence(signed.content, {**(signed.signature or {}), "value": value}), PUBLIC)
        is Kind.BAD_SIGNATURE
    )
    assert signature_fault(Evidence(signed.content, value or {}), PUBLIC) is Kind.BAD_SIGNATURE


def test_the_file_covers_its_signature() -> None:
    raw = sign(evidence(), PRIVATE, "key.pem").text
    value = json.loads(raw)["signature"]["value"]
    other = ("0" if value[0] != "0" else "1") + value[1:]
    assert kinds(raw.replace(value, other).encode()) == [Kind.CHANGED]


def test_keys_that_are_none_are_refused() -> None:
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import ec

    curve = ec.generate_private_key(ec.SECP256R1())
    locked = cryptography.Ed25519PrivateKey.generate().private_bytes(
        s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"secret")
    )
    for key in (b"", b"secret", PUBLIC, pem(curve)[0], locked):
        with pytest.raises(UsageError, match="DELIVERED_EVIDENCE_KEY") as error:
            sign(evidence(), key, "key.pem")
        assert "secret" not in str(error.value)
    for key in (b"", b"secret", pem(curve)[1], locked):
        with pytest.raises(UsageError, match="DELIVERED_EVIDENCE_KEY"):
            check_signature(evidence(), key, "key.pub")


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    for use in (lambda: sign(evidence(), PRIVATE, "key.pem"), lambda: check_signature(evidence(), PUBLIC, "key.pub")):
        with pytest.raises(MissingExtra, match="evidence") as error:
            use()
        assert error.value.next_step == 'pip install "delivered[evidence]"'


def test_openssl_checks_a_signature(tmp_path: Path) -> None:
    signed = sign(evidence(), PRIVATE, "key.pem")
    (tmp_path / "evidence.json").write_text(signed.text, encoding="utf-8")
    (tmp_path / "key.pub").write_bytes(PUBLIC)
    say = (
        "jq -caSj 'del(.sha256, .signature)' evidence.json > signed; "
        "jq -r .signature.value evidence.json | base64 -d > signature; "
        "openssl pkeyutl -verify -pubin -inkey key.pub -rawin -in signed -sigfile signature; "
        "openssl pkey -pubin -in key.pub -outform DER | sha256sum"
    )
    run = subprocess.run(["sh", "-c", say], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "Verified Successfully" in run.stdout, run
    assert str(signed.signature and signed.signature["key_sha256"]) in run.stdout


def test_errors_of_seals_of_a_later_release_are_faults() -> None:
    def later(sink: dict[str, Any]) -> None:
        sink["seals"][4] = json.dumps(
            {**json.loads(sink["seals"][4]), "format": SEAL_FORMAT + 1}, separators=(",", ":"), sort_keys=True
        )
        sink["sha256"][4] = digest_of(sink["seals"][4])

    assert any("FORMAT_NEWER" in text for _, text in faults(later))
