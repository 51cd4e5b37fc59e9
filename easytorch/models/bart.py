"""BART (arXiv:1910.13461): an encoder and a decoder of post-norm layers with learned positions."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers import BartConfig, Cache, GenerationMixin
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithCrossAttentions,
)
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.cache_names import CACHE, cache_keyword, takes_cache
from easytorch.layers.basics import check_one_input, keep_logits
from easytorch.layers.config_checks import padding_of
from easytorch.layers.encoder import CrossAttention, SelfAttention
from easytorch.layers.norm import LayerNorm
from easytorch.layers.seq2seq import Seq2SeqModel, decoder_masks, new_cache
from easytorch.layers.seq2seq_heads import (
    SentenceHead,
    Seq2SeqLMHead,
    Seq2SeqQuestionAnswering,
    Seq2SeqSequenceClassification,
    decoder_output,
)
from easytorch.layers.seq2seq_layers import DecoderLayer, EncoderLayer, dropped
from easytorch.layers.stock_names import given_by
from easytorch.models.opt import OPTLearnedPositionalEmbedding
from easytorch.protocol.native import NativeModel


class BartScaledWordEmbedding(nn.Embedding):
    """weight[ids] * embed_scale: (B, T) -> (B, T, D)."""

    def __init__(self, config: BartConfig) -> None:
        assert config.d_model is not None
        super().__init__(config.vocab_size, config.d_model, padding_of(config))
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        embedded = super().forward(input)
        return embedded if self.embed_scale == 1.0 else embedded * self.embed_scale


class BartLearnedPositionalEmbedding(OPTLearnedPositionalEmbedding):
    pass


class BartEncoderLayer(EncoderLayer):
    pass


class BartDecoderLayer(DecoderLayer):
    pass


class BartPreTrainedModel(NativeModel):
    config: BartConfig
    config_class = BartConfig
    base_model_prefix = "model"
    least_counts: ClassVar = {
        "encoder_layers": 0,
        "decoder_layers": 0,
        "encoder_attention_heads": 1,
        "decoder_attention_heads": 1,
        "encoder_ffn_dim": 1,
        "decoder_ffn_dim": 1,
    }
    head_weights = (r"^(lm_head|classification_head|qa_outputs)\.",)
    optional_weights = (r"^final_logits_bias$",)
    _keys_to_ignore_on_load_unexpected = ["encoder.version", "decoder.version"]  # noqa: RUF012
    _no_split_modules = ["BartEncoderLayer", "BartDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = [CACHE]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, BartForConditionalGeneration):
            init.zeros_(module.final_logits_bias)

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        padding: Any = self.config.pad_token_id
        ids = torch.tensor([[0, 6, 10, 4, 2], [0, 8, 12, 2, padding]], device=self.device)
        return {"attention_mask": ids.ne(padding), "input_ids": ids}


class BartHalf(BartPreTrainedModel):
    """Base class of the encoder and the decoder.

    side: what the config's names of its layers begin with. final_norm: whether a norm follows the last layer (mBART).
    """

    padding_idx = given_by("config.pad_token_id")
    side: ClassVar[str]
    layer_class: ClassVar[type[Any]]
    final_norm: ClassVar[bool] = False

    def __init__(self, config: BartConfig) -> None:
        super().__init__(config)
        self.embed_tokens = BartScaledWordEmbedding(config)
        self.embed_positions = BartLearnedPositionalEmbedding(config.max_position_embeddings, config.d_model)
        layers: int = getattr(config, f"{self.side}_layers")
        self.layers = nn.ModuleList(self.layer_class(config, index) for index in range(layers))
        self.layernorm_embedding = LayerNorm(config.d_model)
        if self.final_norm:
            self.layer_norm = LayerNorm(config.d_model)
        self.dropout: float = config.dropout
        self.layerdrop: float = getattr(config, f"{self.side}_layerdrop")
        self.gradient_checkpointing = False
        self.post_init()

    def embedded(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        check_one_input(input_ids, inputs_embeds)
        return self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds

    def enter(self, inputs_embeds: torch.Tensor, past: int | torch.Tensor = 0) -> torch.Tensor:
        """The first layer's input, of tokens that follow `past` others."""
        positions = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None] + past
        hidden_states = self.layernorm_embedding(inputs_embeds + self.embed_positions(positions))
        return F.dropout(hidden_states, self.dropout, self.training)

    def leave(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.layer_norm(hidden_states) if self.final_norm else hidden_states


class BartEncoder(BartHalf):
    max_source_positions = given_by("config.max_position_embeddings")
    side = "encoder"
    layer_class = BartEncoderLayer
    _can_record_outputs = {"hidden_states": EncoderLayer, "attentions": SelfAttention}  # noqa: RUF012

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """input_ids (B, S) or inputs_embeds (B, S, D) -> last_hidden_state (B, S, D); attention_mask (B, S)."""
        inputs_embeds = self.embedded(input_ids, inputs_embeds)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask)
        hidden_states = self.enter(inputs_embeds)
        for layer in self.layers:
            if not dropped(self.layerdrop, self.training):
                hidden_states = layer(hidden_states, mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.leave(hidden_states))


class BartDecoder(BartHalf):
    max_target_positions = given_by("config.max_position_embeddings")
    side = "decoder"
    layer_class = BartDecoderLayer
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": DecoderLayer,
        "attentions": SelfAttention,
        "cross_attentions": CrossAttention,
    }

    @takes_cache
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """input_ids (B, T) or inputs_embeds (B, T, D) -> last_hidden_state (B, T, D); encoder_hidden_states (B, S, D).

        attention_mask (B, past + T) and encoder_attention_mask (B, S): 1 for tokens and 0 for padding.
        """
        inputs_embeds = self.embedded(input_ids, inputs_embeds)
        if use_cache and cache is None:
            attends = encoder_hidden_states is not None or bool(self.config.is_encoder_decoder)
            cache = new_cache(self.config, attends_to_encoder=attends)
        mask, encoder_mask = decoder_masks(
            self.config, inputs_embeds, attention_mask, encoder_hidden_states, encoder_attention_mask, cache
        )
        hidden_states = self.enter(inputs_embeds, 0 if cache is None else cache.get_seq_length())
        for layer in self.layers:
            if not dropped(self.layerdrop, self.training):
                hidden_states = layer(
                    hidden_states,
                    mask,
                    encoder_hidden_states,
                    encoder_mask,
                    **cache_keyword(cache),
                    **kwargs,
                )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.leave(hidden_states), **cache_keyword(cache)
        )


class BartModel(Seq2SeqModel, BartPreTrainedModel):
    shifts_inputs = True
    encoder_class: ClassVar[type[BartEncoder]] = BartEncoder
    decoder_class: ClassVar[type[BartDecoder]] = BartDecoder
    _tied_weights_keys = {  # noqa: RUF012
        "decoder.embed_tokens.weight": "shared.weight",
        "encoder.embed_tokens.weight": "shared.weight",
    }

    def __init__(self, config: BartConfig) -> None:
        super().__init__(config)
        self.shared = BartScaledWordEmbedding(config)
        self.encoder = self.encoder_class(config)
        self.decoder = self.decoder_class(config)
        self.post_init()


class BartWithHead(BartPreTrainedModel):
    """Base of the heads: a `model_class` under `model`."""

    model_class: ClassVar[type[BartModel]] = BartModel

    def __init__(self, config: BartConfig) -> None:
        super().__init__(config)
        self.model = self.model_class(config)
        self.add_head(config)
        self.post_init()

    def add_head(self, config: BartConfig) -> None:
        raise NotImplementedError

    def encode_decode(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, return_dict=True, **kwargs)


class BartForConditionalGeneration(Seq2SeqLMHead, BartWithHead, GenerationMixin):
    final_logits_bias: torch.Tensor
    _tied_weights_keys = {"lm_head.weight": "model.shared.weight"}  # noqa: RUF012
    _keys_to_ignore_on_load_missing = ["final_logits_bias"]  # noqa: RUF012

    def add_head(self, config: Any) -> None:
        self.register_buffer("final_logits_bias", torch.zeros(1, config.vocab_size))
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def shifted(self, labels: torch.Tensor) -> torch.Tensor:
        return self.model.shifted(labels)

    def logits_bias(self) -> torch.Tensor:
        return self.final_logits_bias

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        embeddings: nn.Embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        more = embeddings.weight.shape[0] - self.final_logits_bias.shape[-1]
        self.final_logits_bias = F.pad(self.final_logits_bias, (0, more))
        return embeddings


class BartForSequenceClassification(Seq2SeqSequenceClassification, BartWithHead):
    def add_head(self, config: BartConfig) -> None:
        self.classification_head = SentenceHead(config)


class BartForQuestionAnswering(Seq2SeqQuestionAnswering, BartWithHead):
    def __init__(self, config: BartConfig) -> None:
        config.num_labels = 2
        super().__init__(config)

    def add_head(self, config: Any) -> None:
        self.num_labels = config.num_labels
        self.qa_outputs = nn.Linear(config.d_model, config.num_labels)


class BartDecoderWrapper(BartPreTrainedModel):
    """The decoder under the name that it has in `BartModel`."""

    decoder_class: ClassVar[type[BartDecoder]] = BartDecoder

    def __init__(self, config: BartConfig) -> None:
        super().__init__(config)
        self.decoder = self.decoder_class(config)
        self.post_init()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.decoder(*args, **kwargs)


class BartForCausalLM(BartPreTrainedModel, GenerationMixin):
    """The decoder alone, which attends to an encoder's states where they are given."""

    wrapper_class: ClassVar[type[BartDecoderWrapper]] = BartDecoderWrapper
    head_weights = (*BartPreTrainedModel.head_weights, r"^(model\.)?(encoder|shared)\.")
    _tied_weights_keys = {"lm_head.weight": "model.decoder.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        config.is_decoder = True
        config.is_encoder_decoder = False
        super().__init__(config)
        self.model = self.wrapper_class(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.decoder.embed_tokens = value

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithCrossAttentions:
        """As `BartDecoder`. labels (B, T): the next token of each, -100 where ignored; they are not shifted."""
        outputs = self.model.decoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            **cache_keyword(cache),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        kept = keep_logits(outputs.last_hidden_state, logits_to_keep)
        return decoder_output(outputs, self.lm_head, kept, labels)
