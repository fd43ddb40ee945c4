"""The command line. Thin: every command calls the public API."""
