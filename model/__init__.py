"""The protocol of a batch as a model, and what checks it. See docs/protocol.md."""
