"""Shipped to users: stop a pipeline at a named point of its plan, and start it again."""
