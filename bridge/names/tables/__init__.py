"""Differences of a family's Flax names from the convention, a file per family: `RULES`, rows that take precedence.

`rules(model)` instead where the rows depend on the config or the head; the model is on the meta device.
"""
