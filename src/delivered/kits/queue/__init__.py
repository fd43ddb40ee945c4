"""What connectors share whose system cannot hold a message back: what is sent is visible."""
