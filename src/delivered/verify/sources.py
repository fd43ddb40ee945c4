"""Sources that the verifier can feed a pipeline from: what each of them is, and what a fault can take hold of."""

from __future__ import annotations

from dataclasses import dataclass

from delivered.verify.sinks import ACTIVEMQ, KAFKA, LOG, PULSAR, RABBITMQ, ROCKETMQ

RABBITMQ_STREAM = "rabbitmq_stream"


@dataclass(frozen=True)
class SourceKind:
    """
    Attributes:
        name: its format in a pipeline file.
        server: kind of the server that holds it, as `delivered.brokers` names it; None: files of this machine.
        forgets: a message is gone once it is acknowledged, so that receivers keep it in a log first.
        ordered: a key's records are read in the order in which they were sent.
    """

    name: str
    server: str | None = None
    forgets: bool = False
    ordered: bool = True


SOURCE_KINDS = {
    s.name: s
    for s in (
        SourceKind(LOG),
        SourceKind(KAFKA, KAFKA),
        SourceKind(PULSAR, PULSAR),
        SourceKind(RABBITMQ_STREAM, RABBITMQ),
        SourceKind(RABBITMQ, RABBITMQ, forgets=True),
        SourceKind(ACTIVEMQ, ACTIVEMQ, forgets=True),
        # A topic without message groups has no order.
        SourceKind(ROCKETMQ, ROCKETMQ, forgets=True, ordered=False),
    )
}
