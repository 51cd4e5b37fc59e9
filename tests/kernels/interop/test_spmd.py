"""Which axes shard a kernel's arrays, and what the text of a compiled program says of its collectives."""

from __future__ import annotations

import pytest

from easytorch.kernels.interop.spmd import BATCH_AXES, HEAD_AXES, dividing

TEXT = """\
HloModule step

%all-reduce-scatter.1 (input: bf16[8,16]) -> bf16[4,16] {
  %all-reduce.3 = bf16[8,16]{1,0:T(8,128)} all-reduce(%input), channel_id=3, to_apply=%add
}

%fused.1 (p: bf16[4,16]) -> bf16[8,16] {
  ROOT %all-gather.2 = bf16[8,16]{1,0} all-gather(%p), channel_id=2, dimensions={0}
}

ENTRY %main (p: f32[4,2]) -> f32[8,2] {
  %all-gather.1 = bf16[8,16]{1,0} all-gather(%p), channel_id=2, dimensions={0}
  %all-gather.4 = f32[8,2]{1,0} all-gather(%p), channel_id=5, dimensions={0}
  %all-reduce.1 = (f32[], pred[3]) all-reduce(%a, %b), channel_id=4, to_apply=%add
  %permute = (f32[2], f32[2], u32[]) collective-permute-start(%p), channel_id=6
}
"""


def test_axes_that_divide():
    axes = {"dp": 2, "fsdp": 4, "tp": 2}
    assert dividing(axes, BATCH_AXES, 8) == ("dp", "fsdp")
    assert dividing(axes, BATCH_AXES, 6) == ("dp",)
    assert dividing(axes, BATCH_AXES, 3) == ()
    assert dividing(axes, HEAD_AXES, 4, 2) == ("tp",)
    assert dividing(axes, HEAD_AXES, 4, 1) == ()


def test_collectives_count_once():
    pytest.importorskip("jax")
    from easytorch.kernels.interop.tpu_compile_hlo import Traffic, collectives_in

    assert collectives_in(TEXT) == {
        "reduce-scatter": Traffic(1, 8 * 16 * 2),
        "all-gather": Traffic(2, 8 * 16 * 2 + 8 * 2 * 4),
        "all-reduce": Traffic(1, 4 + 3),
        "collective-permute": Traffic(1, 2 * 4 + 2 * 4 + 4),
    }
