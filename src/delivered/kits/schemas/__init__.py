"""Schemas of records: Avro, Protobuf and JSON Schema, in the wire format of a schema registry."""
