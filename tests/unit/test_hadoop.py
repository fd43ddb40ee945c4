"""What Hadoop's settings make of a checkpoint location in Python."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from delivered import checkpoint
from delivered.checkpoint import configure, open_folder, prefixes, read_logged, remember, store_of
from delivered.model.errors import DeliveredError, Refused, Unreachable
from delivered.model.patience import asking_once

S3 = "s3a://lake/checkpoints/orders"
KEYS = {"fs.s3a.access.key": "A", "fs.s3a.secret.key": "S"}
OWN = {"access_key": "A", "secret_key": "S"}
HADOOPS = "org.apache.hadoop.fs.s3a"
PROVIDER = "fs.s3a.aws.credentials.provider"
SIMPLE = f"{HADOOPS}.SimpleAWSCredentialsProvider"
DEFAULT = """
    org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider,
    org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider,
    software.amazon.awssdk.auth.credentials.EnvironmentVariableCredentialsProvider,
    org.apache.hadoop.fs.s3a.auth.IAMInstanceCredentialsProvider
  """
"""Of Hadoop 3.5, as core-default.xml writes it."""


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: Any) -> None:
    monkeypatch.setattr(checkpoint, "_stores", {})
    monkeypatch.setattr(checkpoint, "_settings", {})
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)


@pytest.mark.parametrize(
    ("settings", "store"),
    [
        ({}, {}),
        (KEYS, OWN),
        (KEYS | {PROVIDER: DEFAULT}, OWN),
        ({PROVIDER: DEFAULT}, {}),
        (KEYS | {"fs.s3a.session.token": "T"}, {**OWN, "session_token": "T"}),
        (KEYS | {"fs.s3a.session.token": "T", PROVIDER: SIMPLE}, OWN),
        ({PROVIDER: f"{HADOOPS}.AnonymousAWSCredentialsProvider"}, {"anonymous": "true"}),
        (KEYS | {"fs.s3a.bucket.lake.access.key": "B", "fs.s3a.bucket.x.secret.key": "X"}, {**OWN, "access_key": "B"}),
        ({"fs.s3a.endpoint.region": "eu-west-1"}, {"region": "eu-west-1"}),
        ({"fs.s3a.endpoint": "s3.eu-west-1.amazonaws.com"}, {"region": "eu-west-1", "scheme": "https"}),
        ({"fs.s3a.endpoint": "s3.amazonaws.com"}, {"region": "us-east-1", "scheme": "https"}),
        (
            {"fs.s3a.endpoint": "http://127.0.0.1:9000/"},
            {"scheme": "http", "endpoint_override": "127.0.0.1:9000", "force_virtual_addressing": "false"},
        ),
        (
            {"fs.s3a.endpoint": "minio:9000", "fs.s3a.connection.ssl.enabled": "false"},
            {"scheme": "http", "endpoint_override": "minio:9000", "force_virtual_addressing": "true"},
        ),
        (
            {"fs.s3a.endpoint": "minio:9000", "fs.s3a.path.style.access": "true"},
            {"scheme": "https", "endpoint_override": "minio:9000", "force_virtual_addressing": "false"},
        ),
        (
            {"fs.s3a.proxy.host": "p", "fs.s3a.proxy.port": "3128"}
            | {"fs.s3a.proxy.username": "u", "fs.s3a.proxy.password": "a@b"},
            {"proxy_options": "http://u:a%40b@p:3128"},
        ),
        ({"fs.s3a.encryption.algorithm": "SSE-KMS"}, {}),
    ],
)  # fmt: skip
def test_arguments_of_pyarrow(settings: dict[str, str], store: dict[str, str]) -> None:
    assert store_of(S3, settings) == store
    if store and "proxy_options" not in store:  # pyarrow takes them
        remember(S3, {"region": "us-east-1", **store})
        filesystem, path = open_folder(S3)
        assert isinstance(filesystem, fs.S3FileSystem) and path == "lake/checkpoints/orders"


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({PROVIDER: "com.example.VaultProvider"}, "PROVIDER"),
        ({PROVIDER: f"{HADOOPS}.auth.AssumedRoleCredentialProvider", **KEYS}, "PROVIDER"),
        ({PROVIDER: SIMPLE}, "KEYS"),
        ({"hadoop.security.credential.provider.path": "jceks://file/keys"}, "KEYSTORE"),
        ({"fs.s3a.bucket.lake.security.credential.provider.path": "jceks://file/keys"}, "KEYSTORE"),
        ({"fs.s3a.encryption.algorithm": "SSE-C"}, "ENCRYPTION"),
        ({"fs.s3a.encryption.algorithm": "CSE-KMS"}, "ENCRYPTION"),
    ],
)  # fmt: skip
def test_what_python_cannot_do_is_refused(settings: dict[str, str], code: str) -> None:
    with pytest.raises(Unreachable, match="CHECKPOINT_UNREADABLE") as refused:
        store_of(S3, settings)
    assert refused.value.condition == code


def test_a_path_without_a_scheme_is_on_the_default_file_system() -> None:
    default = {"fs.defaultFS": "s3a://lake"}
    assert store_of("/checkpoints/orders", {**default, **KEYS}) == {**default, **OWN}
    remember("/checkpoints/orders", {**default, **OWN, "region": "us-east-1"})
    filesystem, path = open_folder("/checkpoints/orders")
    assert isinstance(filesystem, fs.S3FileSystem) and path == "lake/checkpoints/orders"
    assert store_of("/c", {"fs.defaultFS": "file:///"}) == {} == store_of("file:/c", default)
    with pytest.raises(Refused, match=r"CHECKPOINT_RELATIVE.*'orders' is relative.*s3a://lake"):
        store_of("orders", default)


def test_high_availability_of_hdfs_is_taken_over() -> None:
    settings = {
        "fs.defaultFS": "hdfs://ns",
        "dfs.nameservices": "ns",
        "dfs.ha.namenodes.ns": "a,b",
        "dfs.namenode.rpc-address.ns.a": "h1:8020",
        "dfs.replication": "3",
    }
    store = store_of("hdfs:///c", settings)
    assert store == {k: v for k, v in settings.items() if k != "dfs.replication"}
    assert all(k.startswith((*prefixes("hdfs:///c", settings), "fs.defaultFS")) for k in store)
    assert prefixes("/c", {"fs.defaultFS": "file:///"}) == ()


def test_a_process_without_a_session_has_the_pipelines_settings_and_hadoops_files(
    tmp_path: Path, monkeypatch: Any
) -> None:
    with pytest.raises(DeliveredError, match="CHECKPOINT_UNREADABLE"):
        configure(S3, {"spark.hadoop.fs.s3a.aws.credentials.provider": "com.example.Vault"})
        open_folder(S3)
    (tmp_path / "core-site.xml").write_text(
        "<configuration><property><name>fs.s3a.access.key</name><value>A</value></property>"
        "<property><name>fs.s3a.endpoint</name><value>http://127.0.0.1:1</value></property></configuration>"
    )
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    configure(S3, {"spark.hadoop.fs.s3a.secret.key": "S", "spark.master": "local"})
    filesystem, _ = open_folder(S3)
    assert filesystem.equals(
        fs.S3FileSystem(access_key="A", secret_key="S", scheme="http", endpoint_override="127.0.0.1:1")
    )
    remember(S3, {"access_key": "B", "secret_key": "S", "region": "x"})  # a session says more than files
    assert filesystem != open_folder(S3)[0]


def test_google_cloud_storage_that_does_not_answer_is_given_up() -> None:
    """Its client tries for a quarter of an hour, unless told otherwise; the time limit of tests is shorter."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # not listening
        place = f"127.0.0.1%3A{closed.getsockname()[1]}"
        with asking_once(1), pytest.raises(Unreachable, match="CHECKPOINT_UNREADABLE"):
            read_logged(f"gs://anonymous@bucket/c?scheme=http&endpoint_override={place}")
