"""What the connectors to SQL databases have in common. A connector adds its client, its types and its dialect."""
