"""Where a family's Flax names differ from the convention, a file a family: `RULES`, rows that come first.

`rules(model)` in their place where the rows depend on the config or the head; the model is on the meta device.
"""
