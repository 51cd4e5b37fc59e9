"""`ring`: attention over a sequence that is sharded across a mesh axis (context parallelism)."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from easytorch.distributed.mesh import mesh_axis_sizes
from easytorch.kernels.attention import native
from easytorch.kernels.interop.torch_func import REFUSAL, transforming
from easytorch.kernels.ring.layout import chunks_of, position_ids, zigzag_shard, zigzag_unshard
from easytorch.operations.attention.impl import AttentionFeatures, AttentionImpl, without_float64, xla_refusal
from easytorch.operations.attention.ring_mesh import Placement, placement_of, refusal
from easytorch.operations.dispatch.base import backend
from easytorch.operations.dispatch.impl import Choice, UnsupportedOperationError
from easytorch.operations.dispatch.metadata import OperationMetadata
from easytorch.operations.dispatch.output import AttentionOutput
from easytorch.operations.dispatch.registry import OperationRegistry

__all__ = ["RingAttention", "RingFeatures", "position_ids", "zigzag_shard", "zigzag_unshard"]


class RingFeatures(AttentionFeatures, total=False):
    """The features of every attention, and `layout`, which overrides `OperationMetadata.sequence_layout` for a call."""

    layout: str | None


@OperationRegistry.register
class RingAttention(AttentionImpl):
    """`attn(query, key, value, **features)` on each rank's shards: (B, T/n, H, D), (B, S/n, K, D), (B, S/n, K, Dv).

    The ranks are those of `OperationMetadata.mesh` along `sequence_axis`; without a mesh each process is a ring of one,
    and under a torch_xla mesh the tensors are the whole sequence, sharded over the axis. Every feature of the contract
    keeps its meaning over the whole sequence; `mask` and `bias` cover the rank's queries and all keys, the keys in
    order of position. All ranks make the same call, and run its backward. The gradients of `sinks` and of a
    `bias` that the ranks share are each rank's part of the sum, as those of any shared parameter are.
    """

    settings: ClassVar[tuple[str, ...]] = ("sequence_axis", "sequence_layout")
    takes_seed = frozenset()  # each rank would draw its own seed; only the call itself makes them agree

    @classmethod
    def get_impl_name(cls) -> str:
        return "ring"

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        super().__init__(metadata)
        # looked up here, since a compiled call cannot query a mesh; without one the process group may not exist yet
        self._placement = None if self.metadata.mesh is None else placement_of(self.metadata)

    @property
    def placement(self) -> Placement | str:
        """The ring of this process, or why it has none."""
        return placement_of(self.metadata) if self._placement is None else self._placement

    def choose_on(self, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        reason = refusal(self.placement, platform)
        if reason is not None:  # not even the definition could reach the other ranks
            raise UnsupportedOperationError(f"ring: {reason}")
        if transforming() and self._ring().group:
            raise UnsupportedOperationError(
                "ring: torch.func cannot transform what ranks send to one another; use autograd's own backward, or "
                "`attention` over the whole sequence"
            )
        return super().choose_on(platform, args, kwargs)

    def supports_features(self, backend: str, query: Tensor, key: Tensor, value: Tensor, features: Any) -> str | None:
        if backend == "native" and not self._sees_all(query):  # ranks accumulate partial results in their own dtype
            # the blockwise computation is not the definition's, and carries only the features it lists
            if (reason := self.beyond_common(backend, features)) is not None:
                return reason
            return self.metadata.softmax_refusal(query.dtype)
        return super().supports_features(backend, query, key, value, features)

    def refusal(
        self, backend: str, query: Tensor, key: Tensor, value: Tensor, features: AttentionFeatures
    ) -> str | None:
        if transforming():
            return REFUSAL
        if backend == "xla":
            return self._xla_refusal(query, key, features)
        if backend == "triton":
            from easytorch.kernels.ring import triton_blocks

            return triton_blocks.supports(query, key, value, features)
        from easytorch.kernels.ring import aten_blocks

        return aten_blocks.supports(query, key, value, features)

    def _xla_refusal(self, query: Tensor, key: Tensor, features: Any) -> str | None:
        if (reason := xla_refusal(query.dtype)) is not None:
            return reason
        placement = self.placement
        if isinstance(placement, str) or placement.axis is None:
            return None
        if features.get("mask") is not None or features.get("bias") is not None:
            return "the ring in XLA takes no mask and no bias: their columns would be redistributed at each step"
        if features.get("dropout_prob", 0.0) > 0.0:
            return "the ring in XLA has no dropout"
        count = placement.size * len(chunks_of(self._layout(features), 0, placement.size))
        if query.shape[1] % count or key.shape[1] % count:
            return f"{query.shape[1]} queries and {key.shape[1]} keys cannot be cut into {count} equal chunks"
        ids = [int(device) for device in self.metadata.mesh.device_ids]
        if ids != list(range(len(ids))):
            return f"the ring in XLA takes the devices of the mesh in order, got {ids}"
        return None

    def forward_native(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[RingFeatures]
    ) -> AttentionOutput:
        if self._sees_all(query):
            return self._whole(query, key, value, features)
        return self._run("native", query, key, value, features)

    @backend("aten")
    def forward_cpu(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[RingFeatures]
    ) -> AttentionOutput:
        return self._run("aten", query, key, value, features)

    @backend("triton")
    def forward_gpu(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[RingFeatures]
    ) -> AttentionOutput:
        return self._run("triton", query, key, value, features)

    @backend("xla")
    def forward_tpu(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[RingFeatures]
    ) -> AttentionOutput:
        placement = self._ring()
        layout = self._layout(features)
        query, key, value, settled = self.prepare(query, key, value, without_float64(_plain(features)))
        if placement.axis is None:
            from easytorch.kernels.attention import torch_xla_op

            return AttentionOutput(attention_outputs=torch_xla_op.attention(query, key, value, **settled))
        from easytorch.kernels.ring import torch_xla_op as sharded_op

        output = sharded_op.attention(
            query, key, value, axes=mesh_axis_sizes(self.metadata.mesh), axis=placement.axis, layout=layout, **settled
        )
        return AttentionOutput(attention_outputs=output)

    def _run(self, kernel: str, query: Tensor, key: Tensor, value: Tensor, features: Any) -> AttentionOutput:
        from easytorch.kernels.ring import operators

        placement, layout = self._ring(), self._layout(features)
        query, key, value, settled = self.prepare(query, key, value, _plain(features))
        output = operators.attention(
            query, key, value, group=placement.group, size=placement.size, kernel=kernel, layout=layout, **settled
        )
        return AttentionOutput(attention_outputs=output)

    def _whole(self, query: Tensor, key: Tensor, value: Tensor, features: Any) -> AttentionOutput:
        """The definition on the whole sequence in order of position; XLA decides how to partition it."""
        size = self._ring().size
        layout = self._layout(features) if size > 1 else "contiguous"  # one rank's chunks are in order already
        query, key, value, settled = self.prepare(query, key, value, _plain(features))
        places = [
            torch.cat([position_ids(x.shape[1] // size, rank, size, layout, x.device) for rank in range(size)])
            for x in (query, key)
        ]
        rows, columns = (place.argsort() for place in places)
        ordered: Any = dict(settled)
        for name, order in (("query_segment_ids", rows), ("key_segment_ids", columns)):
            if ordered.get(name) is not None:
                ordered[name] = ordered[name][:, order]
        for name in ("mask", "bias"):
            matrix = ordered.get(name)
            if matrix is not None and matrix.dim() > 1 and matrix.shape[-2] != 1:
                ordered[name] = matrix[..., rows, :]
        ordered["softmax_dtype"] = self.metadata.runtime_softmax_dtype
        output, _ = native.attention(query[:, rows], key[:, columns], value[:, columns], **ordered)
        return AttentionOutput(attention_outputs=output[:, places[0]])

    def _sees_all(self, query: Tensor) -> bool:
        """Whether this process holds the whole sequence, not one rank's shard of it."""
        return query.device.type == "xla" or transforming()

    def _ring(self) -> Placement:
        placement = self.placement
        if isinstance(placement, str):
            raise ValueError(f"ring: {placement}")
        return placement

    def _layout(self, features: Any) -> str:
        return features.get("layout") or self.metadata.sequence_layout


def _plain(features: Any) -> AttentionFeatures:
    """The features without the layout."""
    return {name: value for name, value in features.items() if name != "layout"}  # type: ignore[return-value]
