"""Whether the brokers have transactions that this user may use, before the first batch."""

from __future__ import annotations

from collections.abc import Sequence

from delivered.clients.pulsar.commands import Error, Rejected
from delivered.clients.pulsar.transactions import Coordinators
from delivered.connectors.pulsar import PulsarSinkOptions
from delivered.connectors.pulsar.client import Admin, not_permitted
from delivered.connectors.pulsar.transactions import CLIENT_ERRORS, cluster, explained_client, soon
from delivered.contract.source import Finding

_OLDEST = (2, 10)
_RIGHTS = (
    "this client may not use the transaction coordinators of {url}, whose topics are in the namespace pulsar/system: "
    "pulsar-admin namespaces grant-permission pulsar/system --role ROLE --actions produce,consume"
)


def check_transactions(options: PulsarSinkOptions, admin: Admin) -> Sequence[Finding]:
    """Loads each coordinator, so a broker that cannot is found here. Raises DeliveredError: no answer, no rights."""
    version = admin.version()
    if version is not None and version < _OLDEST:
        return [Finding.build("PULSAR_TOO_OLD", refuses=True, version="{}.{}".format(*version), url=options.url)]
    coordinators = Coordinators(cluster(options))
    try:
        coordinators.load(range(coordinators.count(soon())), soon())
    except CLIENT_ERRORS as error:
        if isinstance(error, Rejected) and error.code == Error.AUTHORIZATION:
            raise not_permitted(options, _RIGHTS.format(url=options.url)) from None
        raise explained_client(error, options, "transactions") from None
    return []
