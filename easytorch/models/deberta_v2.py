"""DeBERTa v2 and v3 (arXiv:2006.03654, 2111.09543): post-norm layers whose scores see content and distance apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DebertaV2Config
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from easytorch.layers.basics import activation, check_one_input
from easytorch.layers.causal_loss import plain_tensors
from easytorch.layers.config_checks import padding_of
from easytorch.layers.disentangled import ConvolutionBranch, DisentangledSelfAttention, span_of
from easytorch.layers.encoder import EncoderAttention, PostNormEncoder, PostNormLayer
from easytorch.layers.encoder_heads import (
    EncoderMaskedLM,
    EncoderMultipleChoice,
    EncoderQuestionAnswering,
    EncoderSequenceClassification,
    EncoderTokenClassification,
)
from easytorch.layers.linear import linear
from easytorch.layers.stock_names import given_by
from easytorch.protocol.native import NativeModel


def embedding_size(config: Any) -> int:
    size: int = getattr(config, "embedding_size", config.hidden_size)
    return size


class DebertaV2Embeddings(nn.Module):
    position_biased_input = given_by("config.position_biased_input")
    position_ids: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, positions, types = embedding_size(config), config.max_position_embeddings, config.type_vocab_size
        self.embedding_size = width
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_of(config))
        self.position_embeddings = nn.Embedding(positions, width) if config.position_biased_input else None
        self.token_type_embeddings = nn.Embedding(types, width) if types > 0 else None
        same = width == config.hidden_size
        self.embed_proj = None if same else nn.Linear(width, config.hidden_size, bias=False)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.register_buffer("position_ids", torch.arange(positions)[None], persistent=False)

    def forward(
        self,
        embeddings: torch.Tensor,
        token_type_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        real: torch.Tensor | None,
    ) -> torch.Tensor:
        """Embeddings of words (B, T, E), real (B, T), True for tokens -> (B, T, D), 0 where there is padding."""
        if self.position_embeddings is not None:
            if position_ids is None:
                position_ids = self.position_ids[:, : embeddings.shape[1]]
            embeddings = embeddings + self.position_embeddings(position_ids)
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(embeddings.shape[:2], dtype=torch.long, device=embeddings.device)
            embeddings = embeddings + self.token_type_embeddings(token_type_ids)
        if self.embed_proj is not None:
            embeddings = linear(self.embed_proj, embeddings)
        embeddings = self.LayerNorm(embeddings)
        return self.dropout(embeddings if real is None else embeddings * real[..., None])


class DebertaV2Attention(EncoderAttention):
    self_class = DisentangledSelfAttention


class DebertaV2FirstLayer(PostNormLayer):
    """(B, T, D) -> (B, T, D), whose output the convolution changes before it is a hidden state of the model."""

    attention_class = DebertaV2Attention

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        return super().forward(hidden_states, attention_mask, None, positions, **kwargs)


class DebertaV2Layer(DebertaV2FirstLayer):
    """(B, T, D) -> (B, T, D), a hidden state of the model."""


class DebertaV2Encoder(PostNormEncoder):
    def __init__(self, config: Any) -> None:
        convolves = getattr(config, "conv_kernel_size", 0) > 0
        super().__init__(config, DebertaV2Layer, DebertaV2FirstLayer if convolves else None)
        self.rel_embeddings, self.LayerNorm = None, None
        self.relative_attention = config.relative_attention
        if config.relative_attention:
            self.position_buckets = getattr(config, "position_buckets", -1)
            _, self.max_relative_positions, span = span_of(config)
            self.rel_embeddings = nn.Embedding(2 * span, config.hidden_size)
        self.norm_rel_ebd = [one.strip() for one in getattr(config, "norm_rel_ebd", "none").lower().split("|")]
        if "layer_norm" in self.norm_rel_ebd:
            self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.conv = ConvolutionBranch(config, activation(getattr(config, "conv_act", "tanh"))) if convolves else None

    def positions(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """The embedding of distances, that of every layer."""
        if self.rel_embeddings is None:
            return None
        weight = self.rel_embeddings.weight
        return weight if self.LayerNorm is None else self.LayerNorm(weight)

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: Any, real: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        positions = self.positions(hidden_states)
        for index, layer in enumerate(self.layer):
            outputs = layer(hidden_states, attention_mask, positions, **kwargs)
            if index == 0 and self.conv is not None:  # outside the layer: hooks of it see what is before
                outputs = self.conv(hidden_states, outputs, real)
            hidden_states = outputs
        return hidden_states


class DebertaV2PreTrainedModel(NativeModel):
    config: DebertaV2Config
    config_class = DebertaV2Config
    base_model_prefix = "deberta"
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": [OutputRecorder(DebertaV2Layer), OutputRecorder(ConvolutionBranch)],
        "attentions": DisentangledSelfAttention,
    }
    _keys_to_ignore_on_load_unexpected = ["position_embeddings", r"embeddings\.position_ids$"]  # noqa: RUF012
    head_weights = (r"^(cls|lm_predictions|mask_predictions|pooler|classifier|qa_outputs)\.",)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DebertaV2Embeddings):
            init.copy_(module.position_ids, torch.arange(module.position_ids.shape[-1])[None])
        if isinstance(module, DebertaV2WordHead | DebertaV2LMPredictionHead):
            init.zeros_(module.bias)


class DebertaV2Model(DebertaV2PreTrainedModel):
    z_steps = 0  # of the enhanced mask decoder, which transformers has not either
    has_pooler = False

    def __init__(self, config: DebertaV2Config) -> None:
        super().__init__(config)
        self.embeddings = DebertaV2Embeddings(config)
        self.encoder = DebertaV2Encoder(config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, new_embeddings: Any) -> None:
        self.embeddings.word_embeddings = new_embeddings

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """input_ids (B, T) or inputs_embeds (B, T, E) -> last_hidden_state (B, T, D).

        attention_mask: (B, T), 1 for tokens and 0 for padding, which sees the mean of everything.
        """
        check_one_input(input_ids, inputs_embeds)
        words = self.embeddings.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        real = tokens_of(attention_mask, words)
        hidden_states = self.embeddings(words, token_type_ids, position_ids, real)
        mask = None if real is None else real[:, None, None]
        return BaseModelOutput(last_hidden_state=self.encoder(hidden_states, mask, real, **kwargs))


def tokens_of(attention_mask: torch.Tensor | None, words: torch.Tensor) -> torch.Tensor | None:
    """(B, T), True for tokens; None where all of them are. `ValueError` for a mask of any other pattern."""
    if attention_mask is None:
        return None
    if attention_mask.dim() == 4 and attention_mask.shape[1:3] == (1, 1):
        attention_mask = attention_mask[:, 0, 0]
    if attention_mask.shape != words.shape[:2]:
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)} must be (batch, tokens), {tuple(words.shape[:2])} here: "
            f"DeBERTa v2 sets the states of padding to 0, so its mask is one of tokens"
        )
    real = attention_mask.bool()
    graph = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    return None if not graph and real.device.type == "cpu" and bool(real.all()) else real


class DebertaV2WordTransform(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embedding_size = embedding_size(config)
        self.dense = nn.Linear(config.hidden_size, self.embedding_size)
        self.transform_act_fn = activation(config.hidden_act)
        self.LayerNorm = nn.LayerNorm(embedding_size(config), eps=config.layer_norm_eps)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.transform_act_fn(linear(self.dense, hidden_states)))


class DebertaV2WordHead(nn.Module):
    """BERT's head of words, of a decoder of its own where the embeddings are not tied (config.legacy)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embedding_size = embedding_size(config)
        self.transform = DebertaV2WordTransform(config)
        self.decoder = nn.Linear(embedding_size(config), config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return linear(self.decoder, self.transform(hidden_states))


class DebertaV2LMPredictionHead(nn.Module):
    """Logits by the embedding of words itself, as DeBERTa was trained."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        if embedding_size(config) != config.hidden_size:
            raise ValueError(
                f"deberta-v2: config.legacy=False multiplies states with the embedding of words, and "
                f"config.embedding_size={embedding_size(config)} is not config.hidden_size={config.hidden_size}"
            )
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform_act_fn = activation(config.hidden_act)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def transformed(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., D): what the embedding multiplies."""
        return self.LayerNorm(self.transform_act_fn(linear(self.dense, hidden_states)))

    def forward(self, hidden_states: torch.Tensor, word_embeddings: Any) -> torch.Tensor:
        return F.linear(self.transformed(hidden_states), word_embeddings.weight, self.bias)


class DebertaV2ForMaskedLM(EncoderMaskedLM, DebertaV2PreTrainedModel):
    cls: Any
    lm_predictions: Any
    backbone_class = DebertaV2Model
    _tied_weights_keys = {  # noqa: RUF012
        "cls.predictions.decoder.bias": "cls.predictions.bias",
        "cls.predictions.decoder.weight": "deberta.embeddings.word_embeddings.weight",
    }

    def add_head(self, config: Any) -> None:
        self.legacy = config.legacy
        if self.legacy:
            self.cls = nn.Module()
            self.cls.predictions = DebertaV2WordHead(config)
        else:
            self._tied_weights_keys = {}
            self.lm_predictions = nn.Module()
            self.lm_predictions.lm_head = DebertaV2LMPredictionHead(config)

    def words(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.legacy:
            return self.cls.predictions(hidden_states)
        return self.lm_predictions.lm_head(hidden_states, self.get_input_embeddings())

    def word_states(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        if self.legacy:
            return self.cls.predictions.transform(hidden_states)
        return self.lm_predictions.lm_head.transformed(hidden_states)

    def word_parameters(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Without `config.legacy` the matrix is the embedding's itself, whose hooks see no logits."""
        if self.legacy:
            return super().word_parameters()
        embedding = self.get_input_embeddings()
        if type(embedding) is not nn.Embedding:
            return None, None
        return plain_tensors(embedding._parameters.get("weight"), self.lm_predictions.lm_head.bias)

    def get_output_embeddings(self) -> nn.Module:
        head: nn.Module = self.cls.predictions.decoder if self.legacy else self.lm_predictions.lm_head.dense
        return head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        if self.legacy:
            self.cls.predictions.decoder = new_embeddings
            self.cls.predictions.bias = new_embeddings.bias


class ContextPooler(nn.Module):
    """act(dense(dropout(x of the first token))): (B, T, D) -> (B, D)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.pooler_hidden_size, config.pooler_hidden_size)
        self.dropout = nn.Dropout(config.pooler_dropout)
        self.activation = activation(config.pooler_hidden_act)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.activation(linear(self.dense, self.dropout(hidden_states[:, 0])))


def add_classifier(model: Any, config: Any, labels: int) -> None:
    """The pooler and what scores its output."""
    rate = getattr(config, "cls_dropout", None)
    model.pooler = ContextPooler(config)
    model.classifier = nn.Linear(config.hidden_size, labels)
    model.dropout = nn.Dropout(config.hidden_dropout_prob if rate is None else rate)


class DebertaV2ForSequenceClassification(EncoderSequenceClassification, DebertaV2PreTrainedModel):
    pooler: Any
    dropout: Any
    backbone_class = DebertaV2Model

    def add_head(self, config: Any) -> None:
        add_classifier(self, config, config.num_labels)

    def classify(self, outputs: Any, attention_mask: torch.Tensor | None) -> torch.Tensor:
        return linear(self.classifier, self.dropout(self.pooler(outputs.last_hidden_state)))

    def with_labels(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Those of one label are (B,) and of the labels' dtype, unless `config.problem_type` is set."""
        plain = self.num_labels != 1 or self.config.problem_type is not None
        return logits if plain else logits.view(-1).to(labels.dtype)

    def loss_of(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Without `config.problem_type` the labels say: floats of one label, classes (negative: ignored), or shares."""
        if self.config.problem_type is not None:
            return super().loss_of(logits, labels)
        if self.num_labels == 1:
            return F.mse_loss(logits, labels.view(-1))
        if labels.dim() > 1 and labels.shape[-1] > 1:
            return -(F.log_softmax(logits, dim=-1) * labels).sum(-1).mean()
        classes = labels.flatten().long()
        total = F.cross_entropy(logits.float(), classes.where(classes >= 0, -100), reduction="sum")
        return total / (classes >= 0).sum().clamp(min=1)


class DebertaV2ForMultipleChoice(EncoderMultipleChoice, DebertaV2PreTrainedModel):
    pooler: Any
    dropout: Any
    backbone_class = DebertaV2Model

    def add_head(self, config: Any) -> None:
        add_classifier(self, config, 1)

    def score(self, outputs: Any, attention_mask: torch.Tensor | None) -> torch.Tensor:
        return linear(self.classifier, self.dropout(self.pooler(outputs.last_hidden_state)))


class DebertaV2ForTokenClassification(EncoderTokenClassification, DebertaV2PreTrainedModel):
    backbone_class = DebertaV2Model


class DebertaV2ForQuestionAnswering(EncoderQuestionAnswering, DebertaV2PreTrainedModel):
    backbone_class = DebertaV2Model
