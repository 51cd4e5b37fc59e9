"""Computations divided over a mesh: shardings and their errors, each device's part, what a compiled program sends."""

from __future__ import annotations

import numpy as np
import pytest

from easytorch import backends
from easytorch.backends.partitioning import Mesh, check_sharding, shard_shape, shard_slices
from easytorch.backends.shapes import Shape, make_shape

MESH = Mesh.of({"fsdp": 2, "tp": 2})
SHAPE = make_shape("float32", 4, 6)


def test_the_parts_of_an_array_make_it_up() -> None:
    whole = np.arange(24).reshape(4, 6)
    sharding = check_sharding((("tp", "fsdp"),), SHAPE, MESH, "x")
    assert sharding == (("tp", "fsdp"), None)
    assert shard_shape(SHAPE, sharding, MESH) == make_shape("float32", 1, 6)
    # devices are numbered fsdp first, and tp is the major axis here
    assert [whole[part][0, 0] // 6 for part in shard_slices(whole.shape, sharding, MESH)] == [0, 2, 1, 3]
    replicated = shard_slices(whole.shape, (None, "tp"), MESH)
    assert replicated[0] == replicated[2] != replicated[1]


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        (("dp",), "no axis 'dp'; its axes are fsdp, tp"),
        (("tp", "tp"), "names tp twice"),
        ((None, None, "tp"), "at most 2 entries"),
        ("tp", "not 'tp'"),
        ((None, ("fsdp", "tp")), "dimension 1 of .* 6, does not divide over the 4 devices of fsdp x tp"),
    ],
)
def test_a_sharding_that_does_not_fit_is_refused(sharding: object, message: str) -> None:
    with pytest.raises(backends.BackendError, match=message):
        check_sharding(sharding, SHAPE, MESH, "x")


@pytest.mark.parametrize("axes", [{}, {"tp": 0}, {"t p": 2}, {"tp": True}])
def test_a_mesh_that_is_none_is_refused(axes: dict[str, int]) -> None:
    with pytest.raises(backends.BackendError):
        Mesh.of(axes)


def test_backends_that_do_not_partition_say_so() -> None:
    for name in ("numpy", "torch"):
        builder = backends.new(name).builder("whole")
        with pytest.raises(backends.OpNotImplementedError, match="'xla' does"):
            builder.distributed_auto_sharding({"tp": 2})
        with pytest.raises(backends.BackendError, match="needs a mesh"):
            builder.parameter("x", SHAPE, ("tp",))
        x = builder.parameter("x", SHAPE)
        assert builder.barrier(x) == (x,)


def test_too_few_devices_say_what_to_set() -> None:
    pytest.importorskip("jax")
    builder = backends.new("xla:cpu").builder("wide")
    with pytest.raises(backends.BackendError, match="host_platform_device_count=4096"):
        builder.distributed_auto_sharding({"fsdp": 4096})
    builder.parameter("x", SHAPE)
    with pytest.raises(backends.BackendError, match="new builder"):
        builder.distributed_auto_sharding({"fsdp": 1})


def test_collectives_are_counted_by_kind_with_the_bytes_of_their_results() -> None:
    pytest.importorskip("jax")
    from easytorch.backends.xla.aot import count_collectives

    text = """
      %a = f32[2,3]{1,0} all-reduce(%x), to_apply=%add
      %b = (bf16[4]{0}, f32[2]{0}) all-reduce(%x, %y), to_apply=%add
      %c = (f32[2]{0}, f32[8]{0}, u32[], u32[]) all-gather-start(%x), dimensions={0}
      %d = f32[8]{0} all-gather-done(%c)
      %e = pred[8]{0} fusion(%d), calls=%all-to-all.clone
    """
    assert count_collectives(text) == {"all-reduce": (2, 24 + 8 + 8), "all-gather": (1, 32)}
    # of libtpu's: one that two fusions repeat, and a reduce-scatter
    text = """
%fused.1 (p: f32[2]) -> f32[8] {
  %a.1 = f32[8]{0} all-gather(%p), channel_id=3, dimensions={0}
}
%fused.2 (p: f32[2]) -> f32[8] {
  %a.2 = f32[8]{0} all-gather(%p), channel_id=3, dimensions={0}
}
%all-reduce-scatter.7 (p: f32[8]) -> f32[2] {
  %r = f32[8]{0} all-reduce(%p), channel_id=4, to_apply=%add
  ROOT %s = f32[2]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={2}
}
ENTRY %main (p: f32[2]) -> f32[4] {
  %b = f32[4]{0} all-reduce(%p), channel_id=5, to_apply=%add
}
"""
    assert count_collectives(text) == {"all-gather": (1, 32), "reduce-scatter": (1, 8), "all-reduce": (1, 16)}


def test_a_mesh_of_one_device_runs_as_a_plain_program() -> None:
    pytest.importorskip("jax")
    backend = backends.new("xla:cpu")
    builder = backend.builder("one")
    builder.distributed_auto_sharding({"tp": 1})
    x = builder.parameter("x", Shape(SHAPE.dtype, (4,)), ("tp",))
    (first,) = builder.barrier(builder.with_sharding(builder.add(x, x), ("tp",)))
    program = builder.compile(first, shardings=[("tp",)])
    (result,) = program.execute([backend.buffer_from_numpy(np.arange(4, dtype=np.float32))])
    assert backend.buffer_to_numpy(result).tolist() == [0.0, 2.0, 4.0, 6.0]
