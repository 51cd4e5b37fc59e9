"""Makes the outlines of families (`bridge/outlines`); `scripts/outline_tables.py` is the command."""
