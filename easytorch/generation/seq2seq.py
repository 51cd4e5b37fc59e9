"""Encoder-decoders as the decode loop uses them: the encoder once, then the decoder a token at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from easytorch.cache.static import LEAST_CACHE, bucket, full_static_cache
from easytorch.cache_names import CACHE, cache_argument
from easytorch.generation.decoders import LEAST_PROMPT, CausalLM, Decoder, unwrapped

TEXT = "input_ids"


def first_tokens(model: CausalLM, rows: int) -> torch.Tensor:
    """(rows, T): what a decoder begins with, by the model's generation config: its start token, and the first token
    that it forces (a language's, of mBART)."""
    config: Any = model.generation_config
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        start = getattr(config, "bos_token_id", None)
    if start is None:
        raise ValueError(
            f"{type(model).__name__}: the generation config has no decoder_start_token_id; set it, or give "
            f"decoder_input_ids"
        )
    starts = torch.as_tensor(start, dtype=torch.int64).reshape(-1, 1)
    if len(starts) not in (1, rows):
        raise ValueError(
            f"generation_config.decoder_start_token_id has {len(starts)} tokens for {rows} rows: one, or one a row"
        )
    starts = starts.expand(rows, 1)
    forced = getattr(config, "forced_bos_token_id", None)
    return starts if forced is None else torch.cat([starts, torch.full_like(starts, int(forced))], dim=1)


def reads_text(model: CausalLM) -> bool:
    """Whether the encoder reads tokens; Whisper's reads spectrograms."""
    return bool(getattr(unwrapped(model), "main_input_name", TEXT) == TEXT)


def decoder_config(model: Any) -> Any:
    """The decoder's config, with the number of its layers; FSMT's halves have none of their own."""
    own = getattr(model.get_decoder(), "config", None)
    return model.config.get_text_config(decoder=True) if own is None else own


def static_refusal(model: CausalLM) -> str | None:
    """Why an encoder-decoder cannot use a static cache; None where it can."""
    from easytorch.layers.masks import slots_refusal

    inner = unwrapped(model)
    if not getattr(inner, "_can_compile_fullgraph", False):
        return "transformers says of its class that it does not"
    return slots_refusal(decoder_config(inner))


class Seq2SeqDecoder(Decoder):
    """A cache that grows by one token a step.

    source: (B, S) tokens, or what else the encoder reads, with source_mask (B, S) or None. ids (B, T): what the decoder
    begins with. All three are on the host.
    """

    def __init__(
        self,
        model: CausalLM,
        source: torch.Tensor,
        source_mask: torch.Tensor | None,
        ids: torch.Tensor,
        max_new_tokens: int,
        device: torch.device,
    ) -> None:
        super().__init__(model, ids, torch.ones_like(ids, dtype=torch.bool), device)
        self._inner = unwrapped(model)
        self._encoder, self._config = self._inner.get_encoder(), decoder_config(self._inner)
        self._cache_name = cache_argument(self._inner.forward)
        self._source_name = TEXT if reads_text(model) else self._inner.main_input_name
        self._source, self._source_mask = self.placed(source, source_mask)
        self._cache = self.new_cache(max_new_tokens)
        self._encoded: Any = None

    def placed(self, source: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The encoder's input and its mask on the model's device."""
        if source.is_floating_point():
            source = source.to(self.model.dtype)
        return source.to(self.device), None if mask is None else mask.to(self.device, torch.int64)

    def new_cache(self, max_new_tokens: int) -> Any:
        from transformers import DynamicCache, EncoderDecoderCache

        return EncoderDecoderCache(DynamicCache(config=self._config), DynamicCache(config=self._config))

    def masks(self, ids: torch.Tensor) -> dict[str, Any]:
        """The masks that the model is given with the decoder's tokens (B, T)."""
        return {} if self._source_mask is None else {"attention_mask": self._source_mask}

    def encoder_mask(self) -> Any:
        return self._source_mask

    def prompt(self) -> torch.Tensor:
        mask = self.encoder_mask()
        given = {self._source_name: self._source} | ({} if mask is None else {"attention_mask": mask})
        # as it is: some families' decoders read more of it than the hidden states, as Moonshine's the mask
        self._encoded = self._encoder(**given, return_dict=True)
        return self._decoded(self.ids.to(self.device))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._decoded(tokens[:, None])

    def _decoded(self, ids: torch.Tensor) -> torch.Tensor:
        given = self.masks(ids) | {self._cache_name: self._cache}
        output = self.model(encoder_outputs=self._encoded, decoder_input_ids=ids, use_cache=True, **given)
        logits: torch.Tensor = output.logits
        return logits[:, -1]


class StaticSeq2SeqDecoder(Seq2SeqDecoder):
    """A cache of fixed length, and text padded on the right to a power of two, where its positions stay as they are.

    The encoder and the decoder's first step are one program, each further step another. Masks are built here, because
    deciding whether one is needed would read the padding back to the host. The tokens that the decoder begins with are
    not padded: their number is part of the first program.
    """

    def placed(self, source: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        if (reason := static_refusal(self.model)) is not None:
            raise ValueError(f"{type(self.model).__name__} cannot use a static cache: {reason}; use cache='dynamic'")
        if self._source_name != TEXT:
            return super().placed(source, mask)
        assert mask is not None
        length = bucket(source.shape[1], LEAST_PROMPT)
        most = getattr(self._inner.config, "max_position_embeddings", None)
        if most is not None:
            length = max(source.shape[1], min(length, most))
        more = (0, length - source.shape[1])
        return super().placed(pad(source, more), pad(mask, more))

    def new_cache(self, max_new_tokens: int) -> Any:
        from transformers import DynamicCache, EncoderDecoderCache
        from transformers.cache_utils import get_layer_types_and_kwargs

        capacity = bucket(self.ids.shape[1] + max_new_tokens, LEAST_CACHE)
        own = full_static_cache(get_layer_types_and_kwargs(self._config)[0], capacity)
        # the encoder's keys and values do not grow
        return EncoderDecoderCache(own, DynamicCache(config=self._config))

    def _like(self, rows: int, length: int) -> torch.Tensor:
        return torch.empty((rows, length, 1), dtype=self.model.dtype, device=self.device)

    def _seen(self, config: Any, queries: int) -> Any:
        """The mask of `queries` tokens' attention to the encoder's."""
        from transformers.masking_utils import create_bidirectional_mask

        rows, length = self._source.shape[:2]
        return create_bidirectional_mask(
            config=config,
            inputs_embeds=self._like(rows, queries),
            attention_mask=self._source_mask,
            encoder_hidden_states=self._like(rows, length),
            allow_is_bidirectional_skip=False,
        )

    def encoder_mask(self) -> Any:
        if self._source_name != TEXT:
            return super().encoder_mask()
        return self._seen(self._encoder.config, self._source.shape[1])

    def masks(self, ids: torch.Tensor) -> dict[str, Any]:
        from transformers.masking_utils import create_causal_mask

        own = create_causal_mask(
            config=self._config,
            inputs_embeds=self._like(*ids.shape),
            attention_mask=None,
            **{CACHE: self._cache.self_attention_cache},
            allow_is_causal_skip=False,
        )
        seen = self._seen(self._config, ids.shape[1]) if self._source_name == TEXT else None
        return {"decoder_attention_mask": own} | ({} if seen is None else {"attention_mask": seen})
