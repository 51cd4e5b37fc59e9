"""`ring`: attention over a sequence that is sharded across a mesh axis (context parallelism)."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from easytorch.kernels.ring.layout import position_ids, zigzag_shard, zigzag_unshard
from easytorch.operations.attention_impl import AttentionFeatures, AttentionImpl
from easytorch.operations.base import backend
from easytorch.operations.impl import Choice, UnsupportedOperationError
from easytorch.operations.metadata import OperationMetadata
from easytorch.operations.output import AttentionOutput
from easytorch.operations.registry import OperationRegistry
from easytorch.operations.ring_mesh import Placement, placement_of, refusal

__all__ = ["RingAttention", "RingFeatures", "position_ids", "zigzag_shard", "zigzag_unshard"]


class RingFeatures(AttentionFeatures, total=False):
    """What every attention takes, and `layout`, which overrides `OperationMetadata.sequence_layout` for a call."""

    layout: str | None


@OperationRegistry.register
class RingAttention(AttentionImpl):
    """`attn(query, key, value, **features)` on each rank's shards: (B, T/n, H, D), (B, S/n, K, D), (B, S/n, K, Dv).

    The ranks are those of `OperationMetadata.mesh` along `sequence_axis`; without a mesh a process is a ring of one,
    and under a torch_xla mesh the tensors are the whole sequence, sharded over the axis. Every feature of the contract
    means what it means for the whole sequence; `mask` and `bias` are given for the rank's queries and all keys, the
    keys in order of position. All ranks make the same call, and run its backward. The gradients of `sinks` and of a
    `bias` that the ranks share are each rank's part of the sum, as those of any shared parameter are.
    """

    takes_seed = frozenset()  # each rank would draw a seed of its own, which only the call itself reconciles

    @classmethod
    def get_impl_name(cls) -> str:
        return "ring"

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        super().__init__(metadata)
        # found here, since a compiled call cannot ask a mesh; without a mesh the process group may not be there yet
        self._placement = None if self.metadata.mesh is None else placement_of(self.metadata)

    @property
    def placement(self) -> Placement | str:
        """The ring of this process, or why it has none."""
        return placement_of(self.metadata) if self._placement is None else self._placement

    def choose_on(self, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        reason = refusal(self.placement, platform)
        if reason is not None:  # not even the definition could reach the other ranks
            raise UnsupportedOperationError(f"ring: {reason}")
        return super().choose_on(platform, args, kwargs)

    def refusal(
        self, backend: str, query: Tensor, key: Tensor, value: Tensor, features: AttentionFeatures
    ) -> str | None:
        dropout_prob = features.get("dropout_prob", 0.0)
        if backend == "triton":
            from easytorch.kernels.ring import triton_blocks

            return triton_blocks.supports(query, key, value, dropout_prob=dropout_prob)
        from easytorch.kernels.ring import aten_blocks

        return aten_blocks.supports(
            query, value, dense=features.get("mask") is not None or features.get("bias") is not None,
            segments=features.get("query_segment_ids") is not None, softcap=features.get("softcap"),
            dropout_prob=dropout_prob,
        )  # fmt: skip

    def forward_native(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[RingFeatures]
    ) -> AttentionOutput:
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

    def _run(self, kernel: str, query: Tensor, key: Tensor, value: Tensor, features: Any) -> AttentionOutput:
        from easytorch.kernels.ring import ring_op

        placement = self.placement
        if isinstance(placement, str):
            raise ValueError(f"ring: {placement}")
        layout = features.pop("layout", None) or self.metadata.sequence_layout
        query, key, value, settled = self.prepare(query, key, value, features)
        output = ring_op.attention(
            query, key, value, group=placement.group, size=placement.size, kernel=kernel, layout=layout, **settled
        )
        return AttentionOutput(attention_outputs=output)
