"""Shipped to users: crash a pipeline at a named point of its plan, and restart it."""
