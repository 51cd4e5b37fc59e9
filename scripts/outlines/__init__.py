"""Makes the outlines of families (`bridge/names/outlines`); `scripts/outline_tables.py` is the command."""
