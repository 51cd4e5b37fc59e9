"""The weights of every native family through Flax and through fewer bits, in memory and in files.

    python scripts/check_weights.py                        every family of tests/models/families.py
    python scripts/check_weights.py qwen3_next t5          some
    python scripts/check_weights.py --only quantized

Of a family, tiny and with no weight at 0 or 1:

    tree        `to_flax` of every head and `from_flax` of our class and of transformers' give the weights bit for bit,
                in float32 and bfloat16
    files       the folder that `save_pretrained` wrote, as Flax's msgpack and as safetensors again, has the same
                tensors bit for bit, and `from_pretrained` of the Flax folder the same outputs
    quantized   in int8, int4, nf4, mxfp4 and fp8: the outputs are those of plain layers of the decoded weights; a
                folder that is saved and one that is quantized while it loads give the same outputs bit for bit
    offloaded   the folder in int8 with layers on disk gives the same outputs

The exit code is 1 where a case fails. tests/models/test_weights.py has a family of each block.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from easytorch import bridge, protocol  # noqa: E402
from easytorch.layers.quantized import QuantizedLinear, QuantizedStacks  # noqa: E402
from easytorch.protocol import conversion  # noqa: E402
from scripts.check_models import inputs, made, main_output  # noqa: E402
from tests.models.families import FAMILIES, LANGUAGE  # noqa: E402

FORMATS = ("int8", "int4", "nf4", "mxfp4", "fp8")


def of_head(family: str, name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = getattr(importlib.import_module(f"easytorch.models.{family}"), name)(FAMILIES[family].config()).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model.to(dtype)


def assert_same_weights(given: Any, expected: Any) -> None:
    here, there = given.state_dict(), expected.state_dict()
    assert here.keys() == there.keys(), sorted(here.keys() ^ there.keys())
    for name, weight in there.items():
        # in float32 where the class keeps a weight in it whatever the model's dtype is
        assert here[name].dtype in (weight.dtype, torch.float32), f"{name} is {here[name].dtype}"
        assert torch.equal(here[name].to(weight.dtype), weight), f"{name} differs"


def output(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return main_output(model(**inputs(model)))


def tree(family: str) -> None:
    for name in FAMILIES[family].heads:
        for dtype in (torch.float32, torch.bfloat16) if name == LANGUAGE[family] else (torch.float32,):
            model = of_head(family, name, dtype)
            flax = model.to_flax()
            assert_same_weights(type(model).from_flax(copy.deepcopy(model.config), flax, dtype=dtype), model)
            stock = conversion.from_flax(getattr(transformers, name), copy.deepcopy(model.config), flax, dtype=dtype)
            assert_same_weights(stock, model)


def files(family: str) -> None:
    model = made(family)
    with tempfile.TemporaryDirectory() as folder:
        plain, flax, back = (str(Path(folder, name)) for name in ("plain", "flax", "back"))
        model.save_pretrained(plain)
        bridge.convert(plain, flax, to="flax")
        bridge.convert(flax, back, to="torch")
        here, there = (load_file(Path(one, "model.safetensors")) for one in (back, plain))
        assert here.keys() == there.keys(), sorted(here.keys() ^ there.keys())
        assert all(torch.equal(here[name], weight) for name, weight in there.items())
        again = type(model).from_pretrained(flax)
        assert_same_weights(again, model)
        assert torch.equal(output(again.eval()), output(model))


def quantized(family: str, formats: tuple[str, ...] = FORMATS) -> None:
    for format_ in formats:
        model = made(family)
        with tempfile.TemporaryDirectory() as folder:
            plain, small = (str(Path(folder, name)) for name in ("plain", "small"))
            model.save_pretrained(plain)
            protocol.quantize(model, format_, group_size=None if format_ in ("mxfp4", "fp8") else 16)
            assert any(isinstance(one, QuantizedLinear | QuantizedStacks) for one in model.modules()), "nothing"
            expected = output(model)
            decoded = output(protocol.dequantize(copy.deepcopy(model)))
            bound = 1e-4 * max(1.0, float(decoded.abs().max()))
            torch.testing.assert_close(expected, decoded, rtol=1e-4, atol=bound)
            model.save_pretrained(small)
            assert torch.equal(output(type(model).from_pretrained(small).eval()), expected), f"{format_}: loaded"
            settings = model.config.quantization_config
            direct = type(model).from_pretrained(plain, quantization_config=settings).eval()
            assert torch.equal(output(direct), expected), f"{format_}: quantized while it loads"


def offloaded(family: str) -> None:
    model = made(family)
    with tempfile.TemporaryDirectory() as folder:
        protocol.quantize(model, "int8")
        expected = output(model)
        model.save_pretrained(Path(folder, "small"))
        lists = [name for name, one in model.named_modules() if isinstance(one, torch.nn.ModuleList) and len(one)]
        last = f"{lists[-1]}.{len(model.get_submodule(lists[-1])) - 1}"
        inside = (f"{last}.", *[f"{last.rsplit('.', at)[0]}" for at in range(1, last.count(".") + 1)])
        places: dict[str, Any] = {last: "disk"}
        for name, one in model.named_modules():
            own = [name for name, _ in [*one.named_parameters(recurse=False), *one.named_buffers(recurse=False)]]
            if own and name != last and not name.startswith(inside[0]) and name not in inside[1:]:
                places |= dict.fromkeys([name] if name else own, "cpu")  # "" would be every module
        for buffers in (False, True):
            loaded = type(model).from_pretrained(
                Path(folder, "small"),
                device_map=places,
                offload_folder=str(Path(folder, "disk")),
                offload_buffers=buffers,
            )
            away = [*loaded.parameters(), *(loaded.buffers() if buffers else ())]
            # OLMo's norms have no weights, so that all its layer has is codes, which are buffers
            assert any(one.is_meta for one in away) or not buffers, "nothing is offloaded"
            torch.testing.assert_close(output(loaded.eval()), expected, rtol=1e-4, atol=1e-5)  # by other kernels


CASES: dict[str, Callable[[str], None]] = {"tree": tree, "files": files, "quantized": quantized, "offloaded": offloaded}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=tuple(FAMILIES), metavar="FAMILY")
    parser.add_argument("--only", action="append", choices=CASES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    failed = passed = 0
    for family in arguments.families:
        for name in arguments.only or CASES:
            try:
                CASES[name](family)
            except Exception as error:  # a case of one family fails, and the others are still to be seen
                failed += 1
                words = " ".join(str(error).split())[:200]
                print(f"FAILED {family} {name}: {type(error).__name__}: {words}", flush=True)
            else:
                passed += 1
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
