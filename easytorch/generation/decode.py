"""The decode loop: a prompt, then one token at a time, on a cache that grows or on one of fixed size.

Where programs are compiled for their shapes (xla) the cache is of fixed size and the prompt is padded to a power of
two, so that generation is two programs whatever the number of tokens: the prompt's (of an encoder-decoder the encoder
and the decoder's first step) and one step's, each with its sampling. On a GPU that step of a decoder is a CUDA graph.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from easytorch.generation.captured import CapturedDecoder, prefers_capture
from easytorch.generation.decoders import CausalLM, Decoder, DynamicDecoder, align_right
from easytorch.generation.sampling import Sampler, SamplingConfig
from easytorch.generation.seq2seq import Seq2SeqDecoder, StaticSeq2SeqDecoder, first_tokens, reads_text
from easytorch.tpu_platform import is_lazy, sync

logger = logging.getLogger(__name__)

_DECODERS: dict[str, type[DynamicDecoder | CapturedDecoder]] = {"dynamic": DynamicDecoder, "static": CapturedDecoder}
_SEQ2SEQ: dict[str, type[Seq2SeqDecoder]] = {"dynamic": Seq2SeqDecoder, "static": StaticSeq2SeqDecoder}


def generate_tokens(
    model: CausalLM,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    cache: str | None = None,
    decoder_input_ids: torch.Tensor | None = None,
) -> Iterator[torch.Tensor]:
    """Yield the next token of every row, (B,) int64 on the device of `input_ids`, until every row ended.

    model: a causal language model or an encoder-decoder of easytorch or transformers; in training mode its dropout
    applies.
    input_ids: (B, T) int64; of an encoder-decoder what its encoder reads, which for Whisper is (B, mels, frames).
    attention_mask: (B, T), nonzero at real tokens; padding may be on either side.
    temperature, top_k, top_p, repetition_penalty, seed: see `SamplingConfig`; the default is greedy.
    eos_token_id: one or several ids, an empty list for none; None takes those of the model's generation config.
    pad_token_id: returned for a row that has ended; None takes that of the generation config, else the first end token.
    cache: "static" (fixed shapes; on a GPU the step is a CUDA graph), "dynamic", or None: static on xla, and on a GPU
    for native models whose cache is small beside their weights; dynamic elsewhere.
    decoder_input_ids: (B, T) int64, what the decoder of an encoder-decoder begins with; None takes the start token of
    the generation config, and the first token that it forces.
    Raises `ValueError` for arguments that do not fit, before anything runs.
    """
    if not model.can_generate():
        raise ValueError(f"{type(model).__name__} is not a causal language model; load one with AutoModelForCausalLM")
    both = bool(model.config.is_encoder_decoder)
    config = SamplingConfig(
        temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty, seed=seed
    )
    mask = attention_mask
    if mask is None and (not both or reads_text(model)):
        mask = torch.ones_like(input_ids)
    _check(model, input_ids, mask, decoder_input_ids, max_new_tokens)
    eos = end_tokens(model, eos_token_id)
    if pad_token_id is None:
        pad_token_id = model.generation_config.pad_token_id
    if pad_token_id is None:
        pad_token_id = eos[0] if eos else 0

    device = next(model.parameters()).device
    decoder: Decoder
    if cache is not None and cache not in _DECODERS:
        raise ValueError(
            f"cache must be {' or '.join(map(repr, _DECODERS))}, or None to choose by device; got {cache!r}"
        )
    # on the host: padding is normalized before anything is traced or compiled
    if both:
        begin = first_tokens(model, len(input_ids)) if decoder_input_ids is None else decoder_input_ids.cpu()
        seen = None if mask is None else mask.cpu().bool()
        kind = _SEQ2SEQ[cache or ("static" if is_lazy(device) else "dynamic")]
        decoder = kind(model, input_ids.cpu(), seen, begin, max_new_tokens, device)
    else:
        assert mask is not None
        ids, mask = align_right(input_ids.cpu(), mask.cpu().bool(), pad_token_id)
        if cache is None:
            captures = prefers_capture(model, len(ids), ids.shape[1], max_new_tokens, device)
            cache = "static" if is_lazy(device) or captures else "dynamic"
        decoder = _DECODERS[cache](model, ids, mask, max_new_tokens, device)
    decoder.greedy = config.greedy and config.repetition_penalty == 1.0
    sampler = Sampler(config, decoder.ids, decoder.mask, eos, pad_token_id, device)
    return _loop(decoder, sampler, max_new_tokens, input_ids.device)


def _loop(decoder: Decoder, sampler: Sampler, max_new_tokens: int, device: torch.device) -> Iterator[torch.Tensor]:
    tokens: torch.Tensor | None = None
    with torch.no_grad():
        decoder.begin(sampler)
    try:
        for _ in range(max_new_tokens):
            with torch.no_grad():
                tokens = decoder.next(tokens, sampler)
            sync(tokens.device)  # every step is the same program
            yield tokens.to(device)
            # reduced on the host: on xla it would be a program of its own
            if sampler.eos is not None and bool(sampler.finished.cpu().all()):
                break
    except GeneratorExit:  # whoever asked has enough
        decoder.end()
        raise
    decoder.end()


def _check(
    model: CausalLM,
    input_ids: torch.Tensor,
    mask: torch.Tensor | None,
    decoder_input_ids: torch.Tensor | None,
    max_new_tokens: int,
) -> None:
    both = model.config.is_encoder_decoder
    if not both or reads_text(model):
        assert mask is not None
        # what stands at a decoder's padding is replaced; an encoder reads it
        padding = None if both or mask.shape != input_ids.shape else ~mask.bool()
        _check_tokens(model, "input_ids", input_ids, padding)
        if mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask {tuple(mask.shape)} must have the shape of input_ids {tuple(input_ids.shape)}"
            )
        if not bool(mask.bool().any(dim=-1).cpu().all()):
            raise ValueError(
                "attention_mask leaves a row without any token; generation needs at least one to begin from"
            )
    elif 0 in input_ids.shape:
        raise ValueError(f"the encoder's input must not be empty, got {tuple(input_ids.shape)}")
    if decoder_input_ids is not None:
        if not both:
            raise ValueError(f"decoder_input_ids are for encoder-decoders; {type(model).__name__} continues input_ids")
        _check_tokens(model, "decoder_input_ids", decoder_input_ids)
        if len(decoder_input_ids) != len(input_ids):
            raise ValueError(f"decoder_input_ids have {len(decoder_input_ids)} rows, the encoder {len(input_ids)}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must not be negative, got {max_new_tokens}")
    config = model.config.get_text_config()
    longest = getattr(config, "max_target_positions", getattr(config, "max_position_embeddings", None))
    begin = input_ids.shape[1]
    if both:
        begin = 1 if decoder_input_ids is None else decoder_input_ids.shape[1]
    if longest is not None and begin + max_new_tokens > longest:
        logger.warning(
            "%d prompt and %d new tokens pass the %d positions %s was made for",
            begin, max_new_tokens, longest, type(model).__name__,
        )  # fmt: skip


def _check_tokens(model: CausalLM, name: str, ids: torch.Tensor, padding: torch.Tensor | None = None) -> None:
    """`ValueError` unless ids are (B, T) tokens of the model's vocabulary; at padding (B, T) any below 0 will do."""
    if ids.dim() != 2 or ids.is_floating_point() or 0 in ids.shape:
        raise ValueError(
            f"{name} must be integers (batch, length), neither of them 0; got {ids.dtype} {tuple(ids.shape)}"
        )
    if padding is not None:
        ids = ids.masked_fill(padding.to(ids.device) & (ids < 0), 0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    least, largest = (int(one) for one in ids.cpu().aminmax())
    if least < 0 or largest >= vocabulary:
        raise ValueError(
            f"token {least if least < 0 else largest} is outside the {vocabulary} of {type(model).__name__}; the "
            f"tokenizer is another model's"
        )


def end_tokens(model: CausalLM, eos_token_id: int | Sequence[int] | None = None) -> list[int]:
    """The end tokens given, else those of the model's generation config."""
    given = getattr(model.generation_config, "eos_token_id", None) if eos_token_id is None else eos_token_id
    if given is None:
        return []
    return [given] if isinstance(given, int) else list(given)
