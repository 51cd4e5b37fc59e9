"""`ModuleMixin`: functions of this room as methods, by EasyDeL's names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.optim import Optimizer
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from easytorch.cache import RaggedPagesCache, RaggedPagesMetadata, TransformerMetadata
from easytorch.distributed import sharding
from easytorch.protocol import (
    adapter_loading,
    adapters,
    cache_checks,
    caches,
    captured_generation,
    describe,
    dtypes,
    lazy,
    lora,
    loss,
    mesh_saving,
    mixed_adapters,
    quantization,
    reference_arguments,
    state,
    train_state,
)
from easytorch.protocol.adapter_methods import AdapterMethods
from easytorch.protocol.attention_inputs import MaskInfo
from easytorch.protocol.loss_config import LossConfig, LossMetrics
from easytorch.protocol.quantization_config import QuantizationConfig

if TYPE_CHECKING:
    _Base = PreTrainedModel
else:
    _Base = AdapterMethods  # `PreTrainedModel` stands behind the mixin in the bases


class ModuleMixin(_Base):
    """A model's tensors as data, its dtype, and what callers ask of it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        # on the class that generates alone: transformers takes every class that has the method for one
        if GenerationMixin in cls.__bases__:
            caches.also_by_length(cls)
            reference_arguments.also_with_ours(cls)
            captured_generation.also_captured(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """forward's arguments, and PEFT's adapter_names: an adapter for each row, "__base__" for none."""
        cache_checks.check_cache_argument(self, kwargs)
        if kwargs.get("adapter_names") is None:
            kwargs.pop("adapter_names", None)
            return super().__call__(*args, **kwargs)
        with mixed_adapters.rows_of_adapters(self, kwargs.pop("adapter_names")):
            return super().__call__(*args, **kwargs)

    def get_compiled_call(self, compile_config: Any) -> Any:
        """transformers' own; without a compile_config `generate` captures its steps as a CUDA graph instead."""
        return captured_generation.compiled_call(self, compile_config, super().get_compiled_call)

    @classmethod
    def lazy_init(cls, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> Self:
        """A model of `config` on the meta device, which `merge_params` fills (`protocol.lazy_init`)."""
        model: Self = lazy.lazy_init(cls, config, *args, **kwargs)
        return model

    def save_pretrained(
        self, save_directory: Any, *args: Any, gather_fns: Any = None, float_dtype: Any = None, step: int | None = None,
        to: str = "torch", **kwargs: Any,
    ) -> Any:  # fmt: skip
        """transformers' own; float_dtype and step: see `protocol.save_pretrained`.

        A model over a mesh is saved by a call of each rank, which share the writing. to: the format, as in
        `easytorch.bridge.convert`: "torch", "flax", "flax-safetensors", "orbax" or "orbax-zarr".
        """
        lazy.require_memory(self, "save_pretrained", by_transformers=True)
        adapters.check_savable(self)
        if mesh_saving.by_ranks(self, {**kwargs, "to": to, "float_dtype": float_dtype}):
            reference_arguments.refuse_jax(gather_fns=gather_fns)
            kwargs |= {"float_dtype": float_dtype, "step": step, "to": to}
            return mesh_saving.save_sharded(
                self, save_directory, self.save_pretrained, mesh_saving.by_name(args) | kwargs
            )
        if gather_fns is None and float_dtype is None and step is None:
            return super().save_pretrained(save_directory, *args, **kwargs)
        if args:
            raise TypeError("save_pretrained: name the arguments behind the folder where float_dtype or step is given")
        return reference_arguments.save_pretrained(
            self, save_directory, gather_fns=gather_fns, float_dtype=float_dtype, step=step,
            theirs=lambda _, folder, **more: PreTrainedModel.save_pretrained(self, folder, **more), **kwargs,
        )  # fmt: skip

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:  # type: ignore[override]
        """transformers' own, with EasyDeL's arguments: see `protocol.push_to_hub`."""
        return reference_arguments.push_to_hub(
            self,
            repo_id,
            theirs=PreTrainedModel.push_to_hub,
            **kwargs,
        )

    def split_module(self) -> tuple[state.GraphDef, state.State, state.State]:
        """(graphdef, graphstate, graphother)."""
        return state.split_module(self)

    @staticmethod
    def merge_module(
        graphdef: state.GraphDef, graphstate: Mapping[str, torch.Tensor], graphother: Mapping[str, torch.Tensor]
    ) -> Any:
        """A model of what `split_module` gave; it shares the memory of the tensors."""
        return state.merge_module(graphdef, graphstate, graphother)

    @property
    def graphdef(self) -> state.GraphDef:
        """The model without its tensors."""
        return state.graphdef(self)

    @property
    def graphstate(self) -> state.State:
        """name -> parameter, detached, in the model's own memory."""
        return state.graphstate(self)

    @property
    def graphother(self) -> state.State:
        """name -> buffer."""
        return state.graphother(self)

    def split_params(self) -> state.State:
        """name -> parameter: `graphstate`."""
        return state.split_params(self)

    def split_params_dict(self, params_dict: Mapping[str, Any] | None = None) -> dict[str, state.State]:
        """`{"params": ..., "buffers": ...}` of a dict of tensors, or of the model's own."""
        return state.split_params_dict(self, params_dict)

    def merge_params(self, tree: Mapping[str, Any]) -> Self:
        """Takes the values of `tree`, nested or flat, which must hold every parameter."""
        model: Self = state.merge_params(self, tree)
        return model

    def merge_params_dict(self, params_dict: Mapping[str, Any]) -> Self:
        """Takes the values of some parameters and buffers; the others stay."""
        model: Self = state.merge_params_dict(self, params_dict)
        return model

    def to_state(self, optimizer: Optimizer | None = None, *, step: int = 0) -> train_state.TrainState:
        """The train state: step, parameters, buffers, and the optimizer's slots."""
        return train_state.to_state(self, optimizer, step=step)

    def compute_loss(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        mask_info: MaskInfo | None = None,
        position_ids: torch.Tensor | None = None,
        segment_ids: torch.Tensor | None = None,
        *,
        loss_config: LossConfig | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        **batch: Any,
    ) -> tuple[Any, LossMetrics]:
        """(output, metrics) of a call and the loss of its head: see `protocol.compute_loss`."""
        return loss.compute_loss(
            self, input_ids, labels, inputs_embeds, attention_mask, mask_info, position_ids, segment_ids,
            loss_config=loss_config, loss_kwargs=loss_kwargs, **batch,
        )  # fmt: skip

    def create_cache_metadata(
        self, batch_size: int, max_length: int, pad_token_id: int | None = None
    ) -> TransformerMetadata:
        """See `protocol.create_cache_metadata`."""
        return caches.create_cache_metadata(self, batch_size, max_length, pad_token_id)

    def init_cache(
        self,
        batch_size: int,
        max_length: int,
        starts: torch.Tensor | None = None,
        shardings: Mapping[str, Any] | None = None,
        pad_token_id: int | None = None,
        **settings: Any,
    ) -> Any:
        """A `TransformerCache` to pass to a call as its cache; settings: see `protocol.init_cache`."""
        return caches.init_cache(self, batch_size, max_length, starts, shardings, pad_token_id, **settings)

    def create_paged_metadata(
        self, hbm_utilization: float, page_size: int, max_model_length: int
    ) -> RaggedPagesMetadata:
        """As many pages as fit the memory that is free."""
        return caches.create_paged_metadata(self, hbm_utilization, page_size, max_model_length)

    def init_ragged_pages(
        self,
        metadata: RaggedPagesMetadata | None = None,
        page_size: int | None = None,
        hbm_utilization: float | None = None,
        max_model_length: int | None = None,
    ) -> RaggedPagesCache:
        """A `RaggedPagesCache` to pass to a call as its cache."""
        return caches.init_ragged_pages(self, metadata, page_size, hbm_utilization, max_model_length)

    def prepare_inputs_for_call(self, **kwargs: Any) -> dict[str, Any]:
        """The arguments of a call, EasyDeL's in transformers' words."""
        return caches.prepare_inputs_for_call(self, **kwargs)

    def update_inputs_for_generation(self, model_outputs: Any, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the next step."""
        return caches.update_inputs_for_generation(self, model_outputs, model_kwargs)

    def quantize(
        self,
        quantization_config: QuantizationConfig | str | None = None,
        quantize_tensors: bool = True,
        verbose: bool | None = None,
        **settings: Any,
    ) -> Self:
        """Quantizes the weights of linear layers and experts in place; "int8" by default."""
        model: Self = quantization.quantize(self, quantization_config, quantize_tensors, verbose, **settings)
        return model

    def shard_model(self, partition_rules: Any = None, mesh: Any = None, uneven: sharding.Uneven = "error") -> Self:
        """Shards the model over the axes of a mesh; see `distributed.shard_model`."""
        model: Self = sharding.shard_model(self, partition_rules, mesh, uneven)
        return model

    def gather_model(self, partition_rules: Any = None, mesh: Any = None) -> Self:
        """The reverse of `shard_model`."""
        model: Self = sharding.gather_model(self, partition_rules, mesh)
        return model

    def apply_lora_to_layers(
        self,
        lora_rank: int,
        lora_pattern: str | None = None,
        verbose: bool = False,
        rngs: torch.Generator | int | None = None,
        **settings: Any,
    ) -> Self:
        """Puts an adapter into linear layers and freezes the rest; settings: see `protocol.apply_lora_to_layers`."""
        model: Self = lora.apply_lora_to_layers(self, lora_rank, lora_pattern, verbose, rngs, **settings)
        return model

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        """transformers' own; `ValueError` for a name that stands for no adapter."""
        adapter_loading.check_adapter_name(adapter_name or "default")
        super().add_adapter(adapter_config, adapter_name)

    def load_adapter(
        self,
        peft_model_id: str | os.PathLike[str] | None = None,
        adapter_name: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """transformers' own; an adapter of another model is an error, and the model is then as it was."""
        return adapter_loading.load_adapter(self, peft_model_id, adapter_name, *args, **kwargs)

    def split_lora_params(self, adapter_name: str | None = None) -> state.State:
        """name -> tensor of an adapter, the active one by default."""
        return lora.split_lora_params(self, adapter_name)

    def merge_lora_params(self, pytree: Mapping[str, Any], adapter_name: str | None = None) -> Self:
        """Takes the values of an adapter's parameters."""
        model: Self = lora.merge_lora_params(self, pytree, adapter_name)
        return model

    def unwrap_lora_to_layers(self, verbose: bool = False, *, merge: bool = True) -> Self:
        """Merges the active adapters into the weights, or drops them, and takes PEFT's layers out."""
        model: Self = lora.unwrap_lora_to_layers(self, verbose, merge=merge)
        return model

    def to_dtype(self, dtype: torch.dtype | str, change_runtime_dtype: bool = True) -> Self:
        """Casts parameters and buffers, and sets `config.dtype` unless `change_runtime_dtype` is False."""
        model: Self = dtypes.to_dtype(self, dtype, change_runtime_dtype)
        return model

    def half(self, change_runtime_dtype: bool = True) -> Self:
        """Casts to float16, as `to_dtype`."""
        return self.to_dtype(torch.float16, change_runtime_dtype)

    def float(self, change_runtime_dtype: bool = True) -> Self:
        """Casts to float32, as `to_dtype`."""
        return self.to_dtype(torch.float32, change_runtime_dtype)

    def get_static_arguments(self) -> tuple[str, ...]:
        """The names of forward's arguments that are no tensors."""
        return describe.get_static_arguments(self)

    @classmethod
    def get_torch_loader(cls) -> Any:
        """transformers' auto class that loads models of this class."""
        return describe.get_torch_loader(cls)

    @property
    def params_sharding(self) -> dict[str, tuple[Any, ...] | None]:
        """name -> the placements of a parameter over its mesh; None for one that is not sharded."""
        return sharding.params_sharding(self)

    @property
    def mesh(self) -> Any:
        """The device mesh of the parameters; None where they are not sharded."""
        return sharding.mesh_of(self)
