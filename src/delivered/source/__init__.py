"""Arithmetic of sources: what a batch takes, and how it is cut into slices. Pure; shared by connectors."""
