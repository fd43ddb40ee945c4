"""Shipped to users: stop a pipeline at a named point of its plan, and start it again.

crash.py       what happens at a crash point of this process, from the environment
supervisor.py  runs a command, kills its whole process tree at each hit, starts it again
"""
