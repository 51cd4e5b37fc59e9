"""A second embedding of each token, with a part for each layer, which the layer mixes into its output (Gemma 3n and 4).

Legend: B batch, T tokens, D hidden size, L layers, P width of a layer's part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from easytorch.layers.basics import activation, without_adapter
from easytorch.layers.config_checks import padding_of
from easytorch.layers.embedding import ScaledEmbedding
from easytorch.layers.gate import gated
from easytorch.layers.linear import linear
from easytorch.layers.norm import Float32RMSNorm

if TYPE_CHECKING:
    from easytorch.layers.decoder import DecoderBackbone as _Backbone
    from easytorch.layers.decoder import DecoderLayer as _Layer
else:
    _Backbone = _Layer = object  # the family's backbone and layer come after them among the bases


class PerLayerInput(_Layer):
    """A mixin of layers: x + norm(projection(act(gate(x)) * part of the tokens)), where `config` has such parts."""

    def add_per_layer_modules(self, config: Any) -> None:
        hidden, width = config.hidden_size, config.hidden_size_per_layer_input
        self.hidden_size_per_layer_input = width
        if width:
            self.act_fn = activation(config.hidden_activation)
            self.per_layer_input_gate = nn.Linear(hidden, width, bias=False)
            self.per_layer_projection = nn.Linear(width, hidden, bias=False)
            self.post_per_layer_input_norm = self.new_norm(config)

    def mix(self, hidden_states: torch.Tensor, per_layer_input: torch.Tensor | None) -> torch.Tensor:
        """hidden_states (B, T, D), per_layer_input (B, T, P) -> (B, T, D)."""
        if per_layer_input is None:
            return hidden_states
        mixed = gated(self.act_fn, linear(self.per_layer_input_gate, hidden_states), per_layer_input)
        return hidden_states + self.post_per_layer_input_norm(linear(self.per_layer_projection, mixed))


class PerLayerEmbedding(_Backbone):
    """A mixin of decoders: the embedding of every layer's part, and the projection of the first one to as many."""

    def add_per_layer_modules(self, config: Any) -> None:
        width = config.hidden_size_per_layer_input
        self.hidden_size_per_layer_input = width
        if width:
            every, tokens = config.num_hidden_layers * width, config.vocab_size_per_layer_input
            if tokens < 1:
                raise ValueError(f"{config.model_type}: config.vocab_size_per_layer_input={tokens} must be 1 or more")
            self.embed_tokens_per_layer = ScaledEmbedding(tokens, every, padding_of(config), width**0.5)
            self.per_layer_input_scale, self.per_layer_model_projection_scale = 2.0**-0.5, config.hidden_size**-0.5
            self.per_layer_model_projection = nn.Linear(config.hidden_size, every, bias=False)
            self.per_layer_projection_norm = Float32RMSNorm(width, eps=config.rms_norm_eps)

    def get_per_layer_inputs(
        self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """input_ids (B, T) -> (B, T, L, P). Without them they are found by their embeddings (B, T, D), each of which is
        compared with those of the whole vocabulary."""
        if input_ids is None:
            assert inputs_embeds is not None
            input_ids = self._tokens_of(inputs_embeds)
        return self.embed_tokens_per_layer(input_ids).unflatten(-1, (-1, self.hidden_size_per_layer_input))

    @torch.no_grad()
    def _tokens_of(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T). Pairs of a row and a token are taken out number by number, so that few are compared."""
        embedding: Any = self.get_input_embeddings()
        every = embedding(torch.arange(without_adapter(embedding).num_embeddings, device=inputs_embeds.device))
        rows = inputs_embeds.flatten(0, 1)
        row, token = (rows[:, :1] == every[:, 0]).nonzero().unbind(1)
        for column in range(1, rows.shape[1]):
            if len(row) <= len(rows):
                break
            same = rows[row, column] == every[token, column]
            row, token = row[same], token[same]
        same = (rows[row] == every[token]).all(-1)
        row, token = row[same], token[same]
        if not torch.equal(row, torch.arange(len(rows), device=row.device)):
            raise ValueError(
                f"{self.config.model_type}: each of inputs_embeds must be the embedding of one token, for each has a "
                f"second embedding of {self.hidden_size_per_layer_input} numbers a layer; pass input_ids, or "
                f"per_layer_inputs=model.get_per_layer_inputs(input_ids) beside inputs_embeds"
            )
        return token.view(inputs_embeds.shape[:2])

    def project_per_layer_inputs(
        self, inputs_embeds: torch.Tensor, per_layer_inputs: torch.Tensor | None = None
    ) -> torch.Tensor:
        """inputs_embeds (B, T, D), per_layer_inputs (B, T, L, P) -> what each layer is given, (B, T, L, P)."""
        projected = linear(self.per_layer_model_projection, inputs_embeds) * self.per_layer_model_projection_scale
        projected = self.per_layer_projection_norm(projected.unflatten(-1, (-1, self.hidden_size_per_layer_input)))
        return projected if per_layer_inputs is None else (projected + per_layer_inputs) * self.per_layer_input_scale
