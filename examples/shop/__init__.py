"""A shop whose processes and servers are killed at random, and whose books balance.

    application -> outbox in PostgreSQL -> relay (Spark) -> Kafka -> enrichment (Spark) -> PostgreSQL and Delta
    -> checkout saga, with a flaky payment service -> outbox -> relay -> Kafka -> mailer with an inbox -> a file

application.py   takes orders: the order and its message in one transaction
relay.yaml       outbox -> Kafka, exactly once
enrich.yaml      Kafka -> PostgreSQL and Delta, both or neither, exactly once
checkout.py      the saga: reserve, pay, ship, confirm; each with its compensation
worker.py        begins a saga for each enriched order, and runs them
payments.py      the payment service: declines, fails before and after it took the money, does not answer
mailer.py        sends a mail for each paid order
program.py       a process that is killed and started again
run.py           servers, processes, kills
judge.py         counts with plain clients, nothing of delivered
__main__.py      all of it, the table and the JSON
"""
