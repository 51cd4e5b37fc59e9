"""Native models on the meta device: what a forward gives there has the shapes and dtypes of a real one."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.models.families import FAMILIES, IMAGE_TEXT, LANGUAGE, SEQ2SEQ, TOWERS
from tests.models.tower_families import tower_inputs

# Their forwards read the inputs: where images stand, how many patches there are.
READ = ("siglip2", "siglip2_vision_model", "gemma4_vision", *IMAGE_TEXT)


def described(output: Any) -> dict[str, Any]:
    return {name: (one.shape, one.dtype) for name, one in output.items() if isinstance(one, torch.Tensor)}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in READ])
def test_a_forward_has_the_shapes_of_a_real_one(family) -> None:
    ids = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(1))
    head = LANGUAGE[family]
    given = dict(tower_inputs(head) or {}) if family in TOWERS else {"input_ids": ids}
    given.pop("attention_mask", None)  # whose padding is looked for
    if family in SEQ2SEQ:
        given["decoder_input_ids"] = ids[:, :4]
    outputs = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            made = getattr(importlib.import_module(f"easytorch.models.{family}"), head)(FAMILIES[family].config())
        with torch.no_grad():
            outputs.append(made.eval()(**{name: one.to(device) for name, one in given.items()}))
    assert described(outputs[1]) == described(outputs[0]) != {}
    assert all(one.is_meta for one in outputs[1].values() if isinstance(one, torch.Tensor))
