"""wav2vec2: Flax always holds the vector that masks features, torch only if the config masks while training."""

from __future__ import annotations

from easytorch.bridge.rules.table import SPARE, Rules

RULES: Rules = (("[wav2vec2.]masked_spec_embed", "[wav2vec2/]masked_spec_embed", SPARE),)
