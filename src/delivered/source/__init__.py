"""Shared code of sources: admission limits, splitting into slices, a message's columns. Pure."""
