"""What the connectors to SQL databases have in common. A connector adds its client, its types and its dialect.

connector.py  the connector's object: a sink and no source
database.py   a database as the user named it: connections, errors in plain words, questions
types.py      checks of a schema, the one form of columns that fingerprints rest on
target.py     what we say of the user's table
ledger.py     owner and decisions in tables; one transaction decides
migrate.py    the version of these tables
table.py      a table as a source, for the audit
sink.py       what every such sink answers alike
"""
