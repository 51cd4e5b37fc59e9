"""T5 (arXiv:1910.10683) and T5 1.1: an encoder and a decoder of pre-norm layers, scores with a bias by distance."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import Cache, GenerationMixin, T5Config
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.utils import DUMMY_INPUTS, DUMMY_MASK
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from easytorch.cache_names import cache_keyword, takes_cache
from easytorch.layers.basics import check_one_input
from easytorch.layers.encoder_heads import EncoderTokenClassification
from easytorch.layers.relative_bias import check_buckets, merged
from easytorch.layers.seq2seq import EncoderDecoder, Seq2SeqModel, decoder_masks, new_cache
from easytorch.layers.seq2seq_heads import (
    SentenceHead,
    Seq2SeqLMHead,
    Seq2SeqQuestionAnswering,
    Seq2SeqSequenceClassification,
)
from easytorch.models._t5_blocks import (
    T5Block,
    T5DenseActDense,
    T5DenseGatedActDense,
    T5LayerCrossAttention,
    T5LayerNorm,
    T5LayerSelfAttention,
    T5Projections,
    T5SelfAttention,
)
from easytorch.protocol.native import NativeModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Base
else:
    _Base = object  # the family's `PreTrainedModel` comes after it among the bases

TIED = {"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"}


class T5ClassificationHead(SentenceHead):
    pass


class T5PreTrainedModel(NativeModel):
    config: T5Config
    config_class = T5Config
    base_model_prefix = "transformer"
    least_counts: ClassVar = {"d_ff": 1, "num_decoder_layers": 0}
    head_weights = (r"^(lm_head|classification_head|classifier|qa_outputs)\.",)
    _no_split_modules = ["T5Block"]  # noqa: RUF012
    _keep_in_fp32_modules = ["wo"]  # noqa: RUF012
    # of old checkpoints
    _keys_to_ignore_on_load_unexpected = [  # noqa: RUF012
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
    ]
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": OutputRecorder(T5Block, index=0),
        "attentions": OutputRecorder(T5LayerSelfAttention, index=-1),
        "cross_attentions": OutputRecorder(T5LayerCrossAttention, index=-1),
    }

    def __init__(self, config: T5Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        check_buckets(config.model_type, config.relative_attention_num_buckets, config.relative_attention_max_distance)

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        ids, mask = torch.tensor(DUMMY_INPUTS), torch.tensor(DUMMY_MASK)
        return {"decoder_input_ids": ids, "input_ids": ids, "decoder_attention_mask": mask}

    def _shift_right(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.shifted(input_ids)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        config, factor = self.config, self.config.initializer_factor
        by_width, by_inner = config.d_model**-0.5, (config.num_heads * config.d_kv) ** -0.5
        spread: dict[str, float] = {}  # the names of a module's weights, and how far they are drawn
        if isinstance(module, T5LayerNorm):
            init.constant_(module.weight, factor)
        elif isinstance(module, T5Parts):
            spread = {"shared": 1.0, "qa_outputs": by_width}
            if not config.tie_word_embeddings:
                spread["lm_head"] = 1.0
        elif isinstance(module, EncoderTokenClassification):
            spread = {"classifier": 1.0}
        elif isinstance(module, SentenceHead):
            spread = {"dense": by_width, "out_proj": by_width}
        elif isinstance(module, T5DenseActDense | T5DenseGatedActDense):
            spread = {"wi": by_width, "wi_0": by_width, "wi_1": by_width, "wo": config.d_ff**-0.5}
        elif isinstance(module, T5Projections):
            spread = {"q": (config.d_model * config.d_kv) ** -0.5, "k": by_width, "v": by_width, "o": by_inner}
            if isinstance(module, T5SelfAttention):
                spread["relative_attention_bias"] = by_width
        for name, deviation in spread.items():
            layer: Any = getattr(module, name, None)
            if layer is not None:
                init.normal_(layer.weight, mean=0.0, std=factor * deviation)
            if getattr(layer, "bias", None) is not None:
                init.zeros_(layer.bias)


class T5Stack(T5PreTrainedModel):
    """The encoder, or the decoder if its config says so."""

    block_class: ClassVar[type[T5Block]] = T5Block

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.is_decoder = config.is_decoder
        self.block = nn.ModuleList(self.block_class(config, index == 0, index) for index in range(config.num_layers))
        self.final_layer_norm = T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.post_init()
        self.gradient_checkpointing = False

    @takes_cache
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """input_ids (B, T) or inputs_embeds (B, T, D) -> last_hidden_state (B, T, D).

        attention_mask: (B, T), of a decoder (B, past + T), 1 for tokens and 0 for padding, or (B, 1, T, S) of any
        pattern. A decoder takes encoder_hidden_states (B, S, D), their mask (B, S), and the cache.
        """
        check_one_input(input_ids, inputs_embeds)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        encoder_mask = None
        if self.is_decoder:
            if use_cache and cache is None:
                cache = new_cache(self.config, attends_to_encoder=self.config.is_encoder_decoder)
            mask, encoder_mask = decoder_masks(
                self.config,
                inputs_embeds,
                attention_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                cache,
            )
        else:
            if use_cache:
                raise ValueError("`use_cache=True` is for a decoder; this stack is an encoder")
            cache = None
            mask = create_bidirectional_mask(
                config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask
            )
        if isinstance(encoder_mask, torch.Tensor):
            # added to the scores, so that a row that sees nothing attends to everything evenly
            encoder_mask = merged(encoder_mask, inputs_embeds.new_zeros(()))
        hidden_states, position_bias = self.dropout(inputs_embeds), None
        for block in self.block:
            hidden_states, position_bias = block(
                hidden_states,
                mask,
                position_bias,
                encoder_hidden_states,
                encoder_mask,
                **cache_keyword(cache),
                **kwargs,
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.dropout(self.final_layer_norm(hidden_states)), **cache_keyword(cache)
        )


class T5Parts(_Base):
    """The embedding, the encoder and the decoder of a model, and its head. Mixed in before `EncoderDecoder`."""

    stack_class: ClassVar[type[T5Stack]] = T5Stack

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.model_dim = config.d_model
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.add_stacks(config)
        self.add_head(config)
        self.post_init()

    def add_stacks(self, config: T5Config) -> None:
        """Each has a config of its own, as in transformers."""
        encoder, decoder = copy.deepcopy(config), copy.deepcopy(config)
        encoder.is_decoder, encoder.use_cache = False, False
        decoder.is_decoder = True
        assert config.num_decoder_layers is not None
        decoder.num_layers = config.num_decoder_layers
        self.encoder = self.stack_class(encoder)
        self.decoder = self.stack_class(decoder)

    def add_head(self, config: T5Config) -> None:
        pass


class T5Model(Seq2SeqModel, T5Parts, EncoderDecoder, T5PreTrainedModel):
    _tied_weights_keys = TIED


class T5ForConditionalGeneration(Seq2SeqLMHead, T5Parts, EncoderDecoder, T5PreTrainedModel, GenerationMixin):
    caches_labels = True
    _tied_weights_keys = TIED | {"lm_head.weight": "shared.weight"}

    def add_head(self, config: T5Config) -> None:
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def enter_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * self.model_dim**-0.5 if self.config.scale_decoder_outputs else hidden_states


class T5EncoderModel(T5Parts, EncoderDecoder, T5PreTrainedModel):
    """The encoder alone."""

    has_pooler = False
    _tied_weights_keys = {"encoder.embed_tokens.weight": "shared.weight"}  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = [r"decoder"]  # noqa: RUF012

    def add_stacks(self, config: T5Config) -> None:
        config.use_cache = False
        config.is_encoder_decoder = False
        self.encoder = self.stack_class(config)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """input_ids (B, T) -> last_hidden_state (B, T, D)."""
        return self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )


class T5ForSequenceClassification(Seq2SeqSequenceClassification, T5PreTrainedModel):
    model_class: ClassVar[type[Any]] = T5Model
    head_class: ClassVar[type[nn.Module]] = T5ClassificationHead

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.transformer = self.model_class(config)
        self.transformer.shifts_inputs = True
        self.classification_head = self.head_class(config)
        self.post_init()

    def encode_decode(self, *args: Any, **kwargs: Any) -> Any:
        return self.transformer(*args, return_dict=True, **kwargs)


class T5ForTokenClassification(EncoderTokenClassification, T5PreTrainedModel):
    backbone_class = T5EncoderModel
    arguments = ("input_ids", "attention_mask", "inputs_embeds", "labels")
    head_weights = (*T5PreTrainedModel.head_weights, r"^decoder\.")


class T5ForQuestionAnswering(Seq2SeqQuestionAnswering, T5Parts, EncoderDecoder, T5PreTrainedModel):
    _tied_weights_keys = TIED
    shifts_inputs = True

    def add_head(self, config: T5Config) -> None:
        self.num_labels = config.num_labels
        self.qa_outputs = nn.Linear(config.hidden_size, config.num_labels)
