"""`compute_loss`: a model's forward and the loss of its head, by EasyDeL's names.

    output, metrics = compute_loss(model, input_ids=tokens, loss_config=LossConfig(z_loss=1e-4))
    metrics.loss.backward()

Which loss a model has is read off what transformers gives its class. The defaults are transformers' loss, in value and
gradient; `LossConfig` says what else there is. The logits of a large vocabulary are not materialized.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from easytorch.argument_types import check_types
from easytorch.cache_names import given_cache
from easytorch.layers.deferred_head import without_logits
from easytorch.layers.deferred_logits import SMALLEST
from easytorch.layers.token_loss import HeadProduct
from easytorch.layers.vocabulary_parallel import sharded_parameters
from easytorch.protocol.attention_inputs import MaskInfo, check_cache, packed_inputs
from easytorch.protocol.loss_config import LossConfig, LossMetrics
from easytorch.protocol.loss_terms import answers, classification, of_model, routers_loss, tokens

_CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification", "ForVideoClassification",
                "ForAudioClassification")  # fmt: skip


@check_types("attention_mask", "labels", "loss_config", "loss_kwargs")
def compute_loss(
    model: PreTrainedModel,
    input_ids: Tensor | None = None,
    labels: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    attention_mask: Any = None,
    mask_info: MaskInfo | None = None,
    position_ids: Tensor | None = None,
    segment_ids: Tensor | None = None,
    *,
    loss_config: LossConfig | None = None,
    loss_kwargs: Mapping[str, Any] | None = None,
    cache_metadata: Any = None,
    **batch: Any,
) -> tuple[Any, LossMetrics]:
    """The model's output and its `LossMetrics`; `output.loss` is `metrics.loss`, which has the gradient.

    batch: what else the model's forward takes, by name. labels: as its class takes them in transformers; for causal
    models they are the input tokens where none are given, without padding; as in transformers and EasyDeL padding on
    the left counts as what predicts a row's first token, unless its label is given as ignore_index. loss_config: see
    `LossConfig`; loss_kwargs: some of its settings for this call, and `shift_labels`. segment_ids (B, T): which of the
    sequences packed into a row each token belongs to, -1 for padding; they do not attend to each other, and no token
    predicts another sequence's. mask_info: the same, or a mask, as an object. cache_metadata: what the cache in
    the cache was made for, which is checked. The loss of a base model with experts is the load balancing loss
    alone.

    `ValueError` or `TypeError` for settings and labels that do not fit the head.
    """
    named = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
    named |= {"attention_mask": attention_mask, "position_ids": position_ids}
    batch |= {name: one for name, one in named.items() if one is not None}
    _check_input_ids(model, batch)
    config = loss_config if loss_config is not None else LossConfig()
    if not isinstance(config, LossConfig):
        raise TypeError(f"loss_config must be a LossConfig, not {type(config).__name__}")
    if not isinstance(loss_kwargs, Mapping | None):
        raise TypeError(f"loss_kwargs must be a dict of settings, not {type(loss_kwargs).__name__}")
    settings = dict(loss_kwargs or {})
    shifted = settings.pop("shift_labels", None)
    config = config.with_settings(settings) if settings else config
    if cache_metadata is not None:
        check_cache(cache_metadata, given_cache(batch))
    kind = kind_of(model)
    if kind != "own" and not isinstance(labels, Tensor | None):
        raise TypeError(f"labels of {type(model).__name__} are a tensor, not {type(labels).__name__}")
    segments = None
    if mask_info is not None or segment_ids is not None:
        batch, segments = packed_inputs(model, batch, mask_info, segment_ids)
    if kind == "experts" or config.router_aux_loss_coef is not None:
        batch = _with_router_logits(model, batch)
    if kind == "experts":
        _refuse(kind, config, ("router_aux_loss_coef", "break_on_nan"))
        if labels is not None:
            raise ValueError(f"{type(model).__name__} has no head: no loss of labels, only that of its experts")
        output = _call(model, batch)
        return _result(output, *routers_loss(model, output, batch, config, None), config)
    if kind in _TOKENS:
        labels, config = _token_labels(model, kind, labels, shifted, segments, batch, config)
        return _of_tokens(model, kind, labels, batch, config)
    if shifted is not None:
        raise ValueError(f"shift_labels are for models that predict the next token; {type(model).__name__} does not")
    return _of_head(model, kind, labels, batch, config)


def _check_input_ids(model: PreTrainedModel, batch: Mapping[str, Any]) -> None:
    """`TypeError` for tokens, as the first argument is, of a model that has none, as an image's."""
    name = getattr(model, "main_input_name", "input_ids")
    if "input_ids" in batch and name != "input_ids" and "input_ids" not in inspect.signature(model.forward).parameters:
        raise TypeError(f"{type(model).__name__} takes no input_ids; name its input: {name}=...")


_TOKENS = ("causal", "seq2seq", "masked", "tokens")


def kind_of(model: PreTrainedModel) -> str:
    """Which loss the model's head has: "causal", "seq2seq", "masked", "tokens", "classification", "answers",
    "choices", "experts" (a base model of experts), or "own", that which the model computes itself."""
    loss_type = getattr(model, "loss_type", None)
    if hasattr(model, "_loss_function") and model._loss_function is not LOSS_MAPPING.get(loss_type or "ForCausalLM"):
        return "own"  # the user's
    if loss_type in _CLASSIFIERS:
        return "classification"
    named = {"ForTokenClassification": "tokens", "ForQuestionAnswering": "answers", "ForMaskedLM": "masked"}
    if loss_type in named:
        return named[loss_type]
    if "MultipleChoice" in type(model).__name__:
        return "choices"
    generates = model.can_generate() and model.get_output_embeddings() is not None
    if generates and model.config.is_encoder_decoder:
        return "seq2seq"
    if generates and model.loss_function is ForCausalLMLoss:
        return "causal"
    if model.base_model is model and "labels" not in inspect.signature(model.forward).parameters:
        return "experts" if _routes(model) else "none"
    return "own"


def _routes(model: PreTrainedModel) -> bool:
    return "router_logits" in (getattr(model, "_can_record_outputs", None) or {}) or (
        hasattr(model.config.get_text_config(), "output_router_logits")
    )


def _with_router_logits(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    if not _routes(model):
        raise ValueError(f"router_aux_loss_coef is for models with experts; {type(model).__name__} has no routers")
    return {"output_router_logits": True, **{name: one for name, one in batch.items() if one is not None}}


def _call(model: PreTrainedModel, batch: Mapping[str, Any], **more: Any) -> Any:
    given = {name: value for name, value in batch.items() if value is not None} | more
    if not model.config.return_dict:
        given["return_dict"] = True
    return model(**given)


def _token_labels(
    model: PreTrainedModel,
    kind: str,
    labels: Tensor | None,
    shifted: Tensor | None,
    segments: Tensor | None,
    batch: Mapping[str, Any],
    config: LossConfig,
) -> tuple[Tensor, LossConfig]:
    """The label of each position of the logits, and the config."""
    if shifted is not None:
        if kind != "causal":
            raise ValueError(f"shift_labels are for causal models; {type(model).__name__} is none")
        return shifted, config
    if labels is None:
        if kind != "causal" or batch.get("input_ids") is None:
            raise ValueError(f"compute_loss of {type(model).__name__} needs labels")
        labels = batch["input_ids"]
        mask = batch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == labels.shape:
            labels = labels.masked_fill(mask == 0, config.ignore_index)
    if segments is not None:
        labels = labels.masked_fill(segments < 0, config.ignore_index)
    if kind != "causal" or not config.shift_tokens:
        return labels, config
    labels = torch.nn.functional.pad(labels, (0, 1), value=config.ignore_index)[..., 1:]
    if segments is not None:
        following = torch.nn.functional.pad(segments, (0, 1), value=-1)[..., 1:]
        labels = labels.masked_fill(following != segments, config.ignore_index)
    return labels, config


def _of_tokens(
    model: PreTrainedModel, kind: str, labels: Tensor, batch: Mapping[str, Any], config: LossConfig
) -> tuple[Any, LossMetrics]:
    _refuse(kind, config, _FOR_TOKENS)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() < 1:
        raise ValueError(f"labels of {type(model).__name__} are a tensor of token or class indices, one a position")
    inputs = {name: value for name, value in batch.items() if value is not None}
    more: dict[str, Any] = {}
    if kind == "seq2seq" and inputs.keys().isdisjoint(("decoder_input_ids", "decoder_inputs_embeds")):
        filled = labels.masked_fill(labels == config.ignore_index, -100)
        shift: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if shift is not None:
            inputs["decoder_input_ids"] = shift(labels=filled)
        else:
            more["labels"] = filled  # the model shifts them itself, and computes a loss that is not used
    source: Tensor | HeadProduct
    found = None
    if not more and kind != "tokens" and _is_large(model, labels, config):
        found = without_logits(model, inputs if model.config.return_dict else {**inputs, "return_dict": True})
    if found is not None:
        output, product = found
        source, shape = product, product.hidden.shape[:-1]
    else:
        output = _call(model, inputs, **more)
        source, shape = output.logits, output.logits.shape[:-1]
    if shape != labels.shape:
        raise ValueError(
            f"{type(model).__name__} gives logits of {tuple(shape)} positions, and labels are {tuple(labels.shape)}"
        )
    # not the model's: accelerate may keep its weights elsewhere
    device = source.hidden.device if isinstance(source, HeadProduct) else source.device
    loss, metrics = tokens(source, labels.to(device), config)
    return _result(output, *routers_loss(model, output, batch, config, loss), config, metrics)


def _is_large(model: PreTrainedModel, labels: Tensor, config: LossConfig) -> bool:
    head: Any = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return False
    if sharded_parameters(head)[0] is not None:
        return True
    return config.chunk_size(labels, weight.shape[0]) is not None or labels.numel() * weight.shape[0] >= SMALLEST


def _of_head(
    model: PreTrainedModel, kind: str, labels: Tensor | None, batch: Mapping[str, Any], config: LossConfig
) -> tuple[Any, LossMetrics]:
    """Of heads whose logits are few: those of classes, of answers, and those that compute their own loss."""
    if kind == "none":
        raise TypeError(f"{type(model).__name__} has no head and no experts: there is no loss to compute")
    inputs = dict(batch)
    if kind == "answers":
        positions = [inputs.pop(name, None) for name in ("start_positions", "end_positions")]
        if any(one is None for one in positions):
            raise ValueError(f"compute_loss of {type(model).__name__} needs start_positions and end_positions")
        _refuse(kind, config, ("label_smoothing", "z_loss", "reduction", "num_items_in_batch", "break_on_nan"))
        output = _call(model, inputs)
        if getattr(output, "start_logits", None) is None:
            raise ValueError(f"{type(model).__name__} gives no start_logits; call it with its labels for its own loss")
        loss, metrics = answers(output, positions[0], positions[1], config)
        return _result(output, loss, None, config, metrics)
    if kind == "own":
        _refuse(kind, config, ("router_aux_loss_coef", "break_on_nan"), type(model).__name__)
        output = _call(model, inputs if labels is None else {**inputs, "labels": labels})
        loss, metrics = of_model(model, output)
        return _result(output, loss, getattr(output, "aux_loss", None), config, metrics)
    if labels is None:
        raise ValueError(f"compute_loss of {type(model).__name__} needs labels")
    output = _call(model, inputs)
    loss, metrics = classification(model, output.logits, labels.to(output.logits.device), config, kind == "choices")
    return _result(output, loss, None, config, metrics)


_SHARED = ("reduction", "num_items_in_batch", "break_on_nan", "compute_dtype")
_FOR_TOKENS = (
    *("ignore_index", "label_smoothing", "z_loss", "class_weights", "loss_normalizing_factor", "divide_weight_sum"),
    *("shift_tokens", "num_labels", "chunk_token_size", "chunk_vocab_size", "chunk_block_size"),
    *("router_aux_loss_coef", *_SHARED),
)


def _refuse(kind: str, config: LossConfig, taken: tuple[str, ...], who: str = "") -> None:
    if others := [name for name in config.given() if name not in taken]:
        heads = {"experts": "a base model with experts", "answers": "question answering", "own": f"{who}'s own loss"}
        raise ValueError(f"{heads.get(kind, kind)} takes no {', '.join(others)}; it takes {', '.join(taken)}")


def _result(
    output: Any, loss: Tensor, aux_loss: Tensor | None, config: LossConfig, metrics: LossMetrics | None = None
) -> tuple[Any, LossMetrics]:
    if config.break_on_nan and not bool(loss.detach().isfinite().all()):
        raise FloatingPointError(f"the loss is {loss.detach().tolist()}")
    metrics = metrics if metrics is not None else LossMetrics()
    metrics.loss, metrics.aux_loss = loss, None if aux_loss is None else aux_loss.detach()
    if "loss" in getattr(output, "__dataclass_fields__", {}):
        output.loss = loss
    return output, metrics
