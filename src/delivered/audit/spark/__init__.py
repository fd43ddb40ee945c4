"""Spark jobs of the audit."""
