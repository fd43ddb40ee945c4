"""Shared code of connectors to SQL databases. A connector adds its client, its types and its dialect."""
