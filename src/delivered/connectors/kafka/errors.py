"""Translates a producer's errors for the user of a sink."""

from __future__ import annotations

from delivered.clients.kafka.errors import Failures, ProducerError
from delivered.connectors.kafka.sink_options import SinkOptions
from delivered.model.errors import BadRecord, DeliveredError, Fenced, Refused, Unreachable, UsageError


def producer_error(error: ProducerError, topic: str | None, options: SinkOptions) -> DeliveredError:
    """Translate an error of a producer."""
    servers = options.client["bootstrap.servers"]
    if error.fenced:
        return Fenced(
            "PRODUCER_FENCED",
            f"Another attempt or another driver took over this shard's transactional id: {error}. Nothing of this "
            "attempt is visible.",
            next_step="nothing, if another attempt of the task or another driver continues; otherwise start again",
        )
    if error.topic_unknown:
        return UsageError(
            "TOPIC_UNKNOWN",
            f"Topic {topic!r} does not exist at {servers}.",
            next_step=f"create it, for example kafka-topics.sh --create --topic {topic} --bootstrap-server {servers}",
        )
    if error.no_permission:
        return Refused(
            "KAFKA_PERMISSION",
            f"This user is not authorized to write to {topic!r} at {servers}: {error}.",
            next_step="grant Write and Describe on the topic and on the ledger topic, and on transactional ids that "
            "start with `delivered.`; or check the credentials",
        )
    if error.away:
        return Unreachable(
            "KAFKA_UNREACHABLE",
            f"The brokers at {servers} did not answer in time: {error}.",
            next_step="check kafka.bootstrap.servers, and that the brokers are running",
        )
    return DeliveredError(
        "KAFKA_CLIENT",
        f"The Kafka client at {servers} failed: {error}.",
        next_step="start again; if this recurs, check the brokers' logs",
    )


def delivery_error(failures: Failures, options: SinkOptions) -> DeliveredError:
    """The error for undelivered records."""
    if failures.name == "MSG_SIZE_TOO_LARGE":  # the broker's code; librdkafka uses it for its own limit too
        limit = options.client.get("message.max.bytes", "1048588")
        return BadRecord(
            "RECORD_TOO_LARGE",
            f"A record of {failures.largest} bytes (key and value) is too large: the client's limit is {limit} bytes "
            "(kafka.message.max.bytes), and the topic has its own (max.message.bytes). "
            f"{failures.count} records were rejected.",
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
        next_step="fix the cause, then start again; the batch runs again",
    )
