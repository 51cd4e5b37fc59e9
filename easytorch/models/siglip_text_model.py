"""SigLIP's text tower (arXiv:2303.15343): layers that see the whole text, and the output of its last token."""

from __future__ import annotations

from transformers import SiglipTextConfig

from easytorch.models._siglip_layers import SiglipPreTrainedModel, SiglipTextTower


class SiglipTextModel(SiglipTextTower, SiglipPreTrainedModel):
    config: SiglipTextConfig
    config_class = SiglipTextConfig
