"""Phase 5: what was sent against what a reader of the sink finds. Pure: no Spark, no connector.

classes.py    what can have happened to a record, and which of it a guarantee allows
reconcile.py  one id's copies, classified: the reference that the Spark job is tested against
history.py    the ledger's chain of decisions, checked link by link
versions.py   which batches ran with the transform that is at hand
judge.py      what the counts prove, beside the ledger's account
report.py     the report as data and JSON, with its verdict
table.py      the report as text
page.py       the report as one HTML file with a chart
"""
