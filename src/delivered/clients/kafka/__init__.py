"""A Kafka client over Arrow columns: connections, record batches, fetch, produce, transactions. Knows no connector.

Its settings as users write them: logins, TLS, words that librdkafka and the Java client share. What a request may come
to, besides its answer.
"""

from __future__ import annotations

import difflib
import importlib
import re
import ssl
from collections.abc import Mapping
from typing import Any

from delivered.model.errors import UsageError
from delivered.model.options import (
    REFERENCES,
    OptionType,
    Unfit,
    choice,
    is_loopback,
    option,
    parse_addresses,
    resolve_secret,
    split_url,
    unverified,
)

PREFIX = "kafka."
"""Of options that are settings of a client."""

OAUTHBEARER = "sasl.oauthbearer."
PROVIDER, ENDPOINT = f"{OAUTHBEARER}token.provider", f"{OAUTHBEARER}token.endpoint.url"
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "GSSAPI")
VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
_EXTENSION_NAME = re.compile(r"[A-Za-z]+")
_EXTENSION_VALUE = re.compile(r"[\x21-\x7e \t\r\n]+")


def mechanism_of(client: Mapping[str, str], default: str = "GSSAPI") -> str:
    """The mechanism of a client's settings; Kafka's default is GSSAPI."""
    return client.get("sasl.mechanism", client.get("sasl.mechanisms", default)).upper()


def load_function(text: str) -> Any:
    """A function by its dotted path: shop.tokens.kafka_token, or shop.tokens:kafka_token. Raises UsageError."""
    module, _, name = text.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        why = str(error) or "no module is named"
    else:
        if callable(found):
            return found
        why = "it is no function"
    raise UsageError("KAFKA_TOKEN.PROVIDER", option=PROVIDER, text=text, reason=why)


def split_extensions(text: str) -> dict[str, str]:
    """name=value,name=value"""
    pairs = (part.partition("=") for part in text.split(",") if part.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


def check_extensions(given: Mapping[str, str]) -> Mapping[str, str]:
    """Raises UsageError: a name or value that RFC 7628 does not allow."""
    for name, value in given.items():
        if not _EXTENSION_NAME.fullmatch(name) or name.lower() == "auth" or not _EXTENSION_VALUE.fullmatch(value):
            raise UsageError("OPTION_VALUE.OAUTH_EXTENSIONS", name=name)
    return given


# `sasl.jaas.config`, in which the Java client's users write logins, as librdkafka's settings.

JAAS = "sasl.jaas.config"
_LOGIN = re.compile(r"\s*([\w.$]+)\s+required\s+(.*);\s*", re.DOTALL)
_PAIR = re.compile(r"""([\w.]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^\s;"']+))\s*""")
_PASSWORD = {"username": "sasl.username", "password": "sasl.password"}
_MODULES = {
    "org.apache.kafka.common.security.plain.PlainLoginModule": ("PLAIN", _PASSWORD),
    "org.apache.kafka.common.security.scram.ScramLoginModule": ("SCRAM", _PASSWORD),
    "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule": (
        "OAUTHBEARER",
        {
            "clientId": "sasl.oauthbearer.client.id",
            "clientSecret": "sasl.oauthbearer.client.secret",
            "scope": "sasl.oauthbearer.scope",
        },
    ),
    "com.sun.security.auth.module.Krb5LoginModule": (
        "GSSAPI",
        {
            "keyTab": "sasl.kerberos.keytab",
            "principal": "sasl.kerberos.principal",
            "serviceName": "sasl.kerberos.service.name",
        },
    ),
}
_EXTENSION = "extension_"
_JAVA_MODULES_ONLY = {
    *("useKeyTab", "storeKey", "useTicketCache", "doNotPrompt", "refreshKrb5Config", "renewTGT", "debug"),
    *("isInitiator", "serviceName"),
}


def jaas_settings(text: str, mechanism: str) -> dict[str, str]:
    """The settings in a login.

    Args:
        mechanism: "": not known.

    Raises:
        UsageError: it does not show the text, which holds a password.
    """
    login = _LOGIN.fullmatch(text)
    module, known = _MODULES.get(login[1], ("", {})) if login else ("", {})
    if login is None or not known or (mechanism and not mechanism.startswith(module)):
        raise _unclear(
            f'it must be the login module of {mechanism or "the mechanism"}, required, name="value" ...;', mechanism
        )
    pairs = {m[1]: re.sub(r"\\(.)", r"\1", m[2] or m[3] or m[4] or "") for m in _PAIR.finditer(login[2])}
    if _PAIR.sub("", login[2]).strip():
        raise _unclear('its options must be name="value"', mechanism)
    extensions = {n.removeprefix(_EXTENSION): v for n, v in pairs.items() if n.startswith(_EXTENSION)}
    if other := [n for n in pairs if n not in known and n not in _JAVA_MODULES_ONLY and not n.startswith(_EXTENSION)]:
        raise _unclear(f"{other[0]} is not known; known: {', '.join(known)}", mechanism)
    if known is _PASSWORD and len(pairs) < len(known):
        raise _unclear("it needs username and password", mechanism)
    found = {known[name]: value for name, value in pairs.items() if name in known}
    if extensions:
        found["sasl.oauthbearer.extensions"] = ",".join(f"{n}={v}" for n, v in extensions.items())
    return found


def _unclear(why: str, mechanism: str) -> UsageError:
    instead = {"OAUTHBEARER": "kafka.sasl.oauthbearer.*", "GSSAPI": "kafka.sasl.kerberos.*"}
    return UsageError(
        "OPTION_VALUE.JAAS", reason=why, instead=instead.get(mechanism, "kafka.sasl.username and kafka.sasl.password")
    )


# Settings of TLS and logins.

TLS_SETTINGS = frozenset(
    {
        *("ssl.ca.location", "ssl.ca.pem", "ssl.crl.location", "ssl.truststore.location", "ssl.truststore.password"),
        *("ssl.certificate.location", "ssl.certificate.pem", "ssl.key.location", "ssl.key.pem", "ssl.key.password"),
        *("ssl.keystore.location", "ssl.keystore.password", "ssl.enabled.protocols", "ssl.cipher.suites"),
        *("ssl.endpoint.identification.algorithm", "enable.ssl.certificate.verification"),
    }
)
SASL_SETTINGS = frozenset(
    {
        *("sasl.mechanism", "sasl.mechanisms", "sasl.username", "sasl.password", JAAS),
        *("sasl.kerberos.service.name", "sasl.kerberos.principal", "sasl.kerberos.keytab"),
        *(
            PROVIDER,
            ENDPOINT,
            f"{OAUTHBEARER}config",
            f"{OAUTHBEARER}method",
            f"{OAUTHBEARER}client.id",
            f"{OAUTHBEARER}client.secret",
        ),
        *(f"{OAUTHBEARER}scope", f"{OAUTHBEARER}extensions", "https.ca.location", "https.ca.pem"),
    }
)
SETTINGS = frozenset({"security.protocol", *TLS_SETTINGS, *SASL_SETTINGS})
_FAMILIES = ("ssl.", "sasl.", "https.", "enable.ssl.", "enable.sasl.", "security.")
_UNSUPPORTED = {
    "ssl.protocol": "write kafka.ssl.enabled.protocols, for example TLSv1.3",
    "sasl.kerberos.kinit.cmd": "write kafka.sasl.kerberos.keytab: tickets are fetched and renewed without kinit",
    "sasl.kerberos.min.time.before.relogin": "remove it: tickets are fetched and renewed by Kerberos' library",
    "enable.sasl.oauthbearer.unsecure.jwt": "remove it: a token without signature proves nothing",
    "ssl.ca.certificate.stores": "write kafka.ssl.ca.location",
}
_FORMS = {
    "client certificate": ("ssl.certificate.location", "ssl.certificate.pem", "ssl.keystore.location"),
    "trusted certificates": ("ssl.ca.location", "ssl.ca.pem", "ssl.truststore.location"),
}


def _protocols(text: str) -> str:
    spelling = {name.lower(): name for name in VERSIONS}
    names = [spelling.get(part.strip().lower()) for part in text.split(",") if part.strip()]
    if not names or None in names:
        raise Unfit.build("OPTION_VALUE.TLS_VERSIONS", text=text, known=", ".join(VERSIONS))
    return ",".join(filter(None, names))


def _endpoint(url: str) -> str:
    parts = split_url(url)
    if parts.scheme not in ("http", "https") or parts.username is not None:
        raise Unfit.build("OPTION_VALUE.HTTPS_URL", url=url.rpartition("@")[2])
    return url


LOGIN_WORDS: Mapping[str, OptionType[str]] = {
    "ssl.enabled.protocols": OptionType(_protocols, example="TLSv1.3"),
    ENDPOINT: OptionType(_endpoint, example="https://login.example/oauth2/token"),
}


def check_names(owner: str, client: Mapping[str, str]) -> None:
    """Refuse settings of TLS and SASL that connections of ledger and transactions would ignore. Raises UsageError."""
    for name in client:
        if name.startswith(_FAMILIES) and name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.85)
            raise UsageError(
                "OPTION_UNKNOWN.KAFKA",
                owner=owner,
                name=name,
                action=_UNSUPPORTED.get(name) or (f"write '{PREFIX}{near[0]}'" if near else f"remove '{PREFIX}{name}'"),
            )


def check_complete(owner: str, client: Mapping[str, str]) -> None:
    """Refuse a login that lacks something, or says it twice.

    Args:
        client: by librdkafka's names; secrets may be references.

    Raises:
        UsageError: with what is missing.
    """
    for what, names in _FORMS.items():
        given = [name for name in names if name in client]
        if len(given) > 1:
            raise _unfit(
                owner, f"'{PREFIX}{given[0]}' and '{PREFIX}{given[1]}' are both the {what}", "keep one of them"
            )
    for kind in ("location", "pem"):
        if f"ssl.key.{kind}" in client and f"ssl.certificate.{kind}" not in client:
            needed = f"{PREFIX}ssl.certificate.{kind}"
            raise _unfit(owner, f"'{PREFIX}ssl.key.{kind}' is set without '{needed}'", f"add .option('{needed}', ...)")
    if client.get("enable.ssl.certificate.verification") == "false" and "ssl.crl.location" in client:
        raise _unfit(
            owner, "'kafka.ssl.crl.location' is set, but no certificate is verified",
            "remove kafka.enable.ssl.certificate.verification",
        )  # fmt: skip
    if client.get("security.protocol", "").startswith("SASL_"):
        _check_sasl(owner, client)


def _check_sasl(owner: str, client: Mapping[str, str]) -> None:
    mechanism, text = mechanism_of(client), client.get(JAAS)
    if mechanism.lower().startswith(REFERENCES) or (text is not None and text.startswith(REFERENCES)):
        return
    given = {**client, **(jaas_settings(text, mechanism) if text is not None else {})}
    if mechanism == "GSSAPI":
        if "sasl.mechanism" not in client and "sasl.mechanisms" not in client and "sasl.username" in client:
            why = "'kafka.sasl.username' is set without 'kafka.sasl.mechanism', which means GSSAPI"
            raise _unfit(owner, why, 'add .option("kafka.sasl.mechanism", "SCRAM-SHA-512")')
        if "sasl.kerberos.principal" in given and "sasl.kerberos.keytab" not in given:
            why = "'kafka.sasl.kerberos.principal' is set without a keytab, and is used with one only"
            raise _unfit(owner, why, 'add .option("kafka.sasl.kerberos.keytab", "/etc/security/client.keytab")')
    elif mechanism == "OAUTHBEARER":
        _check_tokens(owner, given)
    else:
        for name in ("sasl.username", "sasl.password"):
            if not given.get(name):
                raise _unfit(
                    owner,
                    f"the mechanism {mechanism} needs '{PREFIX}{name}'",
                    f'add .option("{PREFIX}{name}", "env:...")',
                )


def _check_tokens(owner: str, given: Mapping[str, str]) -> None:
    sources = [name for name in (PROVIDER, ENDPOINT) if name in given]
    if len(sources) != 1:
        raise _unfit(
            owner,
            f"the mechanism OAUTHBEARER needs either '{PREFIX}{ENDPOINT}' or '{PREFIX}{PROVIDER}'",
            f'add .option("{PREFIX}{ENDPOINT}", "https://...")' if not sources else "keep one of them",
        )
    if PROVIDER in given:
        load_function(given[PROVIDER])
    elif missing := [n for n in ("client.id", "client.secret") if not given.get(f"{OAUTHBEARER}{n}")]:
        raise _unfit(
            owner, f"a token server needs '{PREFIX}{OAUTHBEARER}{missing[0]}'",
            f'add .option("{PREFIX}{OAUTHBEARER}{missing[0]}", "env:...")',
        )  # fmt: skip
    extensions = given.get(f"{OAUTHBEARER}extensions", "")
    if not extensions.startswith(REFERENCES):
        check_extensions(split_extensions(extensions))


def _unfit(owner: str, why: str, next_step: str) -> UsageError:
    return UsageError("OPTION_CONFLICT.KAFKA_LOGIN", owner=owner, reason=why, action=next_step)


def clear_secret(client: Mapping[str, str]) -> str | None:
    """What sends a secret in clear to a token server on another host, for the plan; None: nothing."""
    url = client.get(ENDPOINT, "")
    if not url.startswith("http://") or is_loopback(split_url(url).hostname):
        return None
    return f"the client's secret is sent in clear to {split_url(url).hostname}; write https://"


# All settings: what may be set, and as which client.

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
    "sasl.mechanisms": "sasl.mechanism",
    "request.required.acks": "acks",
    "compression.codec": "compression.type",
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
    **LOGIN_WORDS,
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


def _file(text: str) -> str:
    if not text.strip():  # it would stand for the system's certificates
        raise Unfit.build("OPTION_VALUE.EMPTY")
    return text


_WORDS |= dict.fromkeys(_TLS_FILES, OptionType(_file))


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
            raise UsageError("OPTION_RESERVED", owner=owner, name=name, reason=why)
    _check_store(owner, given, "truststore", "write kafka.ssl.ca.location with a PEM file: keytool -exportcert -rfc")
    _check_store(owner, given, "keystore", "convert it: keytool -importkeystore -deststoretype PKCS12")
    words = _words(owner, given)
    login = given.get(JAAS, "env:")
    if not login.startswith(REFERENCES):
        jaas_settings(login, mechanism_of(words, ""))
    check_names(owner, client_options(values, owner))
    _check_protocol(owner, words)


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
    shown = f"is {protocol}" if protocol else "is not set, which means PLAINTEXT"
    login = next((n for n in given if n.startswith("sasl.")), None)
    if login is not None and not protocol.startswith("SASL_"):
        raise UsageError("OPTION_CONFLICT.KAFKA_LOGIN_UNUSED", owner=owner, login=login, value=shown)
    asked = [n for n, v in given.items() if n.startswith(("ssl.", "enable.ssl.")) and v not in ("none", "false")]
    if asked and protocol_of({**dict.fromkeys(given, ""), "security.protocol": protocol}).endswith("PLAINTEXT"):
        raise UsageError(
            "OPTION_CONFLICT.KAFKA_TLS_UNUSED",
            owner=owner,
            files=asked[0],
            protocol=shown,
            tls_protocol=(protocol or "PLAINTEXT").replace("PLAINTEXT", "SSL"),
        )


def _check_store(owner: str, given: Mapping[str, str], store: str, way_out: str) -> None:
    location = given.get(f"ssl.{store}.location")
    kind = given.get(f"ssl.{store}.type", "JKS").upper()
    if location is not None and kind == "JKS":
        raise UsageError(
            "OPTION_VALUE.KAFKA_STORE", owner=owner, store=store, location=location, kind=kind, alternative=way_out
        )


def client_options(values: Mapping[str, str], owner: str = "Kafka") -> dict[str, str]:
    """librdkafka's settings, without the prefix; secrets are not resolved yet.

    Args:
        values: options that passed `check_client`.

    Raises:
        UsageError: two names of one setting have different values.
    """
    given = _words("", {k.removeprefix(PREFIX): v for k, v in values.items() if k.startswith(PREFIX)})
    settings: dict[str, str] = {}
    written: dict[str, str] = {}
    for name, value in given.items():
        found: tuple[str, ...] = (_RENAMED.get(name, name),)
        if name in ("ssl.truststore.type", "ssl.keystore.type"):
            continue
        if name == "ssl.truststore.location" and given.get("ssl.truststore.type") == "PEM":
            found = ("ssl.ca.location",)
        elif name == "ssl.keystore.location" and given.get("ssl.keystore.type") == "PEM":
            found = ("ssl.certificate.location", "ssl.key.location")
        elif name == "buffer.memory":
            found, value = ("queue.buffering.max.kbytes",), str(max(1, _bytes(value) // 1024))
        for setting in found:
            if settings.setdefault(setting, value) != value:
                first, second = PREFIX + written[setting], PREFIX + name
                raise UsageError("OPTION_CONFLICT.SAME", owner=owner, first=first, second=second, name=second)
            written[setting] = name
    return settings


def _bytes(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError("OPTION_VALUE.BUFFER_MEMORY", value=value) from None


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
    text = settings.pop(JAAS, None)
    if text is not None:
        settings |= jaas_settings(text, mechanism_of(settings, ""))
    return settings


def protocol_of(client: Mapping[str, str]) -> str:
    """The security protocol of a client's settings. Certificates without a protocol mean TLS."""
    tls = any(name in client for name in _TLS_FILES)
    return client.get("security.protocol") or ("SSL" if tls else "PLAINTEXT")


_UNVERIFIED = {
    "enable.ssl.certificate.verification": ("false", "the server"),
    "ssl.endpoint.identification.algorithm": ("none", "its name"),
}


def in_clear(client: Mapping[str, str]) -> tuple[str, ...]:
    """See `delivered.model.options.Options.in_clear`. `client`: from `client_options`."""
    secret = clear_secret(client)
    found = () if secret is None else (secret,)
    if client["bootstrap.servers"].startswith(REFERENCES):
        return found
    far = next(
        (host for host, _ in parse_addresses(client["bootstrap.servers"], port=PORT) if not is_loopback(host)), None
    )
    if far is None:
        return found
    if protocol_of(client).endswith("SSL"):
        given = ((name, what) for name, (word, what) in _UNVERIFIED.items() if client.get(name) == word)
        return (*found, *(unverified(f"{PREFIX}{n}={client[n]}", far, "ssl.ca.location", w) for n, w in given))
    if client.get("security.protocol") != "SASL_PLAINTEXT" or mechanism_of(client) not in ("PLAIN", "OAUTHBEARER"):
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


# What a request to a broker may come to, besides its answer.


class NoAnswer(Exception):
    """No response to a request; it is unknown whether it took effect."""


class NotSent(NoAnswer):
    """The request was not sent in full, so it had no effect."""


class Closed(NotSent):
    """The server ended the connection before it could be used: it starts, stops, or expects another protocol or login.

    Attributes:
        answered: it had said which versions it speaks, so it is a broker that runs.
    """

    def __init__(self, text: str, answered: bool = False) -> None:
        super().__init__(text)
        self.answered = answered


class NoCredentials(NotSent):
    """No token or ticket can be had now: its server does not answer."""


class Rejected(NotSent):
    """TLS or authentication failed, which no retry fixes.

    Attributes:
        tls: the certificate or the protocol of the server, not the credentials.
    """

    def __init__(self, text: str, tls: bool = False) -> None:
        super().__init__(text)
        self.tls = tls


class CredentialsRefused(Rejected):
    """No token or ticket can be had with these settings."""
