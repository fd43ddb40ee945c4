"""Whatever byte of an evidence file is changed, the check finds it."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.evidence_files import evidence

from delivered.audit.evidence_file import read_evidence
from delivered.model.errors import DeliveredError

RAW = evidence().text.encode()


@given(at=st.integers(0, len(RAW) - 1), byte=st.integers(0, 255))
@example(at=RAW.index(b"\n"), byte=ord(" "))
@example(at=len(RAW) - 1, byte=ord(" "))
@example(at=RAW.index(b"refused") + len(b'refused": '), byte=ord("F"))
def test_any_changed_byte_is_found(at: int, byte: int) -> None:
    damaged = RAW[:at] + bytes([byte]) + RAW[at + 1 :]
    try:
        _, faults = read_evidence(damaged, "evidence.json")
    except DeliveredError:
        assert damaged != RAW
    else:
        assert bool(faults) == (damaged != RAW)


@given(start=st.integers(0, len(RAW) - 1), length=st.integers(1, 200))
def test_any_removed_part_is_found(start: int, length: int) -> None:
    try:
        _, faults = read_evidence(RAW[:start] + RAW[start + length :], "evidence.json")
    except DeliveredError:
        return
    assert faults
