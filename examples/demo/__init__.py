"""Flights through a pipeline that is killed nine times, under each guarantee; then source and sink are compared.

flights.py    the events
systems.py    where they come from and go to: a local log and SQLite, or Kafka
crashes.py    where each pipeline is killed
killing.py    runs a pipeline, kills it, starts it again, and shows it
results.py    the table, the JSON and the page
__main__.py   all of it, in order
"""
