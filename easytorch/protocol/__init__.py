"""Capabilities of native models beyond `transformers.PreTrainedModel`, one file each.

base.py              `BaseModuleProtocol`: the implemented part of EasyDeL's interface
native.py            `NativeModel`: the base class of every native family
bridge.py            `BridgeMixin`: weights to and from JAX/Flax, and a plain transformers model of the same weights
loading.py           `from_pretrained`, of native models and of transformers' own
checkpoint_files.py  which file a folder or name stands for, and whether it is complete
flax_loading.py      a Flax checkpoint given to a `from_pretrained`
tied_weights.py      weights a checkpoint holds under another of their names
load_checks.py       which weights a checkpoint may lack, or hold in addition
conversion.py        weights to and from JAX/Flax for any transformers model, as functions
state.py             a model's tensors as data: split, merged, flattened
train_state.py       step, tensors and an optimizer's slots, saved and restored
optax_state.py       the same from and to JAX: optax's slots
lazy.py              a model without memory
dtypes.py            the dtype of its tensors
display.py           a model as text
describe.py          forward's switches and the auto class
loss.py              a model's forward and the loss of its head; loss_config.py, loss_terms.py
caches.py            caches, dense and paged, and the inputs that go with them
quantization.py      weights in few bits; quantization_config.py
attention_inputs.py  packed sequences, as segment ids say them
lora.py              low-rank adapters, in PEFT's layers; adapter_loading.py, mixed_adapters.py
flax_adapters.py     adapters from and to JAX models
reference_arguments.py  EasyDeL's arguments of methods that are transformers'
module.py            these functions as methods of native models

The functions here take any model of transformers.
"""

from easytorch.distributed.sharding import gather_model, mesh_of, params_sharding, shard_model
from easytorch.protocol.adapter_loading import load_adapter
from easytorch.protocol.attention_inputs import MaskInfo
from easytorch.protocol.base import BaseModuleProtocol
from easytorch.protocol.bridge import BridgeMixin
from easytorch.protocol.caches import (
    create_cache_metadata,
    create_paged_metadata,
    init_cache,
    init_ragged_pages,
    prepare_inputs_for_call,
    prepare_inputs_for_generation,
    update_inputs_for_generation,
)
from easytorch.protocol.conversion import from_flax, to_flax, to_torch, transform_fn
from easytorch.protocol.describe import get_static_arguments, get_torch_loader
from easytorch.protocol.display import get_module_repr, prettify_nnx, printify_nnx, return_type_adjuster
from easytorch.protocol.dtypes import float32, half, to_dtype
from easytorch.protocol.flax_adapters import lora_from_flax, lora_to_flax
from easytorch.protocol.lazy import lazy_init
from easytorch.protocol.lora import (
    apply_lora_to_layers,
    merge_lora_params,
    split_lora_params,
    unwrap_lora_to_layers,
)
from easytorch.protocol.loss import compute_loss
from easytorch.protocol.loss_config import LossConfig, LossMetrics, SpecialLossNormalizingFactor
from easytorch.protocol.optax_state import from_optax, to_optax
from easytorch.protocol.optimizer_state import OptimizerState
from easytorch.protocol.quantization import dequantize, quantize
from easytorch.protocol.quantization_config import QuantizationConfig
from easytorch.protocol.reference_arguments import generate, push_to_hub, save_pretrained
from easytorch.protocol.state import (
    GraphDef,
    flatten,
    graphdef,
    graphother,
    graphstate,
    merge_module,
    merge_params,
    merge_params_dict,
    split_module,
    split_params,
    split_params_dict,
    unflatten,
)
from easytorch.protocol.train_state import TrainState, load_state, to_state

mesh = mesh_of  # a property of native models
# The reference's other names of two of them; not in __all__, since `import *` would replace Python's own `float`.
float = float32
pure_transform_fn = transform_fn

__all__ = [
    "BaseModuleProtocol",
    "BridgeMixin",
    "GraphDef",
    "LossConfig",
    "LossMetrics",
    "MaskInfo",
    "OptimizerState",
    "QuantizationConfig",
    "SpecialLossNormalizingFactor",
    "TrainState",
    "apply_lora_to_layers",
    "compute_loss",
    "create_cache_metadata",
    "create_paged_metadata",
    "dequantize",
    "flatten",
    "float32",
    "from_flax",
    "from_optax",
    "gather_model",
    "generate",
    "get_module_repr",
    "get_static_arguments",
    "get_torch_loader",
    "graphdef",
    "graphother",
    "graphstate",
    "half",
    "init_cache",
    "init_ragged_pages",
    "lazy_init",
    "load_adapter",
    "load_state",
    "lora_from_flax",
    "lora_to_flax",
    "merge_lora_params",
    "merge_module",
    "merge_params",
    "merge_params_dict",
    "params_sharding",
    "prepare_inputs_for_call",
    "prepare_inputs_for_generation",
    "prettify_nnx",
    "printify_nnx",
    "push_to_hub",
    "quantize",
    "return_type_adjuster",
    "save_pretrained",
    "shard_model",
    "split_lora_params",
    "split_module",
    "split_params",
    "split_params_dict",
    "to_dtype",
    "to_flax",
    "to_optax",
    "to_state",
    "to_torch",
    "transform_fn",
    "unflatten",
    "unwrap_lora_to_layers",
    "update_inputs_for_generation",
]
