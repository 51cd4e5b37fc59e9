"""The function in transformers' AttentionInterface: every argument is carried or refused."""

from __future__ import annotations

import contextlib
import importlib
import logging

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, MptConfig, MptModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from easytorch.kernels.attention import native
from easytorch.layers.attention import (
    EAGER_INTERFACES,
    FLASH_FOR_TRANSFORMERS,
    INTERFACES,
    OURS,
    attend,
    interface_of,
)
from easytorch.operations import UnsupportedOperationError
from easytorch.protocol.native_classes import new_part
from tests.models.families import CAUSAL, FAMILIES

B, H, K, T, S, D = 2, 4, 2, 5, 7, 8
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


class Module(nn.Module):
    """What transformers passes as the first argument."""

    def __init__(self, is_causal: bool | None = None) -> None:
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal
        self.eval()


@pytest.fixture
def heads() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(B, H, T, D), torch.randn(B, K, S, D), torch.randn(B, K, S, D)


def definition(query, key, value, **features) -> torch.Tensor:
    return native.attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **features)[0]


@pytest.mark.parametrize("backend", [None, "vanilla", "flash"])
@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, {}),
        ({"scaling": 0.3}, {"softmax_scale": 0.3}),
        ({"softcap": 1.5}, {"softcap": 1.5}),
        ({"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
        ({"sliding_window": 3}, {"sliding_window": 3}),
        ({"position_bias": torch.linspace(-1, 1, H * T * S).view(1, H, T, S)},
         {"bias": torch.linspace(-1, 1, H * T * S).view(1, H, T, S)}),
    ],
    ids=lambda value: "-".join(value) or "plain",
)  # fmt: skip
def test_arguments_reach_the_operation(backend, given, expected, heads) -> None:
    output, _ = attend(Module(False), *heads, None, backend=backend, **given)
    torch.testing.assert_close(output, definition(*heads, **expected), **TOLERANCE)


@pytest.mark.parametrize("name", sorted(OURS))
@pytest.mark.parametrize("length", [1, T])
@pytest.mark.parametrize("learning", [False, True])
def test_outputs_can_be_viewed_as_those_of_transformers(name, length, learning, heads) -> None:
    query, key, value = (one.requires_grad_(learning) for one in heads)
    for mask in (None, torch.ones(B, 1, length, S, dtype=torch.bool)):
        if name.endswith("eager_mask") and mask is not None:
            mask = torch.zeros(mask.shape)
        output, _ = interface_of(name)(Module(False), query[:, :, :length], key, value, mask)
        assert output.view(B, length, -1).shape == (B, length, H * D)


@pytest.mark.parametrize("backend", [None, "vanilla", "flash"])
def test_masks(backend, heads) -> None:
    seen = torch.rand(B, 1, T, S) > 0.4
    seen[..., 0] = True
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    expected = definition(*heads, mask=seen)
    for mask in (seen, added):
        # the window and causality are in the mask already: they are not applied again
        output, _ = attend(Module(True), *heads, mask, backend=backend, sliding_window=1)
        torch.testing.assert_close(output, expected, **TOLERANCE)
    bias = torch.randn(1, H, T, S)
    for mask in (seen, added):
        output, _ = attend(Module(False), *heads, mask, backend=backend, position_bias=bias)
        torch.testing.assert_close(output, definition(*heads, mask=seen, bias=bias), **TOLERANCE)
    with pytest.raises(ValueError, match=r"torch\.int64.*\.bool\(\)"):
        attend(Module(False), *heads, seen.long(), backend=backend)


def test_causality_without_a_mask(heads) -> None:
    query, key, value = heads
    square = (query, key[:, :, :T], value[:, :, :T])
    expected = definition(*square, causal=True)
    for module, kwargs in ((Module(True), {}), (Module(False), {"is_causal": True}), (Module(), {})):
        torch.testing.assert_close(attend(module, *square, None, **kwargs)[0], expected, **TOLERANCE)
    torch.testing.assert_close(
        attend(Module(True), *square, None, is_causal=False)[0], definition(*square), **TOLERANCE
    )
    # more keys than queries and no mask: the first tokens of a preallocated cache, empty behind them
    output = attend(Module(True), *heads, None, position_bias=torch.zeros(1, H, T, S))[0]
    torch.testing.assert_close(output, expected, **TOLERANCE)
    # one query token sees everything in the cache
    one = (query[:, :, :1], key, value)
    torch.testing.assert_close(attend(Module(True), *one, None)[0], definition(*one), **TOLERANCE)


def test_modules_of_transformers_that_do_not_say_are_bidirectional(heads) -> None:
    from transformers.models.splinter.modeling_splinter import SplinterSelfAttention

    assert not hasattr(SplinterSelfAttention, "is_causal")
    module = SplinterSelfAttention.__new__(SplinterSelfAttention)
    nn.Module.__init__(module)
    torch.testing.assert_close(attend(module.eval(), *heads, None)[0], definition(*heads), **TOLERANCE)


def test_packed_sequences(heads) -> None:
    query, key, value = (states[:1, :, :T] for states in heads)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    segments = torch.tensor([[0, 0, 1, 1, 1]])
    expected = definition(query, key, value, causal=True, query_segment_ids=segments, key_segment_ids=segments)
    kwargs = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 3, "max_length_k": 3}
    torch.testing.assert_close(attend(Module(True), query, key, value, None, **kwargs)[0], expected, **TOLERANCE)
    with pytest.raises(ValueError, match="one packed row"):
        attend(Module(True), *heads, None, **kwargs)


@pytest.mark.parametrize("name", EAGER_INTERFACES)
def test_the_mask_alone_says_who_sees_whom_in_eager_attention(name, heads) -> None:
    """Whatever the module and the call say of causality or a window: transformers' eager attention reads neither."""
    eager = ALL_ATTENTION_FUNCTIONS[name]
    for kwargs in ({}, {"is_causal": True}, {"sliding_window": 2}):
        torch.testing.assert_close(eager(Module(True), *heads, None, **kwargs)[0], definition(*heads), **TOLERANCE)


def test_dropout_only_in_training(heads) -> None:
    module = Module(False)
    torch.testing.assert_close(attend(module, *heads, None, dropout=0.5)[0], definition(*heads), **TOLERANCE)
    torch.manual_seed(1)
    dropped = attend(module.train(), *heads, None, dropout=0.5)[0]
    assert not torch.allclose(dropped, definition(*heads))
    torch.manual_seed(1)
    assert torch.equal(attend(module, *heads, None, dropout=0.5)[0], dropped)


def test_weights_come_from_the_one_implementation_that_forms_them(heads, monkeypatch) -> None:
    weights = attend(Module(False), *heads, None, output_attentions=True)[1]
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, T), **TOLERANCE)
    for backend in ("flash", "sdpa"):
        with pytest.raises(UnsupportedOperationError, match=r"output_attentions=True.*vanilla"):
            attend(Module(False), *heads, None, output_attentions=True, backend=backend)
    monkeypatch.setenv("EASYTORCH_OPS", "attention=flash")
    with pytest.raises(UnsupportedOperationError, match="'flash' was forced"):
        attend(Module(False), *heads, None, output_attentions=True)
    monkeypatch.setenv("EASYTORCH_OPS", "attention=vanilla")
    assert attend(Module(False), *heads, None, output_attentions=True)[1] is not None


@pytest.mark.parametrize("name", ["cache", "indices", "block_indices", "sinks", "head_mask"])
def test_what_the_contract_lacks_is_refused(name, heads) -> None:
    with pytest.raises(UnsupportedOperationError, match=rf"{name}=.*eager"):
        attend(Module(False), *heads, None, **{name: torch.zeros(1)})
    attend(Module(False), *heads, None, **{name: None})


def test_unknown_arguments_are_named_once(heads, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            attend(Module(False), *heads, None, position_ids=torch.arange(T), a_new_argument=1)
    assert [record.message for record in caplog.records if "a_new_argument" in record.message] == [
        "attention: EasyTorch does not know the argument 'a_new_argument' and ignores it, as transformers' sdpa does"
    ]


def test_names_in_the_tables_of_transformers() -> None:
    for name in INTERFACES:
        assert name in ALL_ATTENTION_FUNCTIONS and name in ALL_MASK_ATTENTION_FUNCTIONS
    assert "flash" not in FLASH_FOR_TRANSFORMERS
    # native modules route these two to us, other models keep transformers' own
    assert interface_of("sdpa").func is attend and interface_of("eager").func is attend
    assert (
        ALL_ATTENTION_FUNCTIONS["sdpa"] is not interface_of("sdpa")
        and "eager" not in AttentionInterface._global_mapping
    )


@pytest.mark.parametrize("name", sorted(OURS))
def test_a_part_that_is_transformers_own_has_its_own_attention(name: str) -> None:
    """That ours is the same there nobody has tried."""
    config = MptConfig(vocab_size=97, d_model=32, n_layers=1, n_heads=4)
    config._attn_implementation_internal = name
    part = new_part(config)
    assert type(part) is MptModel and part.config._attn_implementation not in OURS


def test_a_class_says_whether_it_takes_sdpa() -> None:
    """As transformers' own do: what ATen's attention does not carry is refused at the call."""
    for family, name in CAUSAL.items():
        model_class = getattr(importlib.import_module(f"easytorch.models.{family}"), name)
        model = model_class._from_config(FAMILIES[family].config(), attn_implementation="sdpa").eval()
        with torch.no_grad(), contextlib.ExitStack() as refused:
            if not model._supports_sdpa:
                refused.enter_context(pytest.raises(UnsupportedOperationError, match="ATen has no"))
            model(torch.tensor([[5, 9, 33]]))
