"""Options of the Kafka source: parsing and error messages, without a server."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivered.clients.kafka import client_options, resolved
from delivered.clients.kafka.librdkafka import consumer_settings as settings
from delivered.connectors.kafka import CONNECTOR, EARLIEST, LATEST, Positions, SourceOptions, Timestamp
from delivered.model.errors import InvariantBroken, UsageError

parse = SourceOptions.parse

SERVERS = {"kafka.bootstrap.servers": "h:9092"}


def options(**more: str) -> SourceOptions:
    return parse({k.lower().replace("__", "."): v for k, v in {**SERVERS, "subscribe": "t", **more}.items()})


def test_defaults() -> None:
    found = options()
    assert (found.topics, found.starting, found.ending, found.rows_max, found.group) == (("t",), None, None, None, None)
    assert found.fail_on_data_loss
    assert found.committed_only
    assert not found.headers


def test_values() -> None:
    found = options(startingOffsets='{"t":{"0":7,"1":-1,"2":-2}}', maxOffsetsPerTrigger="5", includeHeaders="TRUE")
    assert found.starting is not None
    assert dict(found.starting.each) == {("t", 0): 7, ("t", 1): LATEST, ("t", 2): EARLIEST}
    assert (found.rows_max, found.headers) == (5, True)
    timed = options(startingTimestamp="12").starting
    assert timed is not None
    assert timed.everywhere == Timestamp(12)
    assert options(kafka__isolation__level="read_uncommitted").committed_only is False


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"startingoffset": "earliest"}, r"OPTION_UNKNOWN.*'startingoffset'.*Next: write 'startingOffsets'"),
        ({"startingOffsets": "first"}, r"'startingOffsets' is 'first'; it must be \"earliest\", \"latest\""),
        ({"startingOffsets": "[1]"}, r"'startingOffsets' is '\[1\]'"),
        ({"startingOffsets": "{}"}, r"'startingOffsets' is '{}'"),
        ({"startingOffsets": '{"t":{"0":-3}}'}, r"offset -3 for t-0"),
        ({"startingOffsets": '{"t":{"x":1}}'}, r"it must be"),
        ({"startingOffsets": '{"t":{"0":"1"}}'}, r"it must be"),
        ({"startingOffsets": '{"t":{"0":true}}'}, r"it must be"),
        ({"endingOffsets": "earliest"}, r"'endingOffsets'.*cannot be earliest"),
        ({"endingOffsets": '{"t":{"0":-2}}'}, r"cannot be earliest"),
        ({"startingTimestamp": "yesterday"}, r"milliseconds since 1970"),
        ({"startingOffsetsByTimestamp": '{"t":{"0":-5}}'}, r"time -5"),
        ({"maxOffsetsPerTrigger": "0"}, r"'maxOffsetsPerTrigger' is 0; it must be at least 1"),
        ({"minPartitions": "many"}, r"'minPartitions' is 'many'"),
        ({"failOnDataLoss": "perhaps"}, r"'failOnDataLoss' is 'perhaps'"),
        ({"subscribe": " , "}, r"names no topic"),
        ({"subscribePattern": "a.*"}, r"OPTION_CONFLICT.*exactly one of subscribe, subscribePattern, assign"),
        ({"commitOffsetsToGroup": " "}, r"'commitOffsetsToGroup' is empty"),
        ({"minOffsetsPerTrigger": "0"}, r"'minOffsetsPerTrigger' is 0; it must be at least 1"),
        (
            {"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"},
            r"'minOffsetsPerTrigger' is 9, which exceeds .* 8",
        ),
        ({"maxTriggerDelay": "soon"}, r"'maxTriggerDelay' is 'soon'; it must be a time like"),
        ({"maxRecordsPerPartition": "0"}, r"'maxRecordsPerPartition' is 0"),
        ({"fetchOffset.numRetries": "x"}, r"'fetchOffset.numRetries' is 'x'"),
        ({"kafka__max__block__ms": "5"}, r"'kafka\.max\.block\.ms' cannot be set.*kafka\.delivery\.timeout\.ms"),
        ({"kafka__auto__offset__reset": "latest"}, r"write startingOffsets"),
        ({"kafka__max__poll__records": "5"}, r"'kafka\.max\.poll\.records' cannot be set"),
        ({"kafka__isolation__level": "dirty"}, r"read_committed, read_uncommitted"),
        ({"kafka__bootstrap__servers": " "}, r"'kafka.bootstrap.servers' is empty"),
        ({"kafka__ssl__truststore__location": "/a.jks"}, r"type JKS.*kafka\.ssl\.ca\.location"),
        ({"kafka__ssl__keystore__location": "/a.jks"}, r"type JKS.*PKCS12"),
        (
            {"kafka__sasl__jaas__config": "x", "kafka__sasl__mechanism": "GSSAPI"},
            r"sasl\.jaas\.config.*login module of GSSAPI",
        ),
    ],
)
def test_bad_values_say_what_is_wrong(given: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        options(**given)


def test_options_of_sparks_users_are_taken() -> None:
    found = options(
        minOffsetsPerTrigger="10",
        maxTriggerDelay="90s",
        maxRecordsPerPartition="7",
        groupIdPrefix="team",
        **{"fetchOffset.numRetries": "3", "fetchOffset.retryIntervalMs": "10", "kafkaConsumer.pollTimeoutMs": "9"},
    )
    assert (found.rows_min, found.delay_s_max, found.piece_rows_max) == (10, 90.0, 7)
    assert settings(found.client)["group.id"] == "team-reader"
    assert settings(options(kafka__group__id="mine", groupIdPrefix="team").client)["group.id"] == "mine"
    assert settings(options().client)["group.id"] == "delivered-reader"
    assert [options(maxTriggerDelay=t).delay_s_max for t in ("1500", "2m", "1h")] == [1.5, 120.0, 3600.0]


def test_one_of_three_is_needed() -> None:
    with pytest.raises(UsageError, match=r"OPTION_MISSING.*exactly one of subscribe, subscribePattern, assign"):
        parse(SERVERS)
    with pytest.raises(UsageError, match=r"OPTION_MISSING.*kafka\.bootstrap\.servers"):
        parse({"subscribe": "t"})
    with pytest.raises(UsageError, match=r"'subscribePattern' is '\(', not a valid regular expression"):
        parse({**SERVERS, "subscribePattern": "("})
    for nothing in ("", "  "):
        with pytest.raises(UsageError, match=r"'subscribePattern' is '.*'; it matches no topic"):
            parse({**SERVERS, "subscribePattern": nothing})
    for bad in ("[]", '{"t":[]}', '{"t":[-1]}', '{"t":["0"]}', "{}"):
        with pytest.raises(UsageError, match=r"'assign' is .*it must be"):
            parse({**SERVERS, "assign": bad})
    assert parse({**SERVERS, "assign": '{"t":[2,0]}'}).partitions == (("t", 0), ("t", 2))


def test_java_names_become_those_of_librdkafka(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "kafka.bootstrap.servers": "h:1",
        "kafka.fetch.max.wait.ms": "7",
        "kafka.ssl.truststore.location": "/ca.pem",
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.keystore.location": "/me.pem",
        "kafka.ssl.keystore.type": "PEM",
        "kafka.ssl.endpoint.identification.algorithm": "",
        "kafka.sasl.jaas.config": "env:JAAS",
    }
    found = client_options(given)
    assert found["sasl.jaas.config"] == "env:JAAS"
    monkeypatch.setenv(
        "JAAS",
        "org.apache.kafka.common.security.plain.PlainLoginModule required\n"
        ' username = "u" password="a\\"b;c" serviceName=kafka ;',
    )
    assert resolved(found) == {
        "bootstrap.servers": "h:1",
        "fetch.wait.max.ms": "7",
        "ssl.ca.location": "/ca.pem",
        "ssl.certificate.location": "/me.pem",
        "ssl.key.location": "/me.pem",
        "ssl.endpoint.identification.algorithm": "none",
        "sasl.username": "u",
        "sasl.password": 'a"b;c',
    }
    monkeypatch.setenv("JAAS", "com.sun.security.auth.module.Krb5LoginModule required password=hidden;")
    with pytest.raises(UsageError) as refused:
        resolved(found)
    assert "hidden" not in str(refused.value)


def test_passwords_are_not_in_the_repr() -> None:
    assert "hunter2" not in repr(options(kafka__sasl__password="hunter2", kafka__security__protocol="SASL_SSL"))
    login = {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.password": "hunter2"}
    assert "hunter2" not in repr(CONNECTOR.source({**SERVERS, "subscribe": "t", **login}))


NUMBERS = st.dictionaries(st.tuples(st.sampled_from(["a", "b.c", "d-1"]), st.integers(0, 99)), st.integers(0, 2**62))


@given(NUMBERS, st.dictionaries(st.sampled_from(["a", "b.c"]), st.text()), NUMBERS, NUMBERS)
def test_positions_survive_the_checkpoint(
    at: dict[tuple[str, int], int],
    ids: dict[str, str],
    first: dict[tuple[str, int], int],
    begins: dict[tuple[str, int], int],
) -> None:
    positions = Positions(at, ids, first, begins)
    told = json.loads(json.dumps(positions.to_json()))
    assert Positions.from_json(told) == positions
    stored = options(startingOffsets=json.dumps(told), startingTimestamp="5").starting
    assert stored is not None
    assert stored.stored == positions


def test_a_foreign_checkpoint_is_refused() -> None:
    for told in ({"version": 3, "offsets": {"0": 12}}, {"t": [1]}, {"t": {"x": 1}}):
        with pytest.raises(InvariantBroken, match=r"CHECKPOINT_OFFSETS.*not those of a Kafka source"):
            Positions.from_json(told)


def test_importing_and_parsing_loads_no_client_library() -> None:
    code = (
        "import sys; from delivered.connectors.kafka import CONNECTOR\n"
        "CONNECTOR.source({'kafka.bootstrap.servers': 'h', 'subscribe': 't'}).schema()\n"
        "assert not {'confluent_kafka', 'kafka', 'pyspark'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
