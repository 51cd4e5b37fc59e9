"""Rule tables: which torch tensor is which leaf, read in both directions (the language: `bridge.rules.table.table`)."""
