"""`from_pretrained` of every model, native or transformers' own: the steps before and after transformers' loader."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from easytorch.protocol.checkpoint_files import check_torch_files, flax_file
from easytorch.protocol.expert_checks import check_experts, one_stack_at_a_time
from easytorch.protocol.flax_loading import load_flax
from easytorch.protocol.gguf_loading import gguf_source, load_gguf
from easytorch.protocol.load_checks import check_loaded, check_shapes
from easytorch.protocol.packed_loading import load_packed, packed_checkpoint
from easytorch.protocol.quantization_config import settings_of_name
from easytorch.protocol.tied_weights import fill_repeats, weights_of

# `check_loaded` or `check_loaded_foreign`: what must have been in the checkpoint.
Check = Callable[..., None]


def load_pretrained(
    model_class: type[PreTrainedModel],
    path: Any,
    model_args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    from_torch: Callable[..., Any],
    from_state_dict: Callable[..., Any],
    check: Check,
) -> tuple[Any, dict[str, Any]]:
    """(model, loading info) of the checkpoint at `path`, Flax included: complete files, filled ties, checked shapes.

    from_torch, from_state_dict: transformers' `from_pretrained` for torch's files, and for weights read by the bridge.
    kwargs: those of `from_pretrained`, and `NativeModel`'s `from_flax`, `strict` and `ignore_mismatched_sizes`, which
    are popped.
    """
    with ExitStack() as files:
        return _load(model_class, path, model_args, kwargs, from_torch, from_state_dict, check, files)


def _load(
    model_class: type[PreTrainedModel],
    path: Any,
    model_args: tuple[Any, ...],
    kwargs: dict[str, Any],
    from_torch: Callable[..., Any],
    from_state_dict: Callable[..., Any],
    check: Check,
    files: ExitStack,
) -> tuple[Any, dict[str, Any]]:
    """`load_pretrained`; files: closed when the model is loaded."""
    strict = kwargs.pop("strict", True)
    ignore = kwargs.pop("ignore_mismatched_sizes", False)
    settings_of_name(kwargs)
    gguf = gguf_source(path, kwargs)
    from_flax = kwargs.pop("from_flax", False)
    packed = None if gguf is not None or from_flax else packed_checkpoint(path, kwargs)
    flax = flax_file(path, from_flax, kwargs) if gguf is None and packed is None else None
    # transformers collects mismatches; `check` decides on them.
    kwargs |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    source: str | None
    if gguf is not None:
        source, config = str(gguf), kwargs.pop("config", None)
        model, info, weights = load_gguf(from_state_dict, model_class, gguf, path, config, model_args, kwargs)
        opened: AbstractContextManager[Callable[[str], Tensor]] = nullcontext(weights.__getitem__)
    elif packed is not None:
        source = check_torch_files(path, kwargs)
        config = kwargs.pop("config", None)
        model, info, weights = load_packed(from_state_dict, model_class, packed, path, config, model_args, kwargs)
        opened = nullcontext(weights.__getitem__)
    elif flax is None:
        source = check_torch_files(path, kwargs)
        # a stack of experts cannot have gaps; a class of transformers may have other experts
        stacks = strict or check is check_loaded
        experts = check_experts(model_class, path, kwargs) if stacks else 0
        try:
            with one_stack_at_a_time() if experts else nullcontext():
                model, info = from_torch(path, *model_args, **kwargs)
        finally:
            if experts is None:  # files that are fetched as they are loaded
                check_experts(model_class, path, kwargs)
        opened = weights_of(path, kwargs)
    else:
        source, config = str(flax.path), kwargs.pop("config", None)
        parts = files if getattr(model_class, "reads_parts", False) else None
        model, info, weights = load_flax(
            from_state_dict, model_class.config_class, flax, path, config, model_args, kwargs, parts
        )
        read = weights.__getitem__
        opened = nullcontext(read if parts is None else lambda name: read(name)[...])
    fill_repeats(model, info, opened)
    if getattr(model, "_hf_peft_config_loaded", False):
        return model, info
    if strict:
        check(model, info, source, ignore_mismatched_sizes=ignore)
    else:
        check_shapes(model, info, source, ignore)
    return model, info
