"""Each argument of each operation, wrong in every simple way: refused with what was given, or one of those that fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from easytorch.operations import OperationMetadata, OperationRegistry
from tests.operations.test_bad_input import CASES, fuzz

OTHER_DTYPES = (torch.float16, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64)
HUGE = 10**400  # no float
NUMBERS = (-1, 0, 1.5, float("nan"), float("inf"), True, "x", None, HUGE, (1,), -0.5)

# What fits too: other sizes, dtypes that are computed with, masks that broadcast. Everything else is refused.
_SCALE = "softmax_scale -1 0 1.5 None -0.5"
_SINKS = "softcap 1.5 None | sinks float16 float64 | sliding_window None huge"
_BIASES = "mask 0-1 less | bias 0-1 less float16 float64"
_SEGMENTS = """
query_segment_ids int8 bool -1 big last+1 | key_segment_ids int8 bool -1 big last+1
"""
_BAND = "value 3+1 3-1 3=0 | causal 0 None | sliding_window None huge"
_DROPOUT = "softcap 1.5 None | sinks float16 float64 | dropout_prob 0 | seed -1 0 None huge"
_ATTENTION = " | ".join((_BAND, _BIASES, _SEGMENTS, _SCALE, _DROPOUT))
_STATES = """
x float16 float64 | dt float16 float64 | A float16 float64 | B float16 float64 | C float16 float64 | D float16 float64
z float16 float64 | dt_bias float16 float64 | dt_softplus 0 None | initial_state float16 float64
segment_ids int8 -1 big last+1
"""
_WIDTHS = "x 0+1 0-1 0=0 more less float16 float64"
_ROWS = "x 0+1 0-1 0=0 more less"
FITS = {
    "attention": " | ".join((_ATTENTION, "chunk_size None")),
    "vanilla": _ATTENTION,
    "sdpa": " | ".join((_BAND, _BIASES, _SEGMENTS, _SCALE)),
    "flash": " | ".join((_ATTENTION, "max_seqlen_q None huge | max_seqlen_k None huge")),
    "blocksparse": " | ".join((_ATTENTION, "chunk_size None | prefix_length 0 None")),
    "ring": " | ".join((_ATTENTION, "layout 0 None")),
    "decode": " | ".join((_BAND, _BIASES, _SCALE, _DROPOUT)),
    "ragged_page_attention": " | ".join(
        (
            _SCALE,
            _SINKS,
            (
                "query 0+1 | value_pages 3+1 3-1 3=0 | context_lens last+1 | block_tables 1+1 | "
                "num_seqs 0 None | causal 0 None"
            ),
        )
    ),
    "multi_latent_attention": " | ".join((_BIASES, _SEGMENTS, _SCALE, _SINKS, "up_value 1+1 1-1 1=0 | causal 0 None")),
    "ragged_page_multi_latent_attention": " | ".join(
        (
            _SINKS,
            "up_value 1+1 1-1 1=0 | latent_pages 0+1 1+1 | context_lens last+1 | block_tables 1+1 | num_seqs 0 None",
        )
    ),
    "rms_norm": " | ".join((_WIDTHS, "weight float16 float64 | eps 0 1.5")),
    "layer_norm": " | ".join((_WIDTHS, "weight float16 float64 | bias float16 float64 | eps 0 1.5")),
    "swiglu": "",
    "geglu": "",
    "rotary": (
        "query 2+1 2-1 2=0 float16 float64 | key 2+1 2-1 2=0 float16 float64 | cos float16 float64 | "
        "sin float16 float64 | interleaved 0 True None | position_ids 0-1 last+1 | offset 0"
    ),
    "cross_entropy": (
        "logits 1+1 float16 float64 | labels last+1 | label_smoothing 0 | softcap 1.5 None | z_loss 0 1.5"
    ),
    "fused_linear_cross_entropy": (
        "labels last+1 | label_smoothing 0 | softcap 1.5 None | z_loss 0 1.5 | chunk_size None"
    ),
    "linear": _ROWS,
    "grouped_matmul": "x 0+1 0-1 | group_sizes last+1",
    "quantized_matmul": " | ".join((_WIDTHS, "bias float16 float64")),
    "causal_conv1d": (
        "x float16 float64 | weight float16 float64 | bias float16 float64 | "
        "initial_state float16 float64 | activation None | segment_ids int8 -1 big last+1"
    ),
    "ssm1": _STATES,
    "ssm2": _STATES,
    "gated_delta_rule": " | ".join(
        (
            _SCALE,
            (
                "query float16 float64 | key float16 float64 | value float16 float64 | g float16 float64 | "
                "beta float16 float64 | initial_state float16 float64 | use_qk_l2norm 0 None | "
                "segment_ids int8 -1 big last+1"
            ),
        )
    ),
}


def changes(value: Any) -> Iterator[tuple[str, Any, str]]:
    """(in a word, the wrong value, what a message has to say of it)."""
    if not isinstance(value, Tensor):
        yield from (
            ("huge" if wrong == HUGE else str(wrong), wrong, str(wrong))
            for wrong in NUMBERS
            if not (type(wrong) is type(value) and wrong == value)
        )
        return
    for dim, size in enumerate(value.shape):
        for word, made in (
            (f"{dim}+1", torch.cat([value, value.narrow(dim, size - 1, 1)], dim)),
            (f"{dim}-1", value.narrow(dim, 0, size - 1)),
            (f"{dim}=0", value.narrow(dim, 0, 0)),
        ):
            if not (size == 1 and word.endswith("=0")):
                yield word, made, str(made.shape[dim])
    yield "more", value[None], str((1, *value.shape))[1:-1]
    if value.dim():
        yield "less", value[0], str(tuple(value.shape[1:]))[1:-1]
    for dtype in OTHER_DTYPES:
        if dtype != value.dtype:
            yield str(dtype).removeprefix("torch."), value.to(dtype), str(dtype)
    if not value.is_floating_point() and value.dtype != torch.bool:
        last = value.flatten().clone()
        last[-1] += 1
        yield "-1", torch.full_like(value, -1), "-1"
        yield "big", torch.full_like(value, 10**6), ""
        yield "last+1", last.reshape(value.shape), ""


# Pages are given in two parts, and a state's width follows from the weight's: the message has what was made of it.
SAID_OTHERWISE = (
    *("latent_pages 1-1", "latent_pages 2", "latent_pages more", "latent_pages less", "weight 1+1"),
    *("hidden more", "hidden less", "cu_seqlens_q ", "cu_seqlens_k "),
)


def outcomes(name: str) -> tuple[list[str], list[str]]:
    """(the changes that fit, the refusals that do not say what was wrong)."""
    operation = OperationRegistry.create(name, OperationMetadata(backend="native"))
    fits, unclear, seen = [], [], set()
    for case in CASES[name]:
        kept = {key: one.clone() if isinstance(one, Tensor) else one for key, one in case.arguments.items()}
        for argument, value in case.arguments.items():
            if argument in seen:
                continue
            seen.add(argument)
            for word, wrong, said in changes(value):
                try:
                    operation(**{**case.arguments, argument: wrong})
                    fits.append(f"{argument} {word}")
                except (ValueError, TypeError) as error:
                    text = str(error)
                    known = [] if isinstance(wrong, Tensor) else [type(wrong).__name__, argument]
                    if f"{argument} {word}".startswith(SAID_OTHERWISE):
                        continue
                    if said not in text and not any(re.search(rf"\b{one}\b", text) for one in known):
                        unclear.append(f"{argument} {word}: {text}")
        for key, one in kept.items():
            assert not isinstance(one, Tensor) or torch.equal(case.arguments[key], one), f"{key} was changed"
    return fits, unclear


def listed(text: str) -> list[str]:
    rows = [row.split() for row in re.split(r"[|\n]", text) if row.strip()]
    return [f"{argument} {word}" for argument, *words in rows for word in words]


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_is_refused_and_nothing_else(name: str) -> None:
    fits, unclear = outcomes(name)
    assert unclear == []
    assert sorted(fits) == sorted(listed(FITS[name]))


@pytest.mark.parametrize("name", [name for name in CASES if name != "attention"])  # it calls the others
def test_no_implementation_changes_what_it_is_given(name: str) -> None:
    """Values, and flags of the gradient; results share no memory with arguments, so that one may change the other."""
    for case in CASES[name]:
        given = {key: one for key, one in case.arguments.items() if isinstance(one, Tensor)}
        kept = {key: one.clone() for key, one in given.items()}
        for backend in filter(lambda one, case=case: fuzz.carries(case, one), fuzz.implementations(name)):
            operation = OperationRegistry.create(name, OperationMetadata(backend=backend))
            found = operation(**case.arguments)
            for key, one in given.items():
                assert torch.equal(one, kept[key]) and not one.requires_grad, (backend, key)
            for one in found if isinstance(found, tuple | list) else [found]:
                if isinstance(one, Tensor) and one.numel():
                    memory = one.untyped_storage().data_ptr()
                    assert all(memory != other.untyped_storage().data_ptr() for other in given.values()), backend
