"""Every value out of every source: exact, refused as a record, or refused at the start. See test_catalogue.py."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from docs import value_types as types
from tests.support.catalogue.databases import CHANGES, OUTBOXES, changes
from tests.support.catalogue.receivers import RECEIVERS
from tests.support.catalogue.stored import NOT_STORED, compare
from tests.support.sweeps import sweep

QUEUES = ("rabbitmq", "activemq", "rocketmq")
SOURCES = {
    **CHANGES,
    **OUTBOXES,
    **{f"{name} receiver" if name in QUEUES else name: make for name, make in RECEIVERS.items()},
}
QUICK = ("postgres changes", "log")


@pytest.mark.parametrize("path", sweep(SOURCES, lambda name: name in QUICK))
def test_each_value_is_read_exactly_or_refused(request: pytest.FixtureRequest, path: str) -> None:
    compare("sources", path, SOURCES[path](request))


def test_the_catalogue_of_sources_is_complete() -> None:
    assert set(types.stored()["sources"]) | NOT_STORED["sources"] == set(SOURCES)


ODD_SETTINGS = (
    "bytea_output=escape", "extra_float_digits=0", "DateStyle=German,DMY", "IntervalStyle=sql_standard",
    "TimeZone=Asia/Kathmandu", "standard_conforming_strings=off", "client_encoding=LATIN1", "xmloption=document",
    "array_nulls=off", "default_transaction_isolation=serializable",
)  # fmt: skip


@pytest.mark.matrix
def test_the_settings_of_a_session_change_nothing_in_a_change_stream(request: pytest.FixtureRequest) -> None:
    found = changes(request, " ".join(f"-c {setting}" for setting in ODD_SETTINGS))
    assert types.packed(found) == types.stored()["sources"]["postgres changes"]


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("localedef") is None, reason="no program makes a locale")
def test_a_locale_of_money_changes_nothing(
    request: pytest.FixtureRequest, new_postgres: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        subprocess.run(["localedef", "-i", "de_DE", "-f", "UTF-8", f"{folder}/de_DE.UTF-8"], check=True)
        monkeypatch.setenv("LOCPATH", folder)
        server = new_postgres()
        with server.connect() as connection:
            connection.execute("SET lc_monetary = 'de_DE.UTF-8'")
            assert connection.execute("SELECT 1234.56::numeric::money::text").fetchone() == ("1.234,56 €",)
        found = changes(request, "-c lc_monetary=de_DE.UTF-8", server)
    assert types.packed(found) == types.stored()["sources"]["postgres changes"]
