"""Open transactions of Pulsar for an operator, and whether its brokers have transactions at all."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.pulsar import read_all, sink, source, values, with_coordinators
from tests.support.servers import Pulsar
from tests.support.sinks import SHARDS, Rig

from delivered.clients.pulsar.transactions import Coordinators
from delivered.connectors.pulsar.client import Admin
from delivered.connectors.pulsar.committer import Transaction, check_transactions, cluster, soon
from delivered.model.capability import Guarantee
from delivered.model.errors import UsageError
from delivered.model.work import Ok
from delivered_lab.brokers import pulsar as lab

EXACT = Guarantee.EXACTLY_ONCE


def test_open_transactions_are_listed_and_ended_by_hand(pulsar: Pulsar, tmp_path: Path) -> None:
    topic = pulsar.topic()
    rig = Rig(sink(tmp_path, pulsar, topic))
    assert rig.sink.preflight(EXACT) == []
    context = rig.context()
    messages = rig.write(rig.plan(context, 0))
    with closing(rig.sink.committer(rig.scope)) as committer:
        listed = committer.open_transactions()
        assert listed is not None
        assert [t.state for t in listed] == ["OPEN"] * SHARDS
        prepared = [p for m in messages for p in m.participants]
        assert all(any(t.participant.names(p) for t in listed) for p in prepared)
        assert all(topic in t.targets for t in listed)
        assert {t.timeout_s for t in listed} == {7 * 86_400}
        assert all(0 <= (t.age_s() or 0) < 600 for t in listed)
        first, second = (t.transactional_id for t in listed)
        assert committer.end_by_id(first, commit=True) == Ok(None)
        assert committer.end_by_id(second, commit=False) == Ok(None)
        assert committer.open_transactions() == []
        for ended in (first, second, "0-99999", "x"):
            with pytest.raises(UsageError, match="TRANSACTION_NOT_OPEN"):
                committer.end_by_id(ended, commit=True)
    committed = next(t.participant for t in listed if t.transactional_id == first)
    assert isinstance(committed, Transaction)
    (shard,) = [m.shard for m in messages if any(committed.names(p) for p in m.participants)]
    assert values(read_all(source(pulsar, topic))) == rig.rows(0, shard).column("value").to_pylist()


@pytest.mark.matrix
def test_brokers_without_transactions_are_refused_and_read(new_pulsar: Callable[..., Pulsar], tmp_path: Path) -> None:
    pulsar = new_pulsar(transactionCoordinatorEnabled="false")
    topic = pulsar.topic()
    made = sink(tmp_path, pulsar, topic)
    (finding,) = made.preflight(EXACT)
    assert (finding.code, finding.refuses, finding.only) == ("PULSAR_TRANSACTIONS_OFF", True, EXACT)
    assert "transactionCoordinatorEnabled=true" in f"{finding.message} {finding.next_step}"
    assert made.preflight(Guarantee.AT_LEAST_ONCE) == []
    pulsar.send(topic, [b"a"])
    assert values(read_all(source(pulsar, topic))) == [b"a"]


@pytest.mark.matrix
def test_rights_that_transactions_need(new_pulsar: Callable[..., Pulsar], tmp_path: Path) -> None:
    secret = secrets.token_bytes(32)
    server = new_pulsar(**lab.with_tokens(secret))
    admin = Pulsar(server.broker, lab.make_token(secret, lab.ADMIN))
    admin.admin("POST", "namespaces/public/default/permissions/role", ["produce", "consume"])
    made = sink(tmp_path, admin, admin.topic(), token=lab.make_token(secret, "role"))
    (finding,) = made.preflight(EXACT)
    assert "grant-permission pulsar/system --role ROLE --actions consume" in finding.message
    admin.admin("POST", "namespaces/pulsar/system/permissions/role", ["consume"])
    assert made.preflight(EXACT) == []
    rig = Rig(made)
    messages = rig.write(rig.plan(rig.context(), 0))
    with closing(made.committer(rig.scope)) as committer:
        assert len(committer.open_transactions() or ()) == len(messages) == SHARDS
        assert committer.abort_orphans([]) == Ok(SHARDS)
        assert committer.open_transactions() == []
    admin.close()


@pytest.mark.matrix
def test_each_of_several_coordinators_is_loaded(new_pulsar: Callable[..., Pulsar], tmp_path: Path) -> None:
    pulsar = new_pulsar()
    options: Any = sink(tmp_path, pulsar, pulsar.topic()).options
    with_coordinators(pulsar, 16)
    assert check_transactions(options, Admin(options)) == []
    coordinators = Coordinators(cluster(options))
    assert coordinators.count(soon()) == 16
    opened = [coordinators.begin(n, 3_600, soon()) for n in range(32)]
    assert sorted({t.most for t in opened}) == list(range(16))
    admin = Admin(options)
    assert all(admin.transaction(*t) for t in opened)
    assert coordinators.end_all(opened, commit=False, deadline=soon()) == [Ok(None)] * 32
    assert not any(admin.transaction(*t) for t in opened)
