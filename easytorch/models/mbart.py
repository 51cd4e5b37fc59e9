"""mBART (arXiv:2001.08210): BART of many languages, with norms before each part and after the last layer."""

from __future__ import annotations

import torch
from transformers import GenerationMixin, MBartConfig

from easytorch.models.bart import (
    BartDecoder,
    BartDecoderLayer,
    BartDecoderWrapper,
    BartEncoder,
    BartEncoderLayer,
    BartForCausalLM,
    BartForConditionalGeneration,
    BartForQuestionAnswering,
    BartForSequenceClassification,
    BartModel,
    BartPreTrainedModel,
)


def language_first(tokens: torch.Tensor, padding: int | None) -> torch.Tensor:
    """The decoder's inputs for the labels `tokens` (B, T): the last, which names the language, then all before it."""
    if padding is None:
        raise ValueError("mbart: config.pad_token_id is None: set it to the token that fills a row up")
    tokens = tokens.masked_fill(tokens == -100, padding)
    last = (tokens != padding).sum(1, keepdim=True) - 1
    return torch.cat([tokens.gather(1, last), tokens[:, :-1]], dim=1)


class MBartEncoderLayer(BartEncoderLayer):
    pre_norm = True


class MBartDecoderLayer(BartDecoderLayer):
    pre_norm = True


class MBartPreTrainedModel(BartPreTrainedModel):
    config: MBartConfig
    config_class = MBartConfig
    _keys_to_ignore_on_load_unexpected = None
    _no_split_modules = ["MBartDecoderLayer", "MBartEncoderLayer", "MBartAttention"]  # noqa: RUF012
    _skip_keys_device_placement = None


class MBartEncoder(MBartPreTrainedModel, BartEncoder):
    layer_class = MBartEncoderLayer
    final_norm = True


class MBartDecoder(MBartPreTrainedModel, BartDecoder):
    layer_class = MBartDecoderLayer
    final_norm = True


class MBartModel(MBartPreTrainedModel, BartModel):
    encoder_class, decoder_class = MBartEncoder, MBartDecoder

    def shifted(self, tokens: torch.Tensor) -> torch.Tensor:
        return language_first(tokens, self.config.pad_token_id)


class MBartForConditionalGeneration(MBartPreTrainedModel, BartForConditionalGeneration, GenerationMixin):
    model_class = MBartModel


class MBartForSequenceClassification(MBartPreTrainedModel, BartForSequenceClassification):
    model_class = MBartModel


class MBartForQuestionAnswering(MBartPreTrainedModel, BartForQuestionAnswering):
    model_class = MBartModel


class MBartDecoderWrapper(MBartPreTrainedModel, BartDecoderWrapper):
    decoder_class = MBartDecoder


class MBartForCausalLM(MBartPreTrainedModel, BartForCausalLM, GenerationMixin):
    wrapper_class = MBartDecoderWrapper
