"""The Pallas flash kernels in Pallas's interpreter against the definition; tests/tpu compiles them for real chips."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from easytorch.kernels.attention import native

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'easytorch[jax]'")

from easytorch.kernels.attention import pallas_flash  # noqa: E402
from easytorch.kernels.attention.call import AttentionCall, map_tensors  # noqa: E402
from easytorch.kernels.attention.contract import resolve  # noqa: E402
from easytorch.kernels.attention.pallas_tuning import BlockSizes  # noqa: E402
from easytorch.operations.dispatch.check import relative_rms_error  # noqa: E402

pytestmark = pytest.mark.jax_cpu


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_mask(*shape: int) -> torch.Tensor:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[..., 5, :] = False
    return mask


def documents(batch: int, length: int) -> torch.Tensor:
    return torch.arange(length).div(70, rounding_mode="floor").repeat(batch, 1)


# name -> (B, T, S, H, K, D, Dv) and the features; tiles are 128 x 128, so 200 is a whole tile and a part of one
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "causal": ((1, 200, 200, 6, 2, 60, 60), {"causal": True}),
    "window, more keys": ((1, 150, 400, 2, 1, 32, 36), {"sliding_window": (90, 20)}),
    "more queries": ((1, 300, 100, 2, 2, 32, 32), {"causal": True, "softcap": 2.0}),
    "one query": ((2, 1, 200, 4, 2, 32, 32), {"causal": True}),
    "mask and a bias that broadcasts": (
        (1, 200, 200, 4, 2, 32, 32),
        {"mask": random_mask(1, 1, 200, 200), "bias": randn(1, 4, 1, 200)},
    ),
    "everything": (
        (2, 150, 330, 4, 2, 32, 36),
        {
            "causal": True, "mask": random_mask(150, 330), "bias": randn(2, 1, 150, 330), "softcap": 4.0,
            "sinks": randn(4), "sliding_window": (200, None), "dropout_prob": 0.1, "seed": 2**31 + 5,
            "query_segment_ids": documents(2, 150), "key_segment_ids": documents(2, 330),
        },
    ),
}  # fmt: skip
HAS_EMPTY_ROWS = ("more queries", "mask and a bias that broadcasts")


def to_jax(x: torch.Tensor | None) -> Any:
    return None if x is None else jax.numpy.asarray(x.numpy())


def definition(tensors: dict[str, torch.Tensor], features: dict[str, Any], grad: torch.Tensor) -> list[torch.Tensor]:
    leaves = {name: x.double().requires_grad_() for name, x in tensors.items()}
    output = native.attention(**leaves, **features)[0]
    return [output.detach(), *torch.autograd.grad(output, list(leaves.values()), grad.double())]


@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for blocks in ("forward_blocks", "backward_blocks"):
        monkeypatch.setattr(pallas_flash, blocks, lambda *_: BlockSizes(128, 128))
    (b, t, s, h, k, d, dv), features = CASES[name]
    features = dict(features)
    tensors = {"query": randn(b, t, h, d), "key": randn(b, s, k, d, seed=1), "value": randn(b, s, k, dv, seed=2)}
    tensors |= {extra: features.pop(extra) for extra in ("bias", "sinks") if extra in features}
    grad = randn(b, t, h, dv, seed=9)
    expected = definition(tensors, features, grad)

    call = resolve(**tensors, **features)
    call = map_tensors(call, lambda name, x: to_jax((x & (2**32 - 1)).to(torch.uint32) if name == "seed" else x))
    given = (*(to_jax(tensors[x]) for x in ("query", "key", "value")), call)
    output, logsumexp = pallas_flash.flash_forward(*given, interpret=True)
    grads = pallas_flash.flash_backward(*given, output, logsumexp, to_jax(grad), interpret=True)
    for index, (got, want) in enumerate(zip([output, *(g for g in grads if g is not None)], expected, strict=True)):
        error = relative_rms_error(torch.tensor(got.__array__()), want)
        assert error < 1e-5, f"output or gradient {index}: relative RMS error {error:.1e}"
    if "sinks" not in tensors:  # a sink is seen by every row
        unseen = (expected[0] == 0).all(-1).transpose(1, 2)  # (B, H, T)
        assert torch.equal(torch.tensor((logsumexp[:, :, 1] == jax.numpy.inf).__array__()), unseen)
        assert unseen.any() == (name in HAS_EMPTY_ROWS)


def test_only_a_tpu_is_given_the_kernel() -> None:
    from easytorch.kernels.attention import pallas_or_jax
    from easytorch.kernels.interop.lowering import lower_for_export

    heads = jax.ShapeDtypeStruct((1, 128, 2, 32), jax.numpy.float32)
    traced = jax.jit(pallas_or_jax.flash_forward).trace(heads, heads, heads, AttentionCall())
    assert "tpu_custom_call" in lower_for_export(traced, "tpu").as_text()
    assert "tpu_custom_call" not in lower_for_export(traced, "cpu").as_text()
