"""Attention as transformers calls it: functions for its `AttentionInterface`, each of which calls our operation.

Names: "easytorch" selects automatically; "vanilla" and "flash" are forced: obeyed or refused. Native models route
"sdpa" and "eager" here too (`interface_of`), and have "ring", which attends to a sequence that is divided over ranks;
transformers' own classes keep theirs: importing EasyTorch changes no other model.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from easytorch.cache_names import NAMES
from easytorch.layers.config import wants_attentions
from easytorch.operations import Attention, OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.environment import forced_by_environment

if TYPE_CHECKING:
    from easytorch.layers.sequence_parallel import SequenceShard

logger = logging.getLogger(__name__)

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

# transformers treats every name with "flash" in it as flash-attn, and then packs inputs and drops masks, so its own
# classes get ours under another name.
FLASH_FOR_TRANSFORMERS = "easytorch_tiled"

# attn_implementation -> what OperationMetadata.backend forces; None leaves the choice to the operation.
INTERFACES = {"easytorch": None, "vanilla": "vanilla", "flash": "flash", FLASH_FOR_TRANSFORMERS: "flash"}
# The same for classes that have eager attention alone, whose mask is added to the scores and covers everything.
EAGER_INTERFACES = {f"{name}_eager_mask": backend for name, backend in INTERFACES.items() if name != "flash"}
OURS = frozenset({*INTERFACES, *EAGER_INTERFACES})
# A class's own attention in transformers -> ours in its place, by the requested name.
OF_STOCK = {
    "sdpa": {"easytorch": "easytorch", "vanilla": "vanilla", "flash": FLASH_FOR_TRANSFORMERS},
    "eager": {
        "easytorch": "easytorch_eager_mask",
        "vanilla": "vanilla_eager_mask",
        "flash": f"{FLASH_FOR_TRANSFORMERS}_eager_mask",
    },
}
NATIVE_INTERFACES = INTERFACES | {"eager": "vanilla", "sdpa": "sdpa", "ring": "ring"}

_OPERATIONS = {
    backend: cast(Attention, OperationRegistry.create("attention", OperationMetadata(backend=backend)))
    for backend in NATIVE_INTERFACES.values()
    if backend != "ring"
}
_RING = OperationRegistry.create("ring")  # of one process

# Other keywords that reach the attention through transformers' **kwargs. These do not change the result: positions and
# packing are already in the mask, and generate hands the tokenizers of its stop strings and assistants on to the model.
HARMLESS = frozenset(
    {
        *(name for name in NAMES if name != "cache"),
        "assistant_tokenizer",
        "cache_position",
        "deterministic",
        "encoder_attention_mask",
        "encoder_hidden_states",
        "layer_idx",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "seq_idx",
        "shift_labels",
        "tokenizer",
        "use_cache",
    }
)
# Read by the cache of continuous batching alone.
_OF_PAGES = ("block_table", "cu_seq_lens_k", "logits_indices", "logits_processor_args", "read_index", "write_index")
# These change the result, in ways that the contract does not cover.
_REFUSED = {
    "indices": "sparse attention by token indices",
    "block_indices": "sparse attention by block indices",
    "sinks": "sinks that differ by token",
    "head_mask": "a head mask",
}

# Called with the module at every attention: how easytorch.auto learns which layers use ours.
OBSERVERS: list[Callable[[nn.Module], None]] = []

# ids of configs that say "sdpa" to transformers' continuous batching, which knows no name of ours, for "easytorch".
SAID_TO_BATCHING: set[int] = set()


def observed(module: nn.Module) -> None:
    """Reports to the registered callbacks that an attention layer calls ours, here or over pages and latents."""
    for observe in OBSERVERS:
        observe(module)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    backend: str | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    cache: PagedAttentionCache | None = None,
    output_attentions: bool | None = None,
    sequence_shard: SequenceShard | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """query (B, H, T, D), key (B, K, S, D), value (B, K, S, Dv) -> output (B, T, H, Dv), weights (B, H, T, S) or None.

    attention_mask: boolean (True attends) or added to the scores, broadcastable to (B, H, T, S); it alone determines
    what each query attends to, the window included. None: all keys, or the past ones if the module is causal, within
    the window. cu_seq_lens_*: (N + 1,) where each of N sequences packed into one row starts, and the length.
    sequence_shard: of a sequence of which this rank has its own tokens alone. Raises `UnsupportedOperationError` for
    what the chosen implementation does not carry.
    """
    observed(module)
    if query.dtype != value.dtype and torch.is_autocast_enabled(query.device.type):
        # norms of queries and keys give float32 there, and torch's attention casts
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if cache is not None:
        kwargs["cu_seq_lens_k"] = cu_seq_lens_k
        key, value = _paged(module, cache, key, value, attention_mask, kwargs)
    if cache is not None or "write_index" in kwargs:
        if backend == "sdpa" and id(getattr(module, "config", None)) in SAID_TO_BATCHING:
            backend = None
        for name in _OF_PAGES:
            kwargs.pop(name, None)
        cu_seq_lens_q = cu_seq_lens_k = None  # the mask decides what is attended to
    _check_others(kwargs)
    length, keys = query.shape[2], key.shape[2]
    causal = attention_mask is None and _is_causal(module, is_causal)
    if causal and length > 1 and keys > length:
        # transformers omits the mask here only for the first tokens of a preallocated cache, whose rest is empty
        key, value, keys = key[:, :, :length], value[:, :, :length], length
        position_bias = None if position_bias is None else position_bias[..., :length]
    # only the arguments that are set: each is passed on five times, at each layer for each token
    features: dict[str, Any] = {"causal": causal}
    if cu_seq_lens_q is not None:
        starts = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        features["query_segment_ids"] = segment_ids(cu_seq_lens_q, query.shape[0], length)
        features["key_segment_ids"] = segment_ids(starts, query.shape[0], keys)
    mask, bias = (None, None) if attention_mask is None else _split_mask(attention_mask)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
        if mask is not None:  # transformers adds both: a fully masked row then gets the mean of all values
            bias = torch.where(mask, bias, torch.finfo(bias.dtype).min)
            mask = None
    if output_attentions or (output_attentions is None and wants_attentions(getattr(module, "config", None))):
        backend = _backend_with_weights(backend)
    if mask is not None:
        features["mask"] = mask
    if bias is not None:
        features["bias"] = bias
    if sliding_window is not None and attention_mask is None:
        features["sliding_window"] = sliding_window
    if softcap is not None:
        features["softcap"] = softcap
    if s_aux is not None:
        features["sinks"] = s_aux
    if scaling is not None:
        features["softmax_scale"] = scaling
    if dropout and module.training:
        features["dropout_prob"] = dropout
    operation: Any = _RING if backend == "ring" else _OPERATIONS[backend]
    if sequence_shard is not None:
        operation = _over_ranks(sequence_shard, backend, features)
    # nothing else: causal has no effect on one query
    elif length == 1 and operation is not _RING and len(features) == (1 if scaling is None else 2):
        attended = operation.one_token(query, key, value, scaling)
        if attended is not None:
            return attended, None
    output = operation(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **features)
    # contiguous, as of transformers' functions: Dory takes a view of it
    return output.attention_outputs.contiguous(), output.attention_weights


def _over_ranks(shard: SequenceShard, backend: str | None, features: dict[str, Any]) -> Callable[..., Any]:
    """The attention to the whole sequence; puts its features into those of the call."""
    named = [name for name in ("mask", "bias", "query_segment_ids") if name in features]
    if backend != "ring" or named:
        what = f"a {named[0]} of its own" if named else "an attention other than ring"
        raise UnsupportedOperationError(f"a sequence that is divided over ranks (sp) does not go with {what}")
    features["layout"] = shard.layout
    if shard.segment_ids is not None:
        features["query_segment_ids"] = features["key_segment_ids"] = shard.segment_ids
    return shard.attention


def _paged(
    module: nn.Module,
    cache: PagedAttentionCache,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of continuous batching: writes those of the call to pages and reads those of its rows.

    For transformers' own classes of 5.23: ours, and those of 5.24, have updated the cache before they call us.
    """
    if not isinstance(cache, PagedAttentionCache) or mask is None:
        raise UnsupportedOperationError(
            f"EasyTorch's attention takes cache={type(cache).__name__} from generate_batch alone, which passes a "
            f'PagedAttentionCache and a mask; load this model with attn_implementation="easytorch", "sdpa" or "eager"'
        )
    return cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)


def attend_by_mask(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    backend: str | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attend` where the mask alone determines what is attended to, as in transformers' eager attention."""
    learning = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if backend is None and learning:  # ATen's fused kernel has other gradients for fully masked rows
        backend = "vanilla"
    return attend(module, query, key, value, attention_mask, backend=backend, is_causal=False, **kwargs)


_FUNCTIONS: dict[str, AttentionFunction] = {
    **{name: functools.partial(attend, backend=backend) for name, backend in NATIVE_INTERFACES.items()},
    **{name: functools.partial(attend_by_mask, backend=backend) for name, backend in EAGER_INTERFACES.items()},
}


def attention_mask(
    *, attention_mask: torch.Tensor | None = None, q_offset: Any = 0, device: Any = "cpu", **kwargs: Any
) -> torch.Tensor | None:
    """Boolean (B, 1, T, S), or None where is_causal suffices (transformers' `sdpa_mask`).

    On XLA the values of a padding mask are not read: that would cut the graph and compile one more program.
    """
    if torch.device(device).type == "xla" and (attention_mask is not None or isinstance(q_offset, torch.Tensor)):
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(attention_mask=attention_mask, q_offset=q_offset, device=device, **kwargs)


def interface_of(implementation: str) -> AttentionFunction:
    """The function a native model calls for `config._attn_implementation`, ours or one the user registered."""
    if implementation in _FUNCTIONS:
        return _FUNCTIONS[implementation]
    return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, attend)


def register_interfaces() -> None:
    """Registers our names in transformers' tables; called once, when this module is imported."""
    for name in INTERFACES:
        AttentionInterface.register(name, _FUNCTIONS[name])
        AttentionMaskInterface.register(name, attention_mask)
    AttentionMaskInterface.register("ring", attention_mask)
    for name in EAGER_INTERFACES:
        AttentionInterface.register(name, _FUNCTIONS[name])
        AttentionMaskInterface.register(name, eager_mask)


_UNSAID: Any = object()


def _is_causal(module: nn.Module, is_causal: bool | None) -> bool:
    if is_causal is not None:
        return is_causal
    causal = getattr(module, "is_causal", _UNSAID)
    if causal is not _UNSAID:
        return causal
    # transformers treats a module without `is_causal` as causal, yet its own classes without it are bidirectional
    # (AlignText, ClapText, MarkupLM, Splinter) or always pass a mask
    return not type(module).__module__.startswith("transformers.")


def _split_mask(mask: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(mask, bias): a boolean mask, or a floating one that is added to the scores."""
    if mask.dtype == torch.bool:
        return mask, None
    if mask.is_floating_point():
        return None, mask
    raise ValueError(
        f"attention_mask {tuple(mask.shape)} is {mask.dtype}: a 4D mask must be boolean (True attends) or floating "
        f"(added to the scores); convert it with .bool()"
    )


def segment_ids(starts: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """(N + 1,) starts -> (1, length): which of the packed sequences each token belongs to."""
    if batch != 1:
        raise ValueError(
            f"cu_seq_lens describe one packed row, the batch has {batch}; pack it into one, or pass a mask"
        )
    positions = torch.arange(length, device=starts.device, dtype=starts.dtype)
    return torch.searchsorted(starts[1:], positions, right=True)[None]


def _backend_with_weights(backend: str | None) -> str:
    """ "vanilla", the only implementation that returns weights, unless another one was forced."""
    forced = backend or forced_by_environment("attention")
    if forced is not None and forced.partition(":")[0] not in ("vanilla", "native"):
        raise UnsupportedOperationError(
            f"attention {forced!r} was forced and returns no attention weights, which output_attentions=True asks for; "
            f'use attn_implementation="vanilla", or "easytorch", which then selects it'
        )
    return "vanilla" if backend is None else backend


def _check_others(kwargs: dict[str, Any]) -> None:
    """Refuses keywords that would change the result; warns once about unknown ones."""
    for name, value in kwargs.items():
        if value is None or name in HARMLESS:
            continue
        if name == "adapter_names":  # native models remove it before
            raise UnsupportedOperationError(
                "transformers' own classes do not carry adapter_names, an adapter for each row: put the adapters in "
                "by peft.PeftModel, or call easytorch.protocol.generate"
            )
        if name in _REFUSED:
            raise UnsupportedOperationError(
                f"EasyTorch's attention does not carry {_REFUSED[name]} ({name}=...); load this model with "
                f'attn_implementation="eager" or "sdpa"'
            )
        _warn_unknown(name)


@functools.cache
def _warn_unknown(name: str) -> None:
    logger.warning(
        "attention: EasyTorch does not know the argument %r and ignores it, as transformers' sdpa does", name
    )


register_interfaces()
