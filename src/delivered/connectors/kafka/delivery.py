"""What a client said, as errors of ours."""

from __future__ import annotations

from delivered.connectors.kafka.produce import TOO_LARGE, Failures, ProducerError
from delivered.connectors.kafka.sink_options import SinkOptions
from delivered.model.errors import BadRecord, DeliveredError, Fenced, Refused, Unreachable, UsageError


def producer_error(error: ProducerError, topic: str | None, options: SinkOptions) -> DeliveredError:
    """The error of a whole producer."""
    servers = options.client["bootstrap.servers"]
    if error.fenced:
        return Fenced(
            "PRODUCER_FENCED",
            f"Another attempt or another driver took this shard's transactional id: {error}. Nothing of this attempt "
            "is visible.",
            next_step="none, if another attempt of the task or another driver goes on; else start again",
        )
    if error.topic_unknown:
        return UsageError(
            "TOPIC_UNKNOWN",
            f"Topic {topic!r} does not exist at {servers}.",
            next_step=f"create it, for instance kafka-topics.sh --create --topic {topic} --bootstrap-server {servers}",
        )
    if error.no_permission:
        return Refused(
            "KAFKA_PERMISSION",
            f"The brokers at {servers} do not permit this user to write to {topic!r}: {error}.",
            next_step="grant Write and Describe on the topic and on the ledger topic, and on transactional ids that "
            "start with `delivered.`; or check the credentials",
        )
    if error.away:
        return Unreachable(
            "KAFKA_UNREACHABLE",
            f"The brokers at {servers} did not answer in time: {error}.",
            next_step="check that the brokers run, and kafka.bootstrap.servers",
        )
    return DeliveredError("KAFKA_CLIENT", f"The Kafka client at {servers} failed: {error}.")


def delivery_error(failures: Failures, options: SinkOptions) -> DeliveredError:
    """The error of records that could not be delivered."""
    if failures.code == TOO_LARGE:
        limit = options.client.get("message.max.bytes", "1048588")
        return BadRecord(
            "RECORD_TOO_LARGE",
            f"A record of {failures.largest} bytes (key and value) is too large: the client's limit is {limit} bytes "
            "(kafka.message.max.bytes), the broker has its own for the topic (max.message.bytes). "
            f"{failures.count} records were refused.",
            next_step="raise both limits, or filter such records",
        )
    error = ProducerError(
        failures.fatal or failures.name, f"{failures.count} records were not delivered{failures.hint()}"
    )
    if error.topic_unknown or error.no_permission or error.fenced or failures.name == "_MSG_TIMED_OUT":
        named = ProducerError("_TIMED_OUT", error.reason) if failures.name == "_MSG_TIMED_OUT" else error
        return producer_error(named, options.topic, options)
    return DeliveredError(
        "DELIVERY_FAILED",
        f"{failures.count} records were not delivered, the first with {failures.name}{failures.hint()}.",
        next_step="start again when the cause is gone; the batch runs again",
    )
