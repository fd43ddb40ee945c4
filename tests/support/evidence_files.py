"""Evidence files, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from tests.support.seals import chain, texts

from delivered.audit.evidence_file import Chain, Evidence, new_evidence
from delivered.audit.seal import Seal

AT = datetime(2026, 11, 26, 3, tzinfo=UTC)


def evidence(seals: Sequence[Seal] | None = None) -> Evidence:
    """Of the sink `kafka` of the pipeline `orders`; five seals unless given."""
    stored = texts(list(seals) if seals is not None else chain(5))
    facts = {"plan": {"mechanism": "two-phase commit", "refused": False}, "versions": {"delivered": "0.1.0"}}
    one = Chain.of("kafka", stored, stored[-1], {"format": "kafka", "options": {"topic": "bücher"}})
    return new_evidence("orders", [one], facts, written_by="delivered 0.1.0", written_at=AT)
