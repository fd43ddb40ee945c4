"""Which login settings there are, and what they need: everything else is refused before anything connects."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from delivered.clients.kafka import jaas
from delivered.clients.kafka.sasl import (
    ENDPOINT,
    PREFIX,
    PROVIDER,
    check_extensions,
    load_function,
    mechanism_of,
    split_extensions,
)
from delivered.clients.kafka.tls import VERSIONS
from delivered.model.addresses import is_loopback, split_url
from delivered.model.errors import UsageError
from delivered.model.options import REFERENCES, OptionType, Unfit

KAFKA = "kafka."
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
        *("sasl.mechanism", "sasl.mechanisms", "sasl.username", "sasl.password", jaas.OPTION),
        *("sasl.kerberos.service.name", "sasl.kerberos.principal", "sasl.kerberos.keytab"),
        *(PROVIDER, ENDPOINT, f"{PREFIX}config", f"{PREFIX}method", f"{PREFIX}client.id", f"{PREFIX}client.secret"),
        *(f"{PREFIX}scope", f"{PREFIX}extensions", "https.ca.location", "https.ca.pem"),
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
        raise Unfit(f"is {text!r}; it must be a list of: {', '.join(VERSIONS)}")
    return ",".join(filter(None, names))


def _endpoint(url: str) -> str:
    parts = split_url(url)
    if parts.scheme not in ("http", "https") or parts.username is not None:
        raise Unfit(f"is {url.rpartition('@')[2]!r}; it must be https://host/path, without user and password")
    return url


WORDS: Mapping[str, OptionType[str]] = {
    "ssl.enabled.protocols": OptionType(_protocols, example="TLSv1.3"),
    ENDPOINT: OptionType(_endpoint, example="https://login.example/oauth2/token"),
}


def check_names(owner: str, client: Mapping[str, str]) -> None:
    """Refuse settings of TLS and SASL that connections of ledger and transactions would ignore. Raises UsageError."""
    for name in client:
        if name.startswith(_FAMILIES) and name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.85)
            raise UsageError(
                "OPTION_UNKNOWN",
                f"{owner}: option '{KAFKA}{name}' is not supported: no connection of the sink, the source and the "
                "ledger would follow it.",
                next_step=_UNSUPPORTED.get(name)
                or (f"write '{KAFKA}{near[0]}'" if near else f"remove '{KAFKA}{name}'"),
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
            raise _unfit(owner, f"'{KAFKA}{given[0]}' and '{KAFKA}{given[1]}' are both the {what}", "keep one of them")
    for kind in ("location", "pem"):
        if f"ssl.key.{kind}" in client and f"ssl.certificate.{kind}" not in client:
            needed = f"{KAFKA}ssl.certificate.{kind}"
            raise _unfit(owner, f"'{KAFKA}ssl.key.{kind}' is set without '{needed}'", f"add .option('{needed}', ...)")
    if client.get("enable.ssl.certificate.verification") == "false" and "ssl.crl.location" in client:
        raise _unfit(
            owner, "'kafka.ssl.crl.location' is set, but no certificate is verified",
            "remove kafka.enable.ssl.certificate.verification",
        )  # fmt: skip
    if client.get("security.protocol", "").startswith("SASL_"):
        _check_sasl(owner, client)


def _check_sasl(owner: str, client: Mapping[str, str]) -> None:
    mechanism, text = mechanism_of(client), client.get(jaas.OPTION)
    if mechanism.lower().startswith(REFERENCES) or (text is not None and text.startswith(REFERENCES)):
        return
    given = {**client, **(jaas.settings_of(text, mechanism) if text is not None else {})}
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
                    f"the mechanism {mechanism} needs '{KAFKA}{name}'",
                    f'add .option("{KAFKA}{name}", "env:...")',
                )


def _check_tokens(owner: str, given: Mapping[str, str]) -> None:
    sources = [name for name in (PROVIDER, ENDPOINT) if name in given]
    if len(sources) != 1:
        raise _unfit(
            owner,
            f"the mechanism OAUTHBEARER needs either '{KAFKA}{ENDPOINT}' or '{KAFKA}{PROVIDER}'",
            f'add .option("{KAFKA}{ENDPOINT}", "https://...")' if not sources else "keep one of them",
        )
    if PROVIDER in given:
        load_function(given[PROVIDER])
    elif missing := [n for n in ("client.id", "client.secret") if not given.get(f"{PREFIX}{n}")]:
        raise _unfit(
            owner, f"a token server needs '{KAFKA}{PREFIX}{missing[0]}'",
            f'add .option("{KAFKA}{PREFIX}{missing[0]}", "env:...")',
        )  # fmt: skip
    extensions = given.get(f"{PREFIX}extensions", "")
    if not extensions.startswith(REFERENCES):
        check_extensions(split_extensions(extensions))


def _unfit(owner: str, why: str, next_step: str) -> UsageError:
    return UsageError("OPTION_CONFLICT", f"{owner}: {why}.", next_step=next_step)


def clear_secret(client: Mapping[str, str]) -> str | None:
    """What sends a secret in clear to a token server on another host, for the plan; None: nothing."""
    url = client.get(ENDPOINT, "")
    if not url.startswith("http://") or is_loopback(split_url(url).hostname):
        return None
    return f"the client's secret is sent in clear to {split_url(url).hostname}; write https://"
