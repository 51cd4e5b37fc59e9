"""The weights of known families by their configs, a JSON file a family (what they are for: `bridge.names.outline`).

Written by scripts/outline_tables.py from what transformers builds, and held to that by
tests/bridge/names/test_outlines.py.
"""
