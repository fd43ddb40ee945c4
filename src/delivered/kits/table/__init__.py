"""Shared code of connectors to table formats and folders of files."""
