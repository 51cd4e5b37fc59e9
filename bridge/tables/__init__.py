"""Where a family's Flax names differ from the convention: `RULES`, pattern rows that come first, a file a family."""
