"""The weights of known families by their configs, a file a family: `OUTLINE` (what it is for: `bridge.outline`).

Held to what transformers builds by tests/bridge/test_outlines.py.
"""
