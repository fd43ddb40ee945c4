"""The command line. Thin: every command calls the public API.

main.py      the commands
output.py    text and JSON, errors, exit codes
run.py       `delivered run`
example.py   what `delivered init` writes
doctor.py    what `delivered doctor` looks at
servers.py   `delivered brokers`
open.py      `delivered transactions`
"""
