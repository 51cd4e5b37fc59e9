"""`NativeModel`: what every native family shares with transformers' own classes, and where it differs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedConfig, PreTrainedModel, initialization
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from easytorch.cache_names import CACHE
from easytorch.layers.attention import FLASH_FOR_TRANSFORMERS, NATIVE_INTERFACES
from easytorch.layers.config_checks import check_counts
from easytorch.layers.experts import NATIVE_INTERFACES as NATIVE_EXPERTS
from easytorch.layers.experts import Experts
from easytorch.layers.norm import ZeroCenteredRMSNorm
from easytorch.layers.rotary import RotaryTables
from easytorch.layers.routers import Router
from easytorch.layers.stock_names import share_config
from easytorch.protocol.batching import generate_batch
from easytorch.protocol.bridge import BridgeMixin
from easytorch.protocol.load_checks import check_loaded
from easytorch.protocol.loading import load_pretrained
from easytorch.protocol.mesh_loading import class_over_mesh
from easytorch.protocol.module import ModuleMixin
from easytorch.protocol.native_classes import new_part


def check_parts(config: PreTrainedConfig, attn_implementation: Any) -> None:
    """`ValueError` for a dict of attentions that names a sub-config which `config` does not have."""
    if not isinstance(attn_implementation, dict):
        return
    parts = ["", *config.sub_configs]
    if unknown := sorted(set(attn_implementation) - set(parts)):
        has = f"{type(config).__name__} has the parts {parts}"
        raise ValueError(f"attn_implementation={attn_implementation!r} names {unknown}; {has}")


class NativeModel(BridgeMixin, ModuleMixin, PreTrainedModel):
    """A `transformers.PreTrainedModel` whose attention is ours under every name, "sdpa" and "eager" included."""

    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True

    # Patterns of weight names: those that any checkpoint of the family may lack or have in addition, and those of its
    # heads.
    optional_weights: tuple[str, ...] = ()
    head_weights: ClassVar[tuple[str, ...]] = ()
    # The least of counts in a config that this family takes, where others take no such number.
    least_counts: ClassVar[Mapping[str, int]] = {}

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        check_counts(config, self.least_counts)
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *model_args: Any,
        config: PreTrainedConfig | str | os.PathLike[str] | None = None,
        ignore_mismatched_sizes: bool = False,
        output_loading_info: bool = False,
        from_flax: bool = False,
        strict: bool | None = None,
        mesh: Any = None,
        partition_rules: Any = None,
        **kwargs: Any,
    ) -> Self | tuple[Self, dict[str, Any]]:
        """As `transformers.PreTrainedModel.from_pretrained`, with Flax checkpoints, and errors where that only warns.

        from_flax: load flax_model.msgpack even beside torch weights; by default only where there are no others.
        strict: refuse a checkpoint that lacks a base weight, or has one the family does not know; with False
        transformers only warns. None: unless output_loading_info is asked for, which has their names, or nothing is
        loaded. A shape that differs is refused unless `ignore_mismatched_sizes`.
        mesh, partition_rules: those of `shard_model`; each rank of the mesh calls this, and reads its own part alone.
        """
        if strict is None:  # an empty state dict of no checkpoint asks for new weights
            new = pretrained_model_name_or_path is None and kwargs.get("state_dict") == {}
            strict = not (output_loading_info or new)
        kwargs |= {"config": config, "ignore_mismatched_sizes": ignore_mismatched_sizes}
        kwargs |= {"from_flax": from_flax, "strict": strict}
        if mesh is not None or partition_rules is not None:
            over_mesh = class_over_mesh(cls, pretrained_model_name_or_path, mesh, partition_rules, kwargs)
            kwargs["output_loading_info"] = output_loading_info
            return over_mesh.from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)  # type: ignore[no-any-return]
        load: Any = super().from_pretrained
        model, info = load_pretrained(
            cls,
            pretrained_model_name_or_path,
            model_args,
            kwargs,
            from_torch=load,
            from_state_dict=load,
            check=check_loaded,
        )
        model.freeze_again()
        return (model, info) if output_loading_info else model

    def post_init(self) -> None:
        finish: Any = super().post_init
        finish()
        share_config(self)
        self._frozen = [name for name, parameter in self.named_parameters() if not parameter.requires_grad]

    def freeze_again(self) -> None:
        """Parameters that the constructor froze, which a load makes anew, as ones that learn."""
        parameters = dict(self.named_parameters())
        for name in self._frozen:
            if name in parameters:  # not where quantization or adapters put a module around it
                parameters[name].requires_grad_(False)

    @classmethod
    def refusal(cls, config: PreTrainedConfig, kwargs: Mapping[str, Any]) -> str | None:
        """Why `from_pretrained` of `config` with these arguments is left to transformers' class; None: it is not."""
        return None

    def generate_batch(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate_batch` (continuous batching), whose failures are errors here."""
        return generate_batch(self, super().generate_batch, inputs, *args, **kwargs)  # type: ignore[misc]

    def _init_weights(self, module: torch.nn.Module) -> None:
        """transformers' initialization, which would set the weight of every norm to one, and compute angles its way."""
        if isinstance(module, RotaryTables):
            module.init_buffers()
            return
        initialize: Callable[[torch.nn.Module], None] = super()._init_weights
        initialize(module)
        if isinstance(module, ZeroCenteredRMSNorm):
            initialization.zeros_(module.weight)

    def apply(self, fn: Callable[[torch.nn.Module], Any]) -> Self:
        """As a module's; by the `_init_weights` of a model each part that is a model gets its own."""
        owner = getattr(fn, "__self__", None)
        if isinstance(owner, NativeModel) and fn == owner._init_weights:
            fn = self._init_weights
        return super().apply(fn)

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> Self:
        """`.to(...)` and the like. Moving to xla recreates every parameter, which would untie tied ones."""
        apply: Callable[..., Self] = super()._apply
        apply(fn, recurse)
        if any(parameter.device.type == "xla" for parameter in self.parameters()):
            self.tie_weights()
        return self

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: these are transformers' weights under transformers' names, so its conversions of old names apply."""
        return cls.is_remote_code()

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    def set_attn_implementation(self, attn_implementation: Any, allow_all_kernels: bool = False) -> None:
        """As transformers', which ignores names of missing sub-configs; here they are a `ValueError`."""
        check_parts(self.config, attn_implementation)
        super().set_attn_implementation(attn_implementation, allow_all_kernels)

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, is_init_check: bool = False, allow_all_kernels: bool = False
    ) -> str:
        """ "easytorch" unless one is asked for; "flash" is ours, without transformers' search for flash-attn."""
        if attn_implementation is None:
            return "easytorch"
        if attn_implementation == FLASH_FOR_TRANSFORMERS:
            return "flash"
        if attn_implementation in NATIVE_INTERFACES or attn_implementation == "paged|eager":
            return attn_implementation
        registered = attn_implementation.removeprefix("paged|") in ALL_ATTENTION_FUNCTIONS.valid_keys()
        if not registered or "flash" in attn_implementation:
            names = ", ".join(repr(name) for name in NATIVE_INTERFACES if name != FLASH_FOR_TRANSFORMERS)
            raise ValueError(
                f'Specified `attn_implementation="{attn_implementation}"` is not supported by {type(self).__name__}; '
                f"it takes {names}, 'flex_attention' or a name registered with transformers.AttentionInterface"
            )
        return super()._check_and_adjust_attn_implementation(attn_implementation, is_init_check, allow_all_kernels)


class NativeDecoder(NativeModel):
    """The defaults of a decoder family's `PreTrainedModel`."""

    base_model_prefix = "model"
    _skip_keys_device_placement = [CACHE]  # noqa: RUF012 - transformers copies it into a set
    head_weights = (r"^(lm_head|score|qa_outputs)\.",)


class NativeImageText(NativeDecoder):
    """The same for a family made of a vision tower and a decoder, which are models of their own families."""

    input_modalities: Any = ("image", "text")
    new_part = staticmethod(new_part)


class NativeVideoText(NativeDecoder):
    """The same for a family of images, videos and text, whose tower and decoder are its own."""

    input_modalities: Any = ("image", "video", "text")


class NativeMoeDecoder(NativeDecoder):
    """The same for a family with experts, which are ours unless another implementation than "eager" is asked for."""

    other_experts: ClassVar[bool] = True  # False where transformers has no other implementation than its own

    def _init_weights(self, module: torch.nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Experts | Router):
            module.reset_parameters(self.config.initializer_range)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls.other_experts

    def _check_and_adjust_experts_implementation(self, experts_implementation: str | None) -> str:
        """ "easytorch" unless one is asked for."""
        if experts_implementation in NATIVE_EXPERTS:
            return experts_implementation or "easytorch"
        return super()._check_and_adjust_experts_implementation(experts_implementation)
