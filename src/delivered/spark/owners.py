"""Sessions that have every format registered, each with the owner of ledgers that its registered classes carry."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from pyspark.sql import SparkSession

from delivered.model.work import Owner

owners: WeakKeyDictionary[SparkSession, Owner] = WeakKeyDictionary()
