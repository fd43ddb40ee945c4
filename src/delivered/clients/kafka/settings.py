"""Options with the prefix `kafka.`: translates the Java client's names, which Spark's users know, to librdkafka's.

Shared by source and sink. Imports no client library; secrets stay references until `resolved`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from delivered.clients.kafka import jaas, logins
from delivered.clients.kafka.sasl import MECHANISMS, mechanism_of
from delivered.model.addresses import is_loopback, parse_addresses
from delivered.model.errors import UsageError
from delivered.model.options import REFERENCES, OptionType, choice, option, resolve_secret

PREFIX = "kafka."
PORT = 9092
"""Of a bootstrap server without one, as for librdkafka."""

_RENAMED = {
    "fetch.max.wait.ms": "fetch.wait.max.ms",
    "receive.buffer.bytes": "socket.receive.buffer.bytes",
    "send.buffer.bytes": "socket.send.buffer.bytes",
    "request.timeout.ms": "socket.timeout.ms",
    "ssl.truststore.certificates": "ssl.ca.pem",
    "ssl.keystore.certificate.chain": "ssl.certificate.pem",
    "ssl.keystore.key": "ssl.key.pem",
    "sasl.oauthbearer.client.credentials.client.id": "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.credentials.client.secret": "sasl.oauthbearer.client.secret",
    "max.request.size": "message.max.bytes",
    "delivery.timeout.ms": "message.timeout.ms",
    "metadata.max.age.ms": "topic.metadata.refresh.interval.ms",
}
_JAVA_ONLY = {
    "max.poll.records": "batches have their own size",
    "max.block.ms": "librdkafka does not block; write kafka.delivery.timeout.ms, how long a record may wait",
    "metadata.max.idle.ms": "librdkafka manages its metadata cache",
    "key.serializer": "write key.format, or cast the column",
    "value.serializer": "write value.format, or cast the column",
    "partitioner.class": "rows are partitioned as the Java client does by default",
    "metric.reporters": "it names Java code",
    "default.api.timeout.ms": "write kafka.socket.timeout.ms",
    "sasl.login.callback.handler.class": "write kafka.sasl.oauthbearer.token.provider, a Python function",
    "sasl.client.callback.handler.class": "it names Java code",
    "security.providers": "it names Java code",
}


def _servers(text: str) -> str:
    parse_addresses(text, port=PORT)
    return text


_WORDS = {
    "bootstrap.servers": OptionType(_servers, example="localhost:9092"),
    "security.protocol": choice(
        ("SASL_SSL", "SSL", "SASL_PLAINTEXT", "PLAINTEXT"),
        meant={"tls": "SSL", "sasl": "SASL_SSL", "plain": "SASL_SSL", "ssl_sasl": "SASL_SSL"},
    ),
    "sasl.mechanism": choice(MECHANISMS),
    "ssl.endpoint.identification.algorithm": choice({"https": "https", "none": "none", "": "none"}),
    "enable.ssl.certificate.verification": choice(("true", "false")),
    "isolation.level": choice(("read_committed", "read_uncommitted")),
    "acks": choice({"all": "all", "-1": "-1", "1": "1", "0": "0"}),
    "compression.type": choice(("none", "gzip", "snappy", "lz4", "zstd")),
    "ssl.truststore.type": choice(("PEM", "PKCS12", "JKS")),
    "sasl.oauthbearer.method": choice(("oidc", "default")),
    **logins.WORDS,
}
_WORDS |= {
    "sasl.mechanisms": _WORDS["sasl.mechanism"],
    "request.required.acks": _WORDS["acks"],
    "compression.codec": _WORDS["compression.type"],
    "ssl.keystore.type": _WORDS["ssl.truststore.type"],
}
"""Settings that are one of a few words. A misspelt one must not select a weaker one, such as no TLS."""
_TLS_FILES = (
    *("ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.keystore.location"),
    *("ssl.truststore.location", "ssl.truststore.certificates", "ssl.keystore.certificate.chain", "ssl.keystore.key"),
    *("ssl.ca.pem", "ssl.certificate.pem", "ssl.key.pem", "ssl.crl.location"),
)
_SASL_LOGIN = ("sasl.mechanism", "sasl.mechanisms", "sasl.jaas.config")


def check_client(owner: str, values: Mapping[str, str], reserved: Mapping[str, str]) -> None:
    """Reject options that the connector sets itself or that only a Java client supports.

    Args:
        values: all options; only those with the prefix are checked.
        reserved: name without the prefix -> why it cannot be set.

    Raises:
        UsageError: with the way out.
    """
    given = {k.removeprefix(PREFIX): v for k, v in values.items() if k.startswith(PREFIX)}
    for name in given:
        why = reserved.get(name) or _JAVA_ONLY.get(name)
        if why:
            raise UsageError(
                "OPTION_RESERVED",
                f"{owner}: option '{PREFIX}{name}' cannot be set: {why}.",
                next_step=f"take '{PREFIX}{name}' out",
            )
    _check_store(owner, given, "truststore", "write kafka.ssl.ca.location with a PEM file: keytool -exportcert -rfc")
    _check_store(owner, given, "keystore", "convert it: keytool -importkeystore -deststoretype PKCS12")
    words = _words(owner, given)
    login = given.get(jaas.OPTION, "env:")
    if not login.startswith(REFERENCES):
        jaas.settings_of(login, mechanism_of(words, ""))
    _check_protocol(owner, words)
    logins.check_names(owner, client_options(values))


def _words(owner: str, given: Mapping[str, str]) -> dict[str, str]:
    """The settings, those of `_WORDS` as Kafka spells them. References are checked once resolved."""
    return {
        name: kind.parse(owner, PREFIX + name, value)
        if (kind := _WORDS.get(name)) is not None and not value.startswith(REFERENCES)
        else value
        for name, value in given.items()
    }


def _check_protocol(owner: str, given: Mapping[str, str]) -> None:
    """Refuse settings of TLS or SASL that the protocol would leave unused: records and passwords would go in clear."""
    protocol = given.get("security.protocol", "")
    if protocol.startswith(REFERENCES):
        return
    login = next((n for n in _SASL_LOGIN if n in given), None)
    if login is not None and not protocol.startswith("SASL_"):
        shown = f"is {protocol}" if protocol else "is not set, which means PLAINTEXT"
        raise UsageError(
            "OPTION_CONFLICT",
            f"{owner}: option '{PREFIX}{login}' is set, but 'kafka.security.protocol' {shown}: nothing would log in.",
            next_step='write .option("kafka.security.protocol", "SASL_SSL")',
        )
    files = next((n for n in _TLS_FILES if n in given), None)
    if files is not None and protocol.endswith("PLAINTEXT"):
        raise UsageError(
            "OPTION_CONFLICT",
            f"{owner}: option '{PREFIX}{files}' is set, but 'kafka.security.protocol' is {protocol}: nothing would be "
            "encrypted.",
            next_step=f'write .option("kafka.security.protocol", "{protocol.replace("PLAINTEXT", "SSL")}"), or remove '
            "kafka.ssl.*",
        )


def _check_store(owner: str, given: Mapping[str, str], store: str, way_out: str) -> None:
    location = given.get(f"ssl.{store}.location")
    kind = given.get(f"ssl.{store}.type", "JKS").upper()
    if location is not None and kind == "JKS":
        raise UsageError(
            "OPTION_VALUE",
            f"{owner}: option 'kafka.ssl.{store}.location' is {location!r}, a store of type {kind}, which only a Java "
            "client can read.",
            next_step=f"write kafka.ssl.{store}.type=PKCS12 if it is one (keytool's default), or {way_out}",
        )


def client_options(values: Mapping[str, str]) -> dict[str, str]:
    """librdkafka's settings, without the prefix; secrets are not resolved yet.

    Args:
        values: options that passed `check_client`.
    """
    given = _words("", {k.removeprefix(PREFIX): v for k, v in values.items() if k.startswith(PREFIX)})
    settings: dict[str, str] = {}
    for name, value in given.items():
        if name == "ssl.truststore.location" and given.get("ssl.truststore.type") == "PEM":
            settings["ssl.ca.location"] = value
        elif name == "ssl.keystore.location" and given.get("ssl.keystore.type") == "PEM":
            settings["ssl.certificate.location"] = settings["ssl.key.location"] = value
        elif name in ("ssl.truststore.type", "ssl.keystore.type"):
            continue
        elif name == "buffer.memory":
            settings["queue.buffering.max.kbytes"] = str(max(1, _bytes(value) // 1024))
        else:
            settings[_RENAMED.get(name, name)] = value
    return settings


def _bytes(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(
            "OPTION_VALUE",
            f"Option 'kafka.buffer.memory' is {value!r}; it must be a whole number of bytes.",
            next_step='write .option("kafka.buffer.memory", "33554432")',
        ) from None


def path_option(does: str) -> Any:
    """The option `client`. `does`: what arrow does, as the help says it."""
    return option(
        "client",
        f"{does} over shared connections; librdkafka; auto: arrow, unless a setting or the platform needs librdkafka.",
        choice(("auto", "arrow", "librdkafka")),
        default="auto",
    )


def resolved(client: Mapping[str, str]) -> dict[str, str]:
    """Settings with secrets resolved, ready for a client. Call it only where the client is created."""
    settings = _words("Kafka", {k: resolve_secret(PREFIX + k, v) for k, v in client.items()})
    if settings.get("security.protocol") != client.get("security.protocol"):
        _check_protocol("Kafka", settings)  # it was a reference
    text = settings.pop(jaas.OPTION, None)
    if text is not None:
        settings |= jaas.settings_of(text, mechanism_of(settings, ""))
    return settings


def protocol_of(client: Mapping[str, str]) -> str:
    """The security protocol of a client's settings. Certificates without a protocol mean TLS."""
    tls = any(name in client for name in _TLS_FILES)
    return client.get("security.protocol", "SSL" if tls else "PLAINTEXT")


def in_clear(client: Mapping[str, str]) -> tuple[str, ...]:
    """See `delivered.model.options.Options.in_clear`. `client`: from `client_options`."""
    secret = logins.clear_secret(client)
    found = () if secret is None else (secret,)
    if client.get("security.protocol") != "SASL_PLAINTEXT" or mechanism_of(client) not in ("PLAIN", "OAUTHBEARER"):
        return found
    if client["bootstrap.servers"].startswith(REFERENCES):
        return found
    far = next(
        (host for host, _ in parse_addresses(client["bootstrap.servers"], port=PORT) if not is_loopback(host)), None
    )
    if far is None:
        return found
    what = "the password" if mechanism_of(client) == "PLAIN" else "the token"
    return (
        *found,
        f"kafka.security.protocol=SASL_PLAINTEXT with the mechanism {mechanism_of(client)} sends {what} in clear to "
        f"{far}; write SASL_SSL",
    )


def committed_only(client: Mapping[str, str]) -> bool:
    """Whether a consumer with these settings skips records of open and aborted transactions."""
    return client.get("isolation.level", "read_committed") == "read_committed"
