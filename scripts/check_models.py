"""Native families under what users do with a model: compile, export, adapters, checkpointing, new tokens.

    python scripts/check_models.py                    every family of tests/models/families.py
    python scripts/check_models.py phi3 cohere2       some
    python scripts/check_models.py --only export

tests/models compares outputs with transformers; these cases take a second each, so CI runs a few families
(tests/models/test_check_models.py). The exit code is 1 where a case fails.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.models.families import FAMILIES, IMAGE_TEXT, LANGUAGE, MAMBA, RECURRENT, TOWERS  # noqa: E402
from tests.models.image_text_families import OF_GRIDS  # noqa: E402
from tests.models.tower_families import tensors, tower_inputs, tower_labels  # noqa: E402

IDS = torch.tensor([[5, 9, 33, 71, 8, 12, 3, 44, 90, 17], [4, 4, 90, 12, 60, 7, 31, 6, 88, 23]])


def made(family: str, **changes: Any) -> Any:
    """The model that stands for a family, tiny, no weight of it 0 or 1."""
    torch.manual_seed(0)
    model_class = getattr(importlib.import_module(f"easytorch.models.{family}"), LANGUAGE[family])
    model = model_class(FAMILIES[family].config(**changes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return main_output(model(**inputs(model, ids)))


def main_output(output: Any) -> torch.Tensor:
    """The logits, or the first tensor of an output without."""
    return output.logits if "logits" in output else tensors(output)[0]


def head(model: Any) -> str:
    return LANGUAGE[model.config.model_type.replace("-", "_")]


def inputs(model: Any, ids: torch.Tensor = IDS) -> dict[str, Any]:
    """The arguments of a forward without a loss."""
    return tower_inputs(head(model)) or {"input_ids": ids} | options(model)


def loss(model: Any) -> torch.Tensor:
    """That of the head; of a tower without one, the mean square of what it computes."""
    if (given := tower_inputs(head(model))) is None:
        return model(IDS, labels=IDS).loss
    output = model(**given, **tower_labels(head(model)))
    return output.loss if "loss" in output else sum(one.float().square().mean() for one in tensors(output))


def options(model: Any) -> dict[str, Any]:
    """No cache, where the model has one; what a decoder reads, where there is an encoder."""
    given: dict[str, Any] = {"use_cache": False} if model.can_generate() else {}
    return given | ({"decoder_input_ids": IDS.flip(0)} if model.config.is_encoder_decoder else {})


def compile_(family: str) -> None:
    """One graph for a forward, and for one with a padding mask and gradients."""
    model = made(family)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(compiled), logits(model), rtol=1e-5, atol=1e-5)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    gradients = []
    for one in (compiled, model):
        model.zero_grad()
        if family in (*TOWERS, *IMAGE_TEXT):
            loss(one).backward()
        else:
            one(IDS, attention_mask=mask, **options(model)).logits[mask == 1].square().mean().backward()
        gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    for given, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


def export(family: str) -> None:
    """A graph for any length; of layers with a state, whose chunks it unrolls, for one; of images for any number.

    With images among the text, of one size. Grids of any size are values that a graph cannot have: those families
    export their text, as transformers' do.
    """
    model = made(family)
    if family in TOWERS:
        given = inputs(model)
        rows = torch.export.Dim("rows", min=2, max=16)
        shapes: dict[str, Any] = {name: {0: rows} for name in given}
        fixed: dict[str, Any] = {"use_cache": False} if model.can_generate() else {}
        shapes |= dict.fromkeys(fixed)
        program = torch.export.export(model, (), given | fixed, dynamic_shapes=shapes, strict=False).module()
        for times in (1, 3):
            more = {name: one.repeat(times, *[1] * (one.dim() - 1)) for name, one in given.items()}
            with torch.no_grad():
                expected = main_output(model(**more))
            torch.testing.assert_close(main_output(program(**more, **fixed)), expected, rtol=1e-5, atol=1e-5)
        return
    if family in IMAGE_TEXT:
        given = ({"input_ids": IDS} if family in OF_GRIDS else inputs(model)) | {"use_cache": False}
        program = torch.export.export(model, (), given, strict=False).module()
        changed = "input_ids" if family in OF_GRIDS else "pixel_values"
        for one in (given, given | {changed: given[changed].flip(-1)}):
            with torch.no_grad():
                expected = model(**one).logits
            torch.testing.assert_close(program(**one).logits, expected, rtol=1e-5, atol=1e-5)
        return
    if family in RECURRENT:
        program = torch.export.export(model, (IDS,), {"use_cache": False}, strict=False).module()
        torch.testing.assert_close(program(IDS, use_cache=False).logits, logits(model), rtol=1e-5, atol=1e-5)
        return
    least = getattr(model.config, "index_topk", 1) + 1  # fewer tokens than an indexer chooses are another program
    length = torch.export.Dim("length", min=least, max=32)
    given = options(model)
    shapes = {"input_ids": {1: length}} | dict.fromkeys(given)
    program = torch.export.export(model, (IDS,), given, dynamic_shapes=shapes, strict=False).module()
    for ids in (IDS, IDS[:, :7]):
        exported = program(ids, **given).logits
        torch.testing.assert_close(exported, logits(model, ids), rtol=1e-5, atol=1e-5)


def checkpointing(family: str) -> None:
    """The same gradients, by both kinds, to 3e-5 of each one's largest.

    A reentrant one runs the layers first without gradients, where recurrences are operators in C++. Those round
    otherwise in the last bit (1.3e-7 from float64, ATen 1.2e-7), which Qwen3.5's tower makes 1.7e-5 of.
    """
    model, gradients = made(family, **dict.fromkeys(FAMILIES[family].dropouts, 0.0)).train(), []
    for reentrant in (None, False, True):
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        loss(model).backward()
        named = model.named_parameters()
        gradients.append({name: weight.grad.clone() for name, weight in named if weight.grad is not None})
    for name, gradient in gradients[0].items():
        for again in gradients[1:]:
            bound = max(1e-6, 3e-5 * float(gradient.abs().max()))
            torch.testing.assert_close(again[name], gradient, rtol=1e-4, atol=bound)


def adapters(family: str) -> None:
    """LoRA on every projection: it changes the outputs, it is all that learns, and it merges into the weights."""
    import peft

    model = made(family)
    plain = logits(model)
    generates = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    # PEFT passes what a text model is given
    task = generates if model.can_generate() and family not in TOWERS else None
    # by PEFT, for Mamba's kernels would pass over the adapter; an indexer's choice has no gradient; no sound is given
    of_names = {"deepseek_v32": r".*\.indexer\..*", "gemma4": ".*audio.*"}
    refused = ["out_proj"] if family in MAMBA else of_names.get(family)
    config = peft.LoraConfig(
        target_modules="all-linear", exclude_modules=refused, task_type=task, init_lora_weights=False, r=2
    )
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, config).eval()
    changed = logits(adapted)
    assert not torch.allclose(changed, plain)
    loss(adapted).backward()
    silent = [name for name, weight in adapted.named_parameters() if weight.requires_grad and not weight.grad.any()]
    assert not silent, silent
    # of the scale: an adapter of random numbers makes large logits, and merging rounds in another order
    scale = max(1.0, changed.abs().max().item())
    torch.testing.assert_close(logits(adapted.merge_and_unload()), changed, rtol=1e-4, atol=1e-4 * scale)


def new_tokens(family: str) -> None:
    """The logits of the old tokens stay; what was tied is tied still. Only models of text have logits of tokens."""
    if made(family).get_output_embeddings() is None:
        return
    for tied in (False, True):
        model = made(family, tie_word_embeddings=tied)
        if not tied and model.config.is_encoder_decoder and family not in TOWERS:
            continue  # here as in transformers both halves then get the one embedding that grows
        before = logits(model)
        model.resize_token_embeddings(101)
        # some families always tie them, some never
        shared = model.config.tie_word_embeddings and bool(model._tied_weights_keys)
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == shared
        after = logits(model)
        assert after.shape[-1] == 101
        torch.testing.assert_close(after[..., :97], before, rtol=1e-6, atol=1e-6)


def attentions(family: str) -> None:
    """Every implementation that carries the family gives the same numbers."""
    model = made(family)
    # padding before a text sees nothing, of which each attention makes what it will
    seen = inputs(model)["attention_mask"].bool() if family in IMAGE_TEXT else ...
    expected = logits(model)[seen]
    for name in ("vanilla", "flash", "eager"):
        model.set_attn_implementation(name)
        torch.testing.assert_close(logits(model)[seen], expected, rtol=1e-4, atol=1e-5)


def half(family: str) -> None:
    """bfloat16 and float16 stay what they are from the embedding to the logits, losses and gradients included."""
    for dtype in (torch.bfloat16, torch.float16):
        model = made(family).to(dtype)
        assert logits(model).dtype == (torch.float32 if FAMILIES[family].wide else dtype)
        value = loss(model)
        assert value.isfinite()
        value.backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
        # the tower's last norm is behind the layer whose features the decoder of LLaVA reads
        unused = ("mask_token",) if family in TOWERS else ("post_layernorm.weight", "post_layernorm.bias")
        assert all(
            grad is not None and grad.dtype == dtype
            for name, grad in gradients.items()
            if not name.endswith(unused) and not re.search(r"\.indexer\.|_audio\.|audio_tower", name)
        )


CASES: dict[str, Callable[[str], None]] = {
    "compile": compile_,
    "export": export,
    "checkpointing": checkpointing,
    "adapters": adapters,
    "new-tokens": new_tokens,
    "attentions": attentions,
    "half": half,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=tuple(FAMILIES), metavar="FAMILY")
    parser.add_argument("--only", action="append", choices=CASES)
    arguments = parser.parse_args()
    failed = 0
    for family in arguments.families:
        for name in arguments.only or CASES:
            start = time.perf_counter()
            try:
                CASES[name](family)
            except Exception as error:  # a case of one family fails, and the others are still to be seen
                failed += 1
                print(f"FAILED {family} {name}: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
            else:
                print(f"ok     {family} {name} {time.perf_counter() - start:.1f} s", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
