"""The only room that imports pyspark: formats, session, checkpoint. The composition root.

formats.py       one Spark data source per connector; register()
hooks.py         what register() wraps of PySpark: early refusals, texts of errors, sessions and threads, progress
start_check.py   whether a query can start, asked on the driver before it does
tables.py        CREATE TABLE over our formats
settings.py      the options that belong to the pipeline, not to a connector
checkpoint.py    what Spark's checkpoint says about the batch about to run
engine.py        ledgers and committers of this driver, kept warm between batches
stream_writer.py batch_writer.py stream_reader.py batch_reader.py
session.py       a session whose workers run this interpreter
"""
