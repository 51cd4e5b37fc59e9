"""Cross entropy per token, from logits or from the hidden states before a head, with the options of a training loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from easytorch.kernels.cross_entropy.fused_linear import default_chunk_size
from easytorch.kernels.cross_entropy.native import check_arguments
from easytorch.layers.causal_loss import fused_linear_cross_entropy
from easytorch.layers.vocabulary_parallel import product, vocabulary_parallel_cross_entropy
from easytorch.operations import OperationRegistry

_CROSS_ENTROPY = OperationRegistry.create("cross_entropy")


@dataclass(frozen=True)
class HeadProduct:
    """Logits that are not computed yet: softcap(factor * (hidden (..., D) @ weight (V, D).T + bias (V,))).

    weight and bias may be DTensors, sharded by V.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    factor: float = 1.0
    softcap: float | None = None

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]

    def rows(self, part: slice = slice(None)) -> HeadProduct:
        """The same of some rows of hidden, flattened to (N, D)."""
        return HeadProduct(self.hidden.reshape(-1, self.hidden.shape[-1])[part], *self._settings())

    def detached(self) -> HeadProduct:
        """The same without gradients."""
        bias = None if self.bias is None else self.bias.detach()
        return HeadProduct(self.hidden.detach(), self.weight.detach(), bias, self.factor, self.softcap)

    def to(self, dtype: torch.dtype) -> HeadProduct:
        """The same product, computed in `dtype`."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return HeadProduct(self.hidden.to(dtype), self.weight.to(dtype), bias, self.factor, self.softcap)

    def materialize(self) -> Tensor:
        """The logits (..., V)."""
        return finished(product(self.hidden, self.weight, self.bias), self.factor, self.softcap)

    def scaled(self) -> tuple[Tensor, Tensor | None]:
        """Hidden states and bias multiplied by the factor."""
        if self.factor == 1.0:
            return self.hidden, self.bias
        return self.hidden * self.factor, None if self.bias is None else self.bias * self.factor

    def _settings(self) -> tuple[Tensor, Tensor | None, float, float | None]:
        return self.weight, self.bias, self.factor, self.softcap


def finished(logits: Tensor, factor: float, softcap: float | None) -> Tensor:
    """softcap * tanh(factor * logits / softcap), or factor * logits where there is no cap."""
    scaled = logits if factor == 1.0 else logits * factor
    return scaled if softcap is None else softcap * torch.tanh(scaled / softcap)


@dataclass(frozen=True, kw_only=True)
class TokenLossOptions:
    """The settings of a loss.

    class_weights (V,): of each label, as torch's `weight`. z_loss: how much a row's squared logsumexp counts.
    chunk_size: rows whose logits are materialized at once; None chooses.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    class_weights: Tensor | None = None
    chunk_size: int | None = None


def token_losses(
    source: Tensor | HeadProduct, labels: Tensor, options: TokenLossOptions, *, reduction: str = "none"
) -> Tensor:
    """logits (N, V), computed or not, and labels (N,) -> the losses (N,), or their sum.

    torch's `cross_entropy` with `weight` and `label_smoothing`, not divided by anything, and
    z_loss * logsumexp^2 of each row, times the weight of its label. Ignored rows have loss 0. Computed in float32.
    """
    weights = options.class_weights
    if weights is not None and options.label_smoothing:
        losses = _weighted_and_smoothed(source, labels, options)
        return losses if reduction == "none" else losses.sum()
    settings = {
        "ignore_index": options.ignore_index,
        "label_smoothing": options.label_smoothing,
        "z_loss": options.z_loss,
        "reduction": reduction if weights is None else "none",
    }
    if isinstance(source, HeadProduct):
        hidden, bias = source.scaled()
        sharded = hasattr(source.weight, "device_mesh")
        loss = vocabulary_parallel_cross_entropy if sharded else fused_linear_cross_entropy
        losses = loss(
            hidden, source.weight, labels, bias, softcap=source.softcap, chunk_size=options.chunk_size, **settings
        )
    else:
        losses = _CROSS_ENTROPY(source, labels, **settings)
    if weights is None:
        return losses
    losses = losses * label_weights(labels, options)
    return losses if reduction == "none" else losses.sum()


def check_labels(labels: Tensor, vocabulary: int, options: TokenLossOptions) -> None:
    """An error for labels that are no classes of `vocabulary`, nor ignored; before anything is indexed by them."""
    shape = (*labels.shape, vocabulary)
    check_arguments(shape, labels, options.label_smoothing, None, options.z_loss, "sum", options.ignore_index)


def label_weights(labels: Tensor, options: TokenLossOptions) -> Tensor:
    """labels of any shape -> the weight of each: 0 where it is ignored, else its class's weight, or 1."""
    counted = labels != options.ignore_index
    if options.class_weights is None:
        return counted.to(torch.float32)
    weights = options.class_weights.to(labels.device, torch.float32)
    return weights[torch.where(counted, labels, 0)] * counted


@torch.no_grad()
def correct_and_logsumexp(source: Tensor | HeadProduct, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) each: whether the largest logit is the label's, and the logsumexp; a chunk of logits at a time."""
    correct, normalizers = [], []
    product = source.rows() if isinstance(source, HeadProduct) else None
    size = max(1, len(labels)) if product is None else default_chunk_size(product.vocabulary, labels.device)
    for start in range(0, len(labels), size):
        part = slice(start, start + size)
        logits = (source[part] if isinstance(source, Tensor) else source.rows(part).materialize()).float()
        correct.append(logits.argmax(-1) == labels[part])
        normalizers.append(logits.logsumexp(-1))
    if not correct:
        return labels.new_empty(0, dtype=torch.bool), labels.new_empty(0, dtype=torch.float32)
    return torch.cat(correct), torch.cat(normalizers)


def _weighted_and_smoothed(source: Tensor | HeadProduct, labels: Tensor, options: TokenLossOptions) -> Tensor:
    """Smoothing under class weights needs the weighted sum of a row's logits, which the operation does not give."""
    if isinstance(source, Tensor):
        return _losses_of_logits(source, labels, options)
    size = options.chunk_size or default_chunk_size(source.vocabulary, labels.device)
    rows = source.hidden.reshape(-1, source.hidden.shape[-1])
    losses = []
    for start in range(0, max(len(rows), 1), size):
        part = slice(start, start + size)

        def of_chunk(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: Tensor) -> Tensor:
            logits = HeadProduct(hidden, weight, bias, source.factor, source.softcap).materialize()
            return _losses_of_logits(logits, chunk, options)

        inputs = (rows[part], source.weight, source.bias, labels[part])
        # the backward pass computes the chunk's logits again, so that they are never all in memory
        losses.append(checkpoint(of_chunk, *inputs, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(losses)


def _losses_of_logits(logits: Tensor, labels: Tensor, options: TokenLossOptions) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    assert options.class_weights is not None
    weights = options.class_weights.to(wide.device, wide.dtype)
    losses = F.cross_entropy(
        wide,
        labels.long(),
        weight=weights,
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
        reduction="none",
    )
    if options.z_loss:
        losses = losses + options.z_loss * wide.logsumexp(-1).square() * label_weights(labels, options).to(wide.dtype)
    return losses
