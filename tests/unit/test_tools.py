"""The tools that watch over the tree see what they are there to see."""

from __future__ import annotations

PAGE = """
## Rooms

| room | role | may import of ours |
|---|---|---|
| `model/` | nouns | none |
| `contract.py`, `contract_*.py` | powers | model |
| `kits/sql/` | databases | model, contract |
| `kits/table/` | tables | model, kits/sql |
| `connectors/<system>/` | one each | model, kits |
| `spark/` | the edge | all above |

## Invariants

| `other/` | no room | none |
"""
MODULES = ["model", "contract", "contract_rows", "kits", "kits.sql", "kits.table.a", "connectors.x.b", "spark"]
KNOWN_CYCLES = [["delivered.connectors.pulsar.options", "delivered.connectors.pulsar.positions"]]
"""This list only gets shorter."""
