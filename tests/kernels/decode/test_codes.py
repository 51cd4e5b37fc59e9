"""decode over keys and values of one byte: every instruction set this CPU has, odd sizes, any layout, guard pages, and
the caches of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from easytorch.cache.quantized import QuantizedKeysAndValues
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.cpu import library, processor
from easytorch.kernels.decode import codes
from easytorch.kernels.decode.codes import CODES, Codes
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.decode.test_cpu import features
from tests.kernels.linear.guard import guarded

needs_library = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
# (B, S, R, H, K, D, Dv, group): every size of a group of heads that is computed together, several blocks and tasks
SIZES = (
    (1, 1, 0, 1, 1, 1, 1, 1), (2, 65, 3, 5, 5, 16, 20, 64), (2, 40, 30, 6, 2, 60, 36, 16),
    (1, 290, 10, 4, 1, 64, 70, 64), (1, 0, 5, 4, 2, 8, 8, 8), (2, 600, 300, 22, 2, 33, 100, 10),
)  # fmt: skip


def make(
    size: tuple[int, ...], dtype: torch.dtype, kind: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Codes, Codes, tuple[Tensor, Tensor] | None]:  # fmt: skip
    batch, keys, recent, heads, kv_heads, dim, value_dim, group = size

    def coded(width: int) -> Codes:
        data = torch.randint(-128, 128, (batch, kv_heads, keys, width), generator=generator, dtype=torch.int8)
        if kind != torch.int8:  # numbers of up to 2, without NaN
            data = (data.float() / 64).to(kind)
        scale = torch.rand(batch, kv_heads, keys, -(-width // group), generator=generator) + 0.1
        return Codes(data, scale / (64 if kind == torch.int8 else 1), group)

    query = torch.randn(batch, heads, 1, dim, generator=generator).to(dtype)
    shapes = [(batch, kv_heads, recent, width) for width in (dim, value_dim)]
    more = tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return query, coded(dim), coded(value_dim), (more[0], more[1]) if recent else None


def compare(
    given: tuple[Tensor, Codes, Codes, tuple[Tensor, Tensor] | None], options: dict[str, Any], level: int
) -> None:
    query, key, value, recent = given
    # numbers are rounded to the query's dtype before they are multiplied
    wide = {name: x.double() if name in ("bias", "sinks") else x for name, x in options.items()}
    exact = [
        Codes(one.decoded(query.dtype).double(), torch.ones_like(one.scale), one.group_size) for one in (key, value)
    ]
    more = None if recent is None else (recent[0].double(), recent[1].double())
    expected = codes.define(query.double(), *exact, more, **wide)
    lengths = options.get("lengths")
    rest = {name: x for name, x in options.items() if name != "lengths"}
    call = codes.resolve(query, key, value, recent, lengths, rest)
    got = codes.run(query, key, value, recent, lengths, call, level)
    assert got.dtype == query.dtype and got.is_contiguous() and got.shape == expected.shape
    error = relative_rms_error(got, expected)
    assert error <= TOLERANCE[query.dtype], (tuple(key.data.shape), key.data.dtype, list(options), error)


@needs_library
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("level", library.levels_of("decode"))
def test_every_feature_at_odd_sizes(level: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(level)
    for number, size in enumerate(SIZES):
        kind = CODES[(number + level) % 3]
        seen = (size[0], size[1] + size[2], size[3])
        for options in features(seen, generator, dtype):
            query, key, value, recent = make(size, dtype, kind, generator)
            behind = [
                Codes(guarded(x.data.view(torch.int8)).view(kind), guarded(x.scale), x.group_size) if size[1] else x
                for x in (key, value)
            ]
            if recent is not None:
                recent = (guarded(recent[0]), guarded(recent[1]))
            compare((query, *behind, recent), options, level)


@needs_library
@pytest.mark.parametrize("kind", CODES[1:], ids=str)
@pytest.mark.parametrize("level", library.levels_of("decode"))
def test_every_code_of_float8_is_torchs(level: int, kind: torch.dtype) -> None:
    """A key that takes all weight gives its value: 256 of them."""
    value = torch.arange(256, dtype=torch.uint8).view(kind).reshape(1, 1, 1, 256)
    key = torch.ones(1, 1, 1, 8).to(kind)
    given = [Codes(x, torch.ones(1, 1, 1, 1), 256) for x in (key, value)]
    query = torch.zeros(1, 1, 1, 8)
    call = codes.resolve(query, *given, None, None, {})
    got = codes.run(query, *given, None, None, call, level)
    torch.testing.assert_close(got.flatten(), value.float().flatten(), rtol=0, atol=0, equal_nan=True)


@needs_library
def test_any_layout_and_any_number_of_threads() -> None:
    generator, threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    query, key, value, recent = make((2, 300, 5, 4, 2, 32, 48, 32), torch.bfloat16, torch.int8, generator)
    by_token = [
        Codes(*(one.transpose(1, 2).contiguous().transpose(1, 2) for one in x[:2]), x.group_size) for x in (key, value)
    ]
    assert recent is not None
    strided = (torch.stack([recent[0]] * 2, -1)[..., 0], recent[1].transpose(1, 2).contiguous().transpose(1, 2))
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(codes.decode(query, key, value, recent, softmax_scale=0.2))
            results.append(codes.decode(query.mT.contiguous().mT, *by_token, strided, softmax_scale=0.2))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])
    compare((query, key, value, recent), {"softmax_scale": 0.2}, library.BEST)


@needs_library
def test_what_does_not_fit_is_refused() -> None:
    query, key, value, recent = make(
        (1, 9, 2, 4, 2, 8, 6, 4), torch.float32, torch.int8, torch.Generator().manual_seed(0)
    )
    assert recent is not None
    for wrong, why in (
        ((query, key._replace(scale=key.scale[..., :1]), value, recent), "key codes are"),
        ((query, key, value._replace(scale=value.scale.double()), recent), "must be float32"),
        ((query, key, value, (recent[0], recent[1][:, :, :1])), "recent keys and values"),
        ((query, key, value, (recent[0].half(), recent[1].half())), "recent keys and values"),
        ((query[..., :7], key, value, recent), "head_dim differ"),
    ):
        with pytest.raises(ValueError, match=why):
            codes.decode(*wrong)
    for unsupported in (
        (query, key._replace(data=key.data.float()), value, recent),
        (query, key, value._replace(data=value.data.to(torch.float8_e5m2)), recent),
    ):
        with pytest.raises(NotImplementedError, match="codes of one dtype"):
            codes.decode(*unsupported)
    with pytest.raises(NotImplementedError, match="no dropout"):
        codes.decode(query, key, value, recent, dropout_prob=0.1)

    good = [query, key.data, value.data, key.scale, value.scale, *recent, None, 4, *AttentionCall(), library.BEST]
    assert torch.ops.easytorch_cpu.decode_codes.default(*good).shape == (1, 1, 4, 6)
    for index, bad in (
        (0, query[0]), (0, query[..., :7]), (0, query.double()), (1, key.data[:, :1]), (1, key.data.float()),
        (1, key.data.view(torch.uint8)), (2, value.data[:, :, :8]), (2, value.data.to(torch.float8_e5m2)),
        (3, key.scale[..., :1]), (3, key.scale[:, :, :8]), (3, key.scale.half()), (4, value.scale[0]), (5, None),
        (5, recent[0].half()), (5, recent[0][..., :7]), (6, recent[1][:, :1]), (7, torch.tensor([12])),
        (7, torch.tensor([-1])), (7, torch.tensor([1, 2])), (8, 0), (8, -4), (8, 3),
    ):  # fmt: skip
        given = list(good)
        given[index] = bad
        with pytest.raises(RuntimeError, match=r"easytorch: (decode_codes|attention)"):
            torch.ops.easytorch_cpu.decode_codes.default(*given)


@needs_library
@pytest.mark.parametrize("kind", ("int8", "fp8"))
def test_models_attend_to_a_quantized_cache_as_it_lies(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens and logits of decoding the cache at each token, which does not happen."""
    import transformers

    from easytorch.models.llama import LlamaForCausalLM

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        vocab_size=64, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(1, 64, (2, 9))

    def logits(fast: bool) -> Tensor:
        monkeypatch.setattr(processor, "AVX2", fast)
        cache = model.init_cache(batch_size=2, max_length=32, kind=kind, residual_length=5)
        given, found = prompt, []
        for _ in range(9):  # the cache is quantized again at the fifth and the tenth
            found.append(model(given, past_key_values=cache).logits[:, -1])
            given = found[0].argmax(-1, keepdim=True)
        assert cache.get_seq_length() == 9 + 8
        return torch.stack(found)

    with torch.no_grad():
        expected = logits(False)
        read: list[int] = []
        whole = QuantizedKeysAndValues._dequantize
        monkeypatch.setattr(
            QuantizedKeysAndValues, "_dequantize", lambda self, given: read.append(1) or whole(self, given)
        )
        got = logits(True)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert len(read) == 2 * 2 * 1, "keys and values of two layers, when tokens are quantized"
