"""Batch normalization, and composite operations, which a backend may implement directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from easytorch.backends.arguments import integer, integers, real, truth
from easytorch.backends.builder_ops.recorder import Recorder
from easytorch.backends.types import OpType

if TYPE_CHECKING:
    from easytorch.backends.graph import Op


class NormalizationOps(Recorder):
    """Operations that a backend does not implement are decomposed (`backends.composites`)."""

    def batch_norm_for_inference(
        self, operand: Op, scale: Op, offset: Op, mean: Op, variance: Op, epsilon: float, axis: int
    ) -> Op:
        """(operand - mean) / sqrt(variance + epsilon) * scale + offset along `axis` (Ioffe and Szegedy 2015)."""
        return self._add_one(
            OpType.BATCH_NORM_FOR_INFERENCE,
            operand,
            scale,
            offset,
            mean,
            variance,
            epsilon=real(epsilon, "epsilon"),
            axis=integer(axis, "axis"),
        )

    def batch_norm_for_training(
        self, operand: Op, scale: Op, offset: Op, epsilon: float, axis: int
    ) -> tuple[Op, Op, Op]:
        """The same by the batch's own mean and (biased) variance: normalized, mean, variance."""
        normalized, mean, variance = self._add(
            OpType.BATCH_NORM_FOR_TRAINING,
            operand,
            scale,
            offset,
            epsilon=real(epsilon, "epsilon"),
            axis=integer(axis, "axis"),
        )
        return normalized, mean, variance

    def batch_norm_gradient(
        self, operand: Op, scale: Op, mean: Op, variance: Op, grad_output: Op, epsilon: float, axis: int
    ) -> tuple[Op, Op, Op]:
        """The gradients of `batch_norm_for_training` with respect to operand, scale and offset."""
        grad_operand, grad_scale, grad_offset = self._add(
            OpType.BATCH_NORM_GRADIENT,
            operand,
            scale,
            mean,
            variance,
            grad_output,
            epsilon=real(epsilon, "epsilon"),
            axis=integer(axis, "axis"),
        )
        return grad_operand, grad_scale, grad_offset

    def softmax(self, x: Op, axis: int) -> Op:
        """exp(x) divided by its sum along `axis`, computed without overflow."""
        return self._add_one(OpType.SOFTMAX, x, axis=integer(axis, "axis"))

    def layer_norm(self, x: Op, scale: Op, offset: Op, axes: Sequence[int], epsilon: float) -> Op:
        """x minus its mean, divided by its deviation over `axes`, times scale plus offset, which have those axes."""
        return self._add_one(
            OpType.LAYER_NORM, x, scale, offset, axes=integers(axes, "axes"), epsilon=real(epsilon, "epsilon")
        )

    def gelu(self, x: Op, approximate: bool = False) -> Op:
        """x times the normal distribution function of x, exactly by erf or approximately by tanh."""
        return self._add_one(OpType.GELU, x, approximate=truth(approximate, "approximate"))

    def scaled_dot_product_attention(
        self,
        query: Op,
        key: Op,
        value: Op,
        mask: Op | None = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Op:
        """softmax(query key^T * scale) value, as torch.nn.functional's of that name.

        query (B, H, T, D), key (B, K, S, D), value (B, K, S, Dv), H a multiple of K, scale D**-0.5 if None. mask: bool,
        True attends, or of query's dtype, added; broadcastable to (B, H, T, S). is_causal is aligned to the first
        query and key. A row with nothing to attend gives zeros.
        """
        operands = (query, key, value) if mask is None else (query, key, value, mask)
        return self._add_one(
            OpType.SCALED_DOT_PRODUCT_ATTENTION,
            *operands,
            is_causal=truth(is_causal, "is_causal"),
            scale=None if scale is None else real(scale, "scale"),
        )
