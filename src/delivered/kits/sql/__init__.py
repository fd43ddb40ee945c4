"""What the connectors to SQL databases have in common. A connector adds its client, its types and its dialect.

connector.py      the connector's object: a sink and no source
options.py        options that all have, and those of a database server
database.py       a database as the user named it: connections, errors in plain words, questions
server.py         the same behind a server
warm.py           connections of tasks, kept open between shards
names.py          whose what is left at a server is
types.py          checks of a schema, the one form of columns that fingerprints rest on
values.py         which rows cannot be written, and why
target.py         what we say of the user's table
columns.py        whether rows fit a server's table
merge.py          upserts
stage.py          one_transaction: from staging tables into the target
transactions.py   two_phase: what is said of a prepared transaction
dialect.py        what a database's SQL has of its own
keys.py           keys that a dedup remembers, beside the ledger
store.py          owner and decisions in tables; one transaction decides
server_store.py   the same in a server, with markers
committer.py       the driver's hand on what tasks prepared in a server
migrate.py        the version of these tables
table.py          a scan of a table, for the audit
csv.py            its rows, sent as CSV
sink.py           what every such sink answers alike
"""
