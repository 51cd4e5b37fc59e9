"""SigLIP 2's text tower (arXiv:2502.14786): SigLIP's, of another vocabulary."""

from __future__ import annotations

from transformers import Siglip2TextConfig

from easytorch.models._siglip2_layers import Siglip2EncoderLayer, Siglip2PreTrainedModel, Siglip2TextEmbeddings
from easytorch.models._siglip_layers import SiglipTextTower


class Siglip2TextModel(SiglipTextTower, Siglip2PreTrainedModel):
    config: Siglip2TextConfig
    config_class = Siglip2TextConfig
    embeddings_class = Siglip2TextEmbeddings
    layer_class = Siglip2EncoderLayer
