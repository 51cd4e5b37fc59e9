"""multi_latent_attention: both plans against the float64 definition, and the definition against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from easytorch.kernels.multi_latent import absorbed
from easytorch.kernels.multi_latent.contract import LatentDims, absorbs
from easytorch.operations import OperationImpl, OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error

NAMES = ("query", "query_rope", "latent", "key_rope", "up_key", "up_value")
# T, S: the expanded plan, the absorbed one, one token, and rows that see nothing
SHAPES = {"expanded": (63, 63), "absorbed": (2, 63), "one_token": (1, 63), "more_queries": (63, 20)}


def operation(backend: str | None = None, **metadata: Any) -> OperationImpl:
    return OperationRegistry.create("mla", OperationMetadata(backend=backend, **metadata))


def make(length: int, keys: int, *, absent: str = "", heads: int = 6) -> dict[str, torch.Tensor]:
    """L 36, R 10, Dn 30, Dv 20; without up_key the query is as wide as the latent."""
    dim = 36 if "up_key" in absent else 30
    shapes = ((2, length, heads, dim), (2, length, heads, 10), (2, keys, 36), (2, keys, 10), (heads, 30, 36))
    tensors = dict(zip(NAMES, map(torch.randn, (*shapes, (heads, 20, 36))), strict=True))
    return {name: tensor for name, tensor in tensors.items() if name not in absent}


def features_of(name: str, length: int, keys: int) -> dict[str, Any]:
    def segments(size: int) -> torch.Tensor:
        return torch.arange(size).div(20, rounding_mode="floor").repeat(2, 1)

    mask = torch.rand(2, 6, length, keys) > 0.4
    mask[0, 1] = False
    return {
        "plain": {}, "causal": {"causal": True}, "mask": {"mask": mask}, "softcap": {"softcap": 1.5},
        "bias": {"bias": torch.randn(1, 6, length, keys)}, "window": {"sliding_window": 7, "causal": True},
        "segments": {"query_segment_ids": segments(length), "key_segment_ids": segments(keys)},
        "sinks": {"sinks": torch.randn(6), "causal": True}, "scale": {"softmax_scale": 0.4},
        "dropout": {"dropout_prob": 0.25, "seed": 7},
    }[name]  # fmt: skip


FEATURES = ("plain", "causal", "mask", "softcap", "bias", "window", "segments", "sinks", "scale", "dropout")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def results(
    run: OperationImpl, tensors: dict[str, Any], features: dict[str, Any], rounded: torch.dtype, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    leaves = {**tensors, **{name: features[name] for name in ("bias", "sinks") if name in features}}
    leaves = {name: x.to(rounded).to(dtype).requires_grad_() for name, x in leaves.items()}
    output = run(**{**features, **leaves}).attention_outputs
    assert output.dtype == dtype
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(rounded).to(dtype)
    gradients = torch.autograd.grad(output, list(leaves.values()), grad)
    return {"output": output, **{f"gradient of {n}": g for n, g in zip(leaves, gradients, strict=True)}}


def check(tensors: dict[str, Any], features: dict[str, Any], dtype: torch.dtype, backend: str | None = "aten") -> None:
    got = results(operation(backend), tensors, features, dtype, dtype)
    expected = results(operation("native"), tensors, features, dtype, torch.float64)
    for name, want in expected.items():
        # in half precision a gradient passes two roundings
        allowed = TOLERANCE[dtype] * (2 if name != "output" and dtype.itemsize == 2 else 1)
        assert got[name].isfinite().all()
        error = relative_rms_error(got[name], want)
        assert error <= allowed, f"{name}: relative RMS error {error:.2e}"


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_definition(shape: str, features: str) -> None:
    check(make(*SHAPES[shape]), features_of(features, *SHAPES[shape]), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_half_precision(shape: str, dtype: torch.dtype) -> None:
    check(make(*SHAPES[shape]), {"causal": True}, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_token_over_a_long_cache(dtype: torch.dtype) -> None:
    """Long enough that bfloat16 is multiplied as it is, and float16 is widened a sequence at a time."""
    tensors = make(1, 8000)
    assert tensors["latent"].numel() > max(absorbed.NARROW_PRODUCTS, absorbed.WIDENED_AT_ONCE)
    tensors["up_key"] /= 30**0.5  # as in a model: such scores are what bfloat16 can round
    check(tensors, {"causal": True}, dtype)


@pytest.mark.parametrize("features", FEATURES)
def test_many_tokens_without_up_value_take_tiles(features: str) -> None:
    assert absorbed.FLASH_ROWS <= 80
    check(make(80, 90, absent="up_value"), features_of(features, 80, 90), torch.float32)


def test_few_tokens_in_bfloat16_take_tiles() -> None:
    tensors = make(3, 600)
    assert absorbed.FLASH_SCORES < 2 * 6 * 3 * 600
    tensors["up_key"] /= 30**0.5
    check(tensors, {"causal": True}, torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES)
def test_autocast(shape: str) -> None:
    tensors = make(*SHAPES[shape])
    tensors["up_key"] /= 30**0.5
    expected = operation("native")(**tensors).attention_outputs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = operation("aten")(**tensors).attention_outputs
    assert 1e-5 < relative_rms_error(output.float(), expected) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("shape", ["one_token", "absorbed"])
def test_func_grad_of_the_absorbed_plan(shape: str) -> None:
    tensors = make(*SHAPES[shape])

    def loss(latent: torch.Tensor) -> torch.Tensor:
        return operation("aten")(**{**tensors, "latent": latent}, causal=True).attention_outputs.square().mean()

    leaf = tensors["latent"].clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    assert relative_rms_error(torch.func.grad(loss)(tensors["latent"]), expected) < 1e-5


@pytest.mark.parametrize("absent", ["up_key", "up_value", "up_key up_value"])
@pytest.mark.parametrize("shape", ["expanded", "one_token"])
def test_without_projections(shape: str, absent: str) -> None:
    tensors = make(*SHAPES[shape], absent=absent)
    check(tensors, {"causal": True}, torch.float32)
    width = 36 if "up_value" in absent else 20
    assert operation()(**tensors).attention_outputs.shape == (2, SHAPES[shape][0], 6, width)


def test_absorbing_up_key_changes_nothing_but_the_default_scale() -> None:
    tensors = make(3, 20)
    expected = operation()(**tensors).attention_outputs
    up_key = tensors.pop("up_key")
    tensors["query"] = torch.einsum("bthd,hdl->bthl", tensors["query"], up_key)
    torch.testing.assert_close(operation()(**tensors, softmax_scale=40**-0.5).attention_outputs, expected)


def test_the_plan_follows_the_shape() -> None:
    deepseek = LatentDims(128, 128, 64, 512, 128)
    assert absorbs(deepseek, 1, 4096, True, True)
    assert not absorbs(deepseek, 4096, 4096, True, True)
    assert absorbs(deepseek, 4096, 4096, False, True)
    small = LatentDims(6, 30, 10, 36, 20)
    assert [absorbs(small, *SHAPES[name], True, True) for name in ("expanded", "absorbed", "one_token")] == [
        False, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("length", [1, 9])
def test_equals_deepseek_of_transformers(length: int) -> None:
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = deepseek.DeepseekV3Config(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=36,
        qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, attn_implementation="eager",
    )  # fmt: skip
    module = deepseek.DeepseekV3Attention(config, 0).double()
    torch.nn.init.normal_(module.kv_b_proj.weight)
    hidden = torch.randn(2, 9, 48, dtype=torch.float64)
    rotary = deepseek.DeepseekV3RotaryEmbedding(config)
    cos, sin = (x.double() for x in rotary(hidden, torch.arange(9)[None]))
    causal = torch.full((9, 9), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    expected, _ = module(hidden, (cos, sin), causal)

    query = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden))).view(2, 9, 4, 20)
    latent, key_rope = module.kv_a_proj_with_mqa(hidden).split([36, 8], dim=-1)
    nope, rope = query.split([12, 8], dim=-1)
    rotate = deepseek.apply_rotary_pos_emb_interleave
    rope, key_rope = rotate(rope.transpose(1, 2), key_rope[:, None], cos, sin)
    up_key, up_value = module.kv_b_proj.weight.view(4, 22, 36).split([12, 10], dim=1)
    for backend in ("native", "aten"):
        output = operation(backend)(
            nope[:, -length:], rope.transpose(1, 2)[:, -length:], module.kv_a_layernorm(latent), key_rope[:, 0],
            up_key, up_value, causal=True, softmax_scale=module.scaling,
        ).attention_outputs  # fmt: skip
        # its softmax is float32
        torch.testing.assert_close(module.o_proj(output.flatten(2)), expected[:, -length:], rtol=1e-4, atol=1e-5)


def test_nothing_to_see_gives_zeros() -> None:
    for length in (1, 3, 40):
        tensors = make(length, 20)
        mask = torch.zeros(1, dtype=torch.bool)
        assert (operation()(**tensors, mask=mask).attention_outputs == 0).all()
        tensors |= {name: tensors[name][:, :0] for name in ("latent", "key_rope")}
        assert (operation()(**tensors).attention_outputs == 0).all()


def test_metadata() -> None:
    tensors = make(2, 20)
    expected = operation("native")(**{n: x.double() for n, x in tensors.items()}, softmax_scale=0.3).attention_outputs
    output = operation(softmax_scale=0.3, runtime_dtype=torch.float64)(**tensors).attention_outputs
    assert relative_rms_error(output, expected) < 1e-12
    assert operation(runtime_softmax_dtype=torch.float64).choose(**tensors).backend == "native"
    dropped = operation(dropout_prob=0.5)
    torch.testing.assert_close(
        dropped(**tensors, seed=3).attention_outputs, operation()(**tensors, dropout_prob=0.5, seed=3).attention_outputs
    )


BROKEN = {
    "query_rope": (torch.zeros(2, 3, 5, 10), "agree in all but the last"),
    "key_rope": (torch.zeros(2, 21, 10), "latent and key_rope must agree"),
    "latent": (torch.zeros(3, 20, 36), r"latent \(B, S, L\)"),
    "up_key": (torch.zeros(6, 30, 35), r"up_key must be \(H, Dn, L\) = \(6, 30, 36\)"),
    "up_value": (torch.zeros(5, 20, 36), r"up_value must be \(H, Dv, L\)"),
    "query": (torch.zeros(2, 3, 6, 30, dtype=torch.float64), "one dtype"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("backend", ["native", "aten"])
def test_what_does_not_fit_is_a_value_error(backend: str, name: str) -> None:
    wrong, message = BROKEN[name]
    with pytest.raises(ValueError, match=message):
        operation(backend)(**{**make(3, 20), name: wrong})
    with pytest.raises(ValueError, match="as wide as the latent"):
        operation(backend)(**{**make(3, 20), "up_key": None})


def test_choices_on_a_gpu() -> None:
    decode, _ = OperationRegistry.get("mla").typical_call()
    assert operation().choose_on("cuda", decode, {}).backend == "triton"
    # what the kernel lacks is expanded, and what cannot be expanded falls back
    mask = {"mask": torch.empty(1, dtype=torch.bool, device="meta")}
    assert operation().choose_on("cuda", decode, mask).backend == "triton"
    held = (torch.empty(8, 1, 128, 512, dtype=torch.bfloat16, device="meta"), *decode[1:4])
    assert operation().choose_on("cuda", held, {}).backend == "triton"
    assert "takes no mask" in operation().choose_on("cuda", held, mask).reason
    with pytest.raises(UnsupportedOperationError, match="takes no mask"):
        operation("triton").choose_on("cuda", held, mask)


@pytest.mark.parametrize("length", [1, 20])
def test_in_a_graph_vmap_and_checkpointing(length: int) -> None:
    tensors, run = make(length, 20), operation()

    def step(*given: torch.Tensor) -> torch.Tensor:
        return run(*given, causal=True).attention_outputs * 2

    given = tuple(tensors.values())
    expected = step(*given)
    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(*given), expected)

    class Module(torch.nn.Module):
        forward = staticmethod(step)

    exported = torch.export.export(Module(), given).module()  # takes the plan for any length: other sums
    assert relative_rms_error(exported(*given), expected) <= TOLERANCE[torch.float32]
    singles = tuple(x[:, None] for x in given[:4])
    mapped = torch.func.vmap(step, in_dims=(0, 0, 0, 0, None, None))(*singles, *given[4:])
    assert relative_rms_error(mapped[:, 0], expected) <= TOLERANCE[torch.float32]
    leaf = given[2].clone().requires_grad_()
    loss = torch.utils.checkpoint.checkpoint(step, *given[:2], leaf, *given[3:], use_reentrant=False).sum()
    got = torch.autograd.grad(loss, leaf)[0]
    want = torch.func.grad(lambda latent: step(*given[:2], latent, *given[3:]).sum())(given[2])
    assert relative_rms_error(got, want) <= TOLERANCE[torch.float32]


def test_differential_mode(compared: list[str]) -> None:
    for length in (1, 20):
        operation()(**make(length, 20), causal=True)
    ours = [one for one in compared if one.startswith("multi_latent_attention:")]
    assert len(ours) == 2  # beside those of the attention it is expanded to


@pytest.mark.parametrize("keys", [40, 300, 2000])  # widened, and either side of what is multiplied as it is
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("spread", [1.0, 6.0, 12.0, 25.0])
def test_bfloat16_scores_of_any_size(spread: float, length: int, keys: int) -> None:
    """They are not rounded to bfloat16 before the softmax, which at 12 would be an error of 2e-2."""
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    query, query_rope = (randn(2, length, 8, width).mul(spread).bfloat16() for width in (512, 64))
    latent, key_rope = (randn(2, keys, width).bfloat16() for width in (512, 64))
    call = (query, query_rope, latent, key_rope)
    got = operation("aten")(*call, softmax_scale=576**-0.5).attention_outputs
    expected = operation("native")(*(x.double() for x in call), softmax_scale=576**-0.5).attention_outputs
    assert relative_rms_error(got, expected) <= 4e-3
