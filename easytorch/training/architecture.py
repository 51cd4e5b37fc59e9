"""The architecture a run trains, as its transformers config: every key is known, and the sizes fit together."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from easytorch.auto.failures import MOST_LAYERS
from easytorch.bridge.errors import nearest
from easytorch.training.config import TrainingConfig, flag

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MODEL = flag("model")

# What transformers raises while it builds a config or a model out of sizes that do not fit together.
REFUSALS = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RuntimeError, AssertionError)

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")

COUNTS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions", "d_model", "num_layers",
)  # fmt: skip

LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


def check_architecture(model: dict[str, Any] | str) -> PreTrainedConfig:
    """The config of `model`; `ValueError` if it is not a causal language model, or cannot be built."""
    import easytorch

    config = _read(model) if isinstance(model, str) else build(model)
    if type(config) not in easytorch.AutoModelForCausalLM._model_mapping:
        raise ValueError(f"{MODEL}: {config.model_type!r} has no causal language model; give another architecture")
    return config


def _read(folder: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    if folder.startswith(("/", "./", "../", "~")) and not Path(folder).exists():  # no name on the hub is like that
        raise FileNotFoundError(f"{MODEL}: there is no folder {folder!r}")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise type(error)(f"{MODEL}: {error}") from error
    return config


def build(settings: dict[str, Any]) -> PreTrainedConfig:
    """The config of the architecture in `settings`, all keys of which must be known to it."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    model_type = settings["model_type"]
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ValueError(f"{MODEL}: unknown architecture {model_type!r}{nearest(str(model_type), CONFIG_MAPPING)}")
    _check_counts(settings)
    _check_activations(settings)
    try:
        config = AutoConfig.for_model(**settings)
    except StrictDataclassError as error:
        raise ValueError(f"{MODEL}: {' '.join(str(error).split())}") from error
    except REFUSALS as error:
        raise ValueError(
            f"{MODEL}: transformers cannot build {model_type!r} from these sizes: {type(error).__name__}: {error}"
        ) from error
    _check_keys(config, settings, type(config)(), MODEL)
    _check_heads(config)
    return config


def with_tokenizer(config: TrainingConfig, tokenizer: Any) -> PreTrainedConfig:
    """The config of a new model: vocabulary and special tokens are the tokenizer's, positions at least a block."""
    from transformers import AutoConfig

    assert isinstance(config.model, dict)
    positions = "max_position_embeddings"
    default = AutoConfig.for_model(config.model["model_type"])
    spelt = {positions, default.attribute_map.get(positions, positions)}
    fitted = {positions: config.block_size} if hasattr(default, positions) and not spelt & {*config.model} else {}
    return build(
        {
            **fitted,
            **config.model,
            "vocab_size": len(tokenizer),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
    )


def check_positions(model: PreTrainedConfig, block_size: int) -> None:
    """`ValueError` where a block is longer than the model's maximum number of positions."""
    limit = getattr(model, "max_position_embeddings", None)
    if isinstance(limit, int) and limit < block_size:
        raise ValueError(
            f"{flag('block_size')} {block_size} is longer than the model's max_position_embeddings {limit}; "
            f"give a smaller --block-size, or a model with a larger maximum"
        )


def _check_counts(settings: dict[str, Any]) -> None:
    """`ValueError` for a size below 1, which would be a division by zero or an empty layer inside the model, and for
    more layers than anybody has."""
    for name in COUNTS:
        value = settings.get(name)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{MODEL}: {name} must be at least 1, got {value}")
        if name in LAYERS and isinstance(value, int) and value > MOST_LAYERS:
            raise ValueError(f"{MODEL}: {name} must be at most {MOST_LAYERS}, got {value}")


def _check_activations(settings: dict[str, Any]) -> None:
    """`ValueError` for an unknown activation, for which transformers raises a bare KeyError."""
    from transformers.activations import ACT2FN

    for name in ACTIVATIONS:
        value = settings.get(name)
        if isinstance(value, str) and value not in ACT2FN:
            raise ValueError(f"{MODEL}: unknown {name} {value!r}{nearest(value, ACT2FN)}")


def _check_keys(config: PreTrainedConfig, given: dict[str, Any], default: PreTrainedConfig, where: str) -> None:
    """`ValueError` for an unknown key, which transformers keeps as an attribute that nothing reads."""
    from transformers import PreTrainedConfig

    known = {*vars(default), *config.attribute_map}
    for name, value in given.items():
        unknown = name not in known and not hasattr(default, name) and name in vars(config)
        if unknown and not _read_by_model(config, name):
            raise ValueError(
                f"{where}: {config.model_type!r} has no setting {name!r}{nearest(name, known)}; correct or remove it"
            )
        inner = getattr(config, name, None)
        if isinstance(value, dict) and isinstance(inner, PreTrainedConfig):
            _check_keys(inner, value, type(inner)(), f"{where}: {name}")
    _check_rope(given.get("rope_parameters", given.get("rope_scaling")), where)


def _read_by_model(config: PreTrainedConfig, name: str) -> bool:
    """Whether transformers' model reads the setting off its config, which does not declare it, as Qwen3-MoE's head_dim
    (`getattr(config, "head_dim", None)`)."""
    from transformers import MODEL_MAPPING

    if type(config) not in MODEL_MAPPING:
        return False
    found = MODEL_MAPPING[type(config)]
    classes = found if isinstance(found, tuple) else (found,)
    read = re.compile(rf"""config(\.|, ["']){re.escape(name)}\b""")
    return any(read.search(inspect.getsource(sys.modules[one.__module__])) for one in classes)


def _check_rope(given: Any, where: str) -> None:
    """`ValueError` for unknown rope parameters, which transformers warns of and ignores."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

    if not isinstance(given, dict):
        return
    if given and all(isinstance(value, dict) for value in given.values()):  # one for each type of layer
        for value in given.values():
            _check_rope(value, where)
        return
    known = {*RopeParameters.__annotations__, "type", "mrope_section", "mrope_interleaved"}
    for name in given:
        if name not in known:
            raise ValueError(f"{where}: rope_parameters has no setting {name!r}{nearest(name, known)}")
    types = {"default", *ROPE_INIT_FUNCTIONS}
    rope_type = given.get("rope_type", given.get("type", "default"))
    if rope_type not in types and not (rope_type == "mrope" and "mrope_section" in given):
        raise ValueError(f"{where}: unknown rope_type {rope_type!r}{nearest(str(rope_type), types)}")


def _check_heads(config: PreTrainedConfig) -> None:
    values = vars(config)  # as attributes they raise where they differ from layer to layer
    heads, shared = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise ValueError(
            f"{MODEL}: num_attention_heads {heads} must be a multiple of num_key_value_heads {shared}, which they share"
        )
