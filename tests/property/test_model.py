"""Options keep their names, errors are picklable, secrets stay hidden, text forms round-trip."""

from __future__ import annotations

import inspect
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivered.model import errors
from delivered.model.capability import Guarantee
from delivered.model.errors import REDACTED, DeliveredError, MissingExtra, UsageError, redacted
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope
from delivered.model.options import Option, OptionTable, resolve_secret
from delivered.model.work import Account, Decision, Prepared

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, DeliveredError)]
TABLE = OptionTable(
    "delivered_x sink",
    (Option("startingOffsets", "Where."), Option("maxOffsetsPerTrigger", "How many."), Option("topic", "Which.")),
    passthrough=("kafka.",),
)
texts = st.text(max_size=20)


@given(st.dictionaries(st.sampled_from([o.name for o in TABLE.options]), texts), st.randoms())
def test_options_get_their_case_back(given_options: dict[str, str], dice: object) -> None:
    mangled = {"".join(dice.choice((c.lower(), c.upper())) for c in k): v for k, v in given_options.items()}  # type: ignore[attr-defined]
    assert TABLE.restore(mangled) == given_options
    assert TABLE.restore(TABLE.restore(mangled)) == given_options


@given(st.from_regex(r"kafka\.[a-zA-Z.]{1,20}", fullmatch=True), texts)
def test_passthrough_options_pass(key: str, value: str) -> None:
    assert TABLE.restore({key: value}) == {key.lower(): value}


@given(texts.filter(lambda k: k.lower() not in {"startingoffsets", "maxoffsetspertrigger", "topic"}))
def test_unknown_options_are_refused(key: str) -> None:
    if key.lower().startswith("kafka."):
        return
    with pytest.raises(UsageError) as caught:
        TABLE.restore({key: "1"})
    assert caught.value.code == "DELIVERED_OPTION_UNKNOWN"


def test_a_misspelt_option_is_suggested() -> None:
    with pytest.raises(UsageError, match="startingOffsets") as caught:
        TABLE.restore({"startingofset": "earliest"})
    assert caught.value.next_step == "write 'startingOffsets'"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda k: k.__name__)
@given(code=st.from_regex(r"[A-Z_]{1,20}", fullmatch=True), message=texts, step=st.one_of(st.none(), texts))
def test_errors_travel(kind: type[DeliveredError], code: str, message: str, step: str | None) -> None:
    error = kind(code, message, step)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.code, copy.message, copy.next_step) == (kind, error.code, error.message, error.next_step)
    assert str(copy) == str(error)
    assert str(error).startswith("[DELIVERED_")


def test_a_missing_extra_travels_and_says_what_to_install() -> None:
    copy = pickle.loads(pickle.dumps(MissingExtra("kafka")))
    assert str(copy).endswith('Next: pip install "delivered[kafka]"')


SECRET_KEYS = [
    "kafka.sasl.password",
    "kafka.sasl.jaas.config",
    "kafka.ssl.key.password",
    "kafka.ssl.key.pem",
    "kafka.ssl.keystore.key",
    "kafka.sasl.oauthbearer.client.secret",
    "storage.aws_secret_access_key",
    "storage.azure_storage_account_key",
    "storage.aws_session_token",
    "passphrase",
    "api.key",
]


@pytest.mark.parametrize("key", SECRET_KEYS)
@given(value=st.text(min_size=1, max_size=20).filter(lambda v: not v.startswith(("env:", "file:"))))
def test_secrets_are_replaced(key: str, value: str) -> None:
    assert redacted({key: value, key.upper(): value}) == {key: REDACTED, key.upper(): REDACTED}


def test_references_and_plain_options_stay() -> None:
    plain = {"topic": "t", "kafka.sasl.password": "env:PASSWORD", "keyColumn": "k", "kafka.bootstrap.servers": "a:1"}
    assert redacted(plain) == plain


def test_a_missing_secret_names_the_reference_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_SECRET", raising=False)
    with pytest.raises(UsageError, match="NO_SUCH_SECRET"):
        resolve_secret("kafka.sasl.password", "env:NO_SUCH_SECRET")


fingerprints = st.builds(Fingerprint, st.integers(0, 9**9), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
handles = st.dictionaries(texts, st.one_of(st.integers(), texts, st.lists(st.integers(), max_size=3)), max_size=3)


@given(
    st.lists(st.builds(Prepared, st.integers(0, 9), st.integers(0, 3), fingerprints, handles), max_size=4),
    texts,
    fingerprints,
    st.sampled_from(list(Guarantee)),
)
def test_decisions_read_back_the_same(
    participants: list[Prepared], offsets: str, total: Fingerprint, guarantee: Guarantee
) -> None:
    made = Decision(
        Scope("p", "s", "i"), "me", guarantee, 3, offsets, tuple(participants), {"s": Account(total)}, 1, revision=2
    )
    copy = Decision.from_json(made.to_json())
    assert copy == made
    assert copy.to_json() == made.to_json()
