"""Whether the brokers have transactions that this user may use, before the first batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from delivered.clients.pulsar.commands import Error, Rejected
from delivered.clients.pulsar.transactions import Coordinators
from delivered.connectors.pulsar import PulsarSinkOptions
from delivered.connectors.pulsar.client import Admin, not_permitted
from delivered.connectors.pulsar.transactions import CLIENT_ERRORS, cluster, explained_client, soon
from delivered.contract.source import Finding
from delivered.model.capability import Guarantee
from delivered.model.errors import Unreachable

_OLDEST = (2, 10)
_RIGHTS = (
    "this client may not use the transaction coordinators of {url}, whose topics are in the namespace pulsar/system: "
    "pulsar-admin namespaces grant-permission pulsar/system --role ROLE --actions consume"
)


def check_transactions(options: PulsarSinkOptions, admin: Admin) -> Sequence[Finding]:
    """What rules out exactly_once. Loads each coordinator, so that a broker that cannot is found here.

    Raises:
        DeliveredError: the brokers did not answer.
    """
    only = Guarantee.EXACTLY_ONCE
    version = admin.version()
    if version is not None and version < _OLDEST:
        text = ".".join(map(str, version))
        return [Finding.build("PULSAR_TOO_OLD", refuses=True, only=only, version=text, url=options.url)]
    coordinators = Coordinators(cluster(options))
    try:
        coordinators.load(range(coordinators.count(soon())), soon())
    except CLIENT_ERRORS as error:
        why = explained_client(error, options, "transactions")
        if isinstance(error, Rejected) and error.code == Error.AUTHORIZATION:
            why = not_permitted(options, _RIGHTS.format(url=options.url))
        if isinstance(why, Unreachable):
            raise why from None
        return [replace(Finding.refusal(why), only=only)]
    return []
