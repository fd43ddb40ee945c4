"""`delivered evidence`: a pipeline's seals in one file, with what they are about; and a file against its pipeline.

Needs no Spark. Reads the ledger, claims nothing and fences nobody.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from delivered.audit.evidence_file import Bound, Chain, Evidence, Fault, Kind, against_ledger, new_evidence, select
from delivered.audit.seal import Seal, stored_seal
from delivered.checkpoint import read_logged
from delivered.contract.source import Offsets
from delivered.engine.context import open_shared_ledger
from delivered.ledger import Ledger
from delivered.model.errors import DeliveredError, Refused, UsageError, did_you_mean, without_secrets
from delivered.model.options import in_file_words
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint

_PACKAGES = ("delivered", "pyarrow", "pyspark")


def gather_evidence(
    pipeline: Definition,
    plan: Mapping[str, Any],
    sink: str | None = None,
    start: Bound | None = None,
    end: Bound | None = None,
) -> Evidence:
    """The seals of a pipeline's sinks, as its ledger stores them. Holds no secret.

    Args:
        plan: as JSON values.
        sink: only its seals; None: of every sink that has some.
        start, end: see `evidence_file.select`.

    Raises:
        UsageError: no such sink.
        Refused: there is no seal, or none in the range.
        Unreachable: the ledger or the checkpoint did not answer.
        DeliveredError: the ledger holds a seal that is none.
    """
    chains, found = [], []
    with _ledger(pipeline) as ledger:
        last = ledger.look().last
        for name, endpoint in _chosen(pipeline, sink).items():
            texts = list(ledger.seals(name))
            if not texts:
                continue
            seals = [stored_seal(text, name) for text in texts]
            found.append(f"{name} was sealed {_extent(seals[0], seals[-1])}.")
            if chosen := texts[select(seals, start, end)]:
                target = last.targets.get(name) if last is not None else None
                position = _answer(_filled, endpoint)
                facts = {**_identity(endpoint), "target": target, "position": position}
                chains.append(Chain.of(name, chosen, texts[-1], without_secrets(facts)))
    if not found:
        raise Refused("EVIDENCE_EMPTY.NEVER_SEALED", pipeline=pipeline.name)
    if not chains:
        raise Refused("EVIDENCE_EMPTY.RANGE", pipeline=pipeline.name, found=" ".join(found))
    facts = {
        "guarantee": pipeline.guarantee.value,
        "range": {"from": _bound(start), "to": _bound(end)},
        "versions": {"python": platform.python_version(), **_versions()},
        "transform": pipeline.transform_version,
        "plan": _in_file_words(plan),
        "sources": [
            {"source": name, **_identity(e), "position": _answer(_newest, e)} for name, e in pipeline.sources.items()
        ],
    }
    return new_evidence(
        pipeline.name,
        chains,
        without_secrets(facts),
        written_by=f"delivered {version('delivered')}",
        written_at=datetime.now(UTC),
    )


def compare_with_ledger(evidence: Evidence, pipeline: Definition) -> tuple[list[Fault], list[str]]:
    """Where the ledger has other seals than the file; and what else there is to say, as sentences.

    Raises:
        UsageError: the file is another pipeline's.
        Unreachable: the ledger or the checkpoint did not answer.
    """
    if evidence.pipeline != pipeline.name:
        raise UsageError("EVIDENCE_OTHER", found=evidence.pipeline, pipeline=pipeline.name)
    faults: list[Fault] = []
    said: list[str] = []
    with _ledger(pipeline) as ledger:
        for chain in evidence.chains:
            if chain.sink not in pipeline.sink_names:
                faults.append(Fault(Kind.LEDGER, "the pipeline has no such sink", chain.sink))
                continue
            differs, says = against_ledger(chain, list(ledger.seals(chain.sink, chain.first)))
            faults += differs
            said += [f"{chain.sink}: {text}" for text in says]
    return faults, said


def sealed_by(pipeline: Definition, sink: str) -> list[Seal]:
    """All seals of a sink in the pipeline's ledger. Raises as `gather_evidence`."""
    with _ledger(pipeline) as ledger:
        return [stored_seal(text, sink) for text in ledger.seals(sink)]


@contextmanager
def _ledger(pipeline: Definition) -> Iterator[Ledger]:
    sinks = pipeline.spec.open()
    incarnation, _ = read_logged(pipeline.checkpoint)
    with closing(open_shared_ledger(sinks, pipeline.spec.scope(sinks, incarnation))) as ledger:
        yield ledger


def _chosen(pipeline: Definition, sink: str | None) -> dict[str, Endpoint]:
    named = dict(zip(pipeline.sink_names, pipeline.sinks, strict=True))
    if sink is None:
        return named
    if sink not in named:
        raise UsageError("EVIDENCE_SINK", sink=sink, known=", ".join(named), hint=did_you_mean(sink, named))
    return {sink: named[sink]}


def _identity(endpoint: Endpoint) -> dict[str, Any]:
    return {"format": endpoint.format, "options": dict(endpoint.options)}


def _answer(ask: Callable[[Endpoint], Offsets | None], endpoint: Endpoint) -> str | None:
    """A position as JSON text, whose numbers no reader rounds; None: there is none, or it cannot be asked for."""
    with suppress(DeliveredError):
        position = ask(endpoint)
        return None if position is None else json.dumps(position, sort_keys=True)
    return None


def _filled(sink: Endpoint) -> Offsets | None:
    return sink.sink().scan().position()


def _newest(endpoint: Endpoint) -> Offsets | None:
    if endpoint.is_spark_own:
        return None
    source = endpoint.source()
    with closing(source.driver()) as driver:
        return driver.newest()


def _in_file_words(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _in_file_words(v) for k, v in value.items()}
    if isinstance(value, list):
        return [*map(_in_file_words, value)]
    return in_file_words(value) if isinstance(value, str) else value


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _bound(bound: Bound | None) -> str | None:
    return None if bound is None else str(bound) if isinstance(bound, int) else bound.isoformat()


def _extent(first: Seal, last: Seal) -> str:
    """ "from 2026-11-26T03:00:00+00:00 to 2026-11-26T09:00:00+00:00, up to batch 4711"."""
    start, end = (seal.sealed_at.isoformat(timespec="seconds") for seal in (first, last))
    return f"from {start} to {end}, up to batch {last.last}"
