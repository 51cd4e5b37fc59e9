"""The losses of heads: of tokens, classes, answers, and of experts' routers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from easytorch.distributed.mesh import mesh_axis_sizes
from easytorch.distributed.sharding import mesh_of
from easytorch.layers.causal_loss import mean_loss
from easytorch.layers.routers import load_balancing_loss
from easytorch.layers.token_loss import (
    HeadProduct,
    TokenLossOptions,
    check_labels,
    correct_and_logsumexp,
    label_weights,
    token_losses,
)
from easytorch.protocol.loss_config import LossConfig, LossMetrics, SpecialLossNormalizingFactor


def tokens(source: Tensor | HeadProduct, labels: Tensor, config: LossConfig) -> tuple[Tensor, LossMetrics]:
    """logits (..., V) or what they would be made of, labels (...) that are not shifted any more -> the loss."""
    vocabulary = source.vocabulary if isinstance(source, HeadProduct) else source.shape[-1]
    options = _options(config, labels, vocabulary)
    if isinstance(config.compute_dtype, torch.dtype):
        source = source.to(config.compute_dtype)
    rows, flat = (
        source.rows() if isinstance(source, HeadProduct) else source.reshape(-1, vocabulary),
        labels.reshape(-1),
    )
    weights = label_weights(labels, options)
    metrics = _metrics(rows, labels, weights, options, config)
    if config.reduction == "none" or config.average_per_sequence:
        return _reduced_tokens(token_losses(rows, flat, options).reshape(labels.shape), weights, config), metrics
    total = token_losses(rows, flat, options, reduction="sum")
    return _divided(total, labels, weights, options, config), metrics


def _reduced_tokens(losses: Tensor, weights: Tensor, config: LossConfig) -> Tensor:
    """The losses (B, ...) of each token, or the mean of the rows' own means; rows without labels are no part of it."""
    loss = losses
    if config.average_per_sequence:
        counts = weights.reshape(len(weights), -1).sum(1)
        sums = losses.reshape(len(losses), -1).sum(1)
        loss = torch.where(counts > 0, sums / counts.clamp(min=1e-30), 0.0).sum() / (counts > 0).sum()
    return _by_weight_sum(loss, weights, config)


def _by_weight_sum(loss: Tensor, weights: Tensor, config: LossConfig) -> Tensor:
    return mean_loss(loss, weights.sum()) if config.divide_weight_sum else loss


def _divided(total: Tensor, labels: Tensor, weights: Tensor, options: TokenLossOptions, config: LossConfig) -> Tensor:
    factor, names = config.loss_normalizing_factor, SpecialLossNormalizingFactor
    divisor: Any = weights.sum()
    if config.num_items_in_batch is not None:
        divisor = config.num_items_in_batch
    elif config.reduction == "sum":
        divisor = 1.0
    elif factor == names.NO_WEIGHT_NUM_REAL_TARGET_TOKENS:
        divisor = (labels != options.ignore_index).sum()
    elif factor == names.NUM_TOTAL_TARGET_TOKENS:
        divisor = labels.numel()
    elif isinstance(factor, int | float):
        divisor = factor
    loss = mean_loss(total, divisor)
    return _by_weight_sum(loss, weights, config)


def _options(config: LossConfig, labels: Tensor, vocabulary: int) -> TokenLossOptions:
    if config.num_labels is not None and config.num_labels != vocabulary:
        raise ValueError(f"num_labels={config.num_labels}, and the model has {vocabulary}")
    weights = config.class_weights
    if weights is not None and len(weights) != vocabulary:
        raise ValueError(f"class_weights has {len(weights)} numbers for {vocabulary} labels")
    options = TokenLossOptions(
        ignore_index=config.ignore_index,
        label_smoothing=config.label_smoothing,
        z_loss=config.z_loss,
        class_weights=weights if weights is None else torch.as_tensor(weights),
        chunk_size=config.chunk_size(labels, vocabulary),
    )
    check_labels(labels, vocabulary, options)
    return options


def _metrics(
    rows: Tensor | HeadProduct, labels: Tensor, weights: Tensor, options: TokenLossOptions, config: LossConfig
) -> LossMetrics:
    held = rows.detach() if isinstance(rows, Tensor) else rows.detached()

    def compute() -> tuple[Tensor, Tensor]:
        correct, normalizers = (one.reshape(labels.shape) for one in correct_and_logsumexp(held, labels.reshape(-1)))
        accuracy = (correct * weights).sum() / weights.sum()
        parts = options.z_loss * normalizers.square() * weights
        if config.reduction == "none" or config.average_per_sequence:
            return accuracy, _reduced_tokens(parts, weights, config).sum()
        return accuracy, _divided(parts.sum(), labels, weights, options, config)

    return LossMetrics(weight_sum=weights.sum(), compute=compute)


def classification(
    model: PreTrainedModel, logits: Tensor, labels: Tensor, config: LossConfig, choices: bool
) -> tuple[Tensor, LossMetrics]:
    """logits (B, classes) of a sequence or an image, or of the choices of a row."""
    classes = logits.shape[-1]
    problem = "single_label_classification" if choices else _problem(model, labels, config, classes)
    if problem == "single_label_classification":
        if labels.is_floating_point() or labels.numel() != logits.shape[:-1].numel():
            raise ValueError(f"labels must be {logits.shape[:-1].numel()} class indices, got {_described(labels)}")
        _only(config, _OF_CLASSES, problem)
        return tokens(logits.reshape(-1, classes), labels.reshape(-1).long(), config)
    if config.num_labels not in (None, classes):
        raise ValueError(f"num_labels={config.num_labels}, and the model has {classes}")
    if problem == "regression":
        _only(config, _OF_NUMBERS, problem)
        targets = labels.to(logits.dtype).reshape(logits.shape) if labels.numel() == logits.numel() else labels
    else:
        _only(config, (*_OF_NUMBERS, "class_weights"), problem)
        targets = labels.to(logits.dtype)
    if targets.shape != logits.shape:
        raise ValueError(f"labels of {problem} must be of the shape {tuple(logits.shape)}, got {_described(labels)}")
    if problem == "regression":
        losses = F.mse_loss(logits, targets, reduction="none")
    else:
        weights = None if config.class_weights is None else torch.as_tensor(config.class_weights).to(logits)
        if weights is not None and len(weights) != classes:
            raise ValueError(f"class_weights has {len(weights)} numbers for {classes} labels")
        losses = F.binary_cross_entropy_with_logits(logits, targets, weight=weights, reduction="none")
    return _reduced(losses, config), LossMetrics(weight_sum=losses.new_tensor(float(losses.numel())))


_OF_NUMBERS = (
    *("problem_type", "num_labels", "reduction", "num_items_in_batch", "break_on_nan"),
    "router_aux_loss_coef",
)
_OF_CLASSES = (
    *_OF_NUMBERS,
    *("ignore_index", "label_smoothing", "z_loss", "class_weights", "loss_normalizing_factor", "divide_weight_sum"),
)


def _only(config: LossConfig, taken: tuple[str, ...], problem: str) -> None:
    if others := [name for name in config.given() if name not in taken]:
        raise ValueError(f"{problem} takes no {', '.join(others)}; it takes {', '.join(taken)}")


def _problem(model: PreTrainedModel, labels: Tensor, config: LossConfig, classes: int) -> str:
    """As transformers tells it, which would keep what the first labels say in the model's config."""
    named = config.problem_type or model.config.problem_type
    if named is not None:
        return named
    if classes == 1:
        return "regression"
    integers = labels.dtype in (torch.long, torch.int)
    return "single_label_classification" if integers else "multi_label_classification"


def answers(output: Any, start: Tensor, end: Tensor, config: LossConfig) -> tuple[Tensor, LossMetrics]:
    """The mean of the cross entropies of start and end position; positions beyond the row are ignored."""
    found = []
    ignored = output.start_logits.shape[1]
    for logits, positions in ((output.start_logits, start), (output.end_logits, end)):
        positions = positions.squeeze(-1) if positions.dim() > 1 else positions
        if positions.shape != logits.shape[:1] or positions.is_floating_point():
            raise ValueError(f"positions must be ({logits.shape[0]},) integers, got {_described(positions)}")
        settings = {"ignore_index": ignored, "class_weights": None, "num_labels": None}
        found.append(tokens(logits, positions.to(logits.device).clamp(0, ignored), config.with_settings(settings)))
    (first, one), (last, other) = found

    def compute() -> tuple[Tensor | None, Tensor | None]:
        parts = [(metrics.accuracy, metrics.z_loss) for metrics in (one, other)]
        accuracy, z_loss = (torch.stack(pair).mean() for pair in zip(*parts, strict=True))
        return accuracy, z_loss

    return (first + last) / 2, LossMetrics(weight_sum=one.weight_sum, compute=compute)


def of_model(model: PreTrainedModel, output: Any) -> tuple[Tensor, LossMetrics]:
    """The loss that a model computed itself."""
    loss = getattr(output, "loss", None)
    if loss is None:
        raise ValueError(f"{type(model).__name__} gave no loss of these inputs: it needs its labels, by its names")
    return loss, LossMetrics()


def routers_loss(
    model: PreTrainedModel, output: Any, batch: Mapping[str, Any], config: LossConfig, loss: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`loss` with the experts' load balancing loss, where the model gives one, and that by itself."""
    aux_loss = getattr(output, "aux_loss", None)
    settings = model.config.get_text_config()
    if loss is None:
        mask = batch.get("attention_mask")
        padding = mask if getattr(mask, "ndim", None) == 2 else None
        if not getattr(output, "router_logits", None):
            raise ValueError(f"{type(model).__name__} gives no router_logits")
        if "sp" in mesh_axis_sizes(mesh_of(model)):
            raise NotImplementedError("the routers' loss alone, over sp: a rank has its own tokens' router_logits")
        aux_loss = load_balancing_loss(output.router_logits, settings.num_experts_per_tok, padding)
    if not isinstance(aux_loss, Tensor):
        if config.router_aux_loss_coef is not None:
            raise ValueError(f"{type(model).__name__} computes no load balancing loss: leave router_aux_loss_coef out")
        assert loss is not None
        return loss, None
    coefficient = config.router_aux_loss_coef
    if coefficient is None:
        coefficient = getattr(model, "router_aux_loss_coef", getattr(settings, "router_aux_loss_coef", 0.0))
    part = coefficient * aux_loss
    if loss is None:
        return part, aux_loss
    if config.reduction == "none":
        raise ValueError('the load balancing loss is one number, and reduction="none" asks for one a token')
    return loss + part.to(loss.device), aux_loss


def _reduced(losses: Tensor, config: LossConfig) -> Tensor:
    if config.reduction == "none":
        return losses
    if config.num_items_in_batch is not None:
        return losses.sum() / config.num_items_in_batch
    return losses.sum() if config.reduction == "sum" else losses.mean()


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"
