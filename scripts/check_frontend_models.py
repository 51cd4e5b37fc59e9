"""Every causal model type of the installed transformers, small and with random weights, through the front-end.

    python scripts/check_frontend_models.py                                   # all of them, on xla, and a summary
    python scripts/check_frontend_models.py --types llama,dbrx --backend torch
    python scripts/check_frontend_models.py --sample 12 --seed 3 --out build/frontend_models.jsonl

A type is built from its own config made small (easytorch/auto/tiny.py). Its logits by `easytorch.frontend.compile` are
compared with stock's, and where the two differ with both in float64, which shows whether the model itself makes that
much of float32's rounding (Gemma 3n's 35 layers do: stock is 2.0e-4 from float64). Where the front-end refuses a type,
`torch.compile(backend="easytorch")` is tried, which may break the graph and run the rest. Each type is a process of its
own, of limited time and memory. --out is resumed from.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import multiprocessing
import random
import resource
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MEMORY = 6 << 30
# Relative to the largest logit. float32 sums in another order; twice that of a matrix product of a few hundred terms.
TOLERANCE = 1e-4
TOKENS = 12


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="model types, separated by commas; otherwise all causal ones")
    parser.add_argument("--sample", type=int, help="how many to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the draw, the weights and the tokens")
    parser.add_argument("--backend", default="xla", help="a configuration of easytorch.backends")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one type")
    parser.add_argument("--out", type=Path, help="results, one JSON object a line; a later run goes on from there")
    options = parser.parse_args(arguments)
    types = options.types.split(",") if options.types else causal_types()
    if options.sample:
        types = sorted(random.Random(options.seed).sample(types, options.sample))
    lines = options.out.read_text().splitlines() if options.out and options.out.exists() else []
    results = {result["type"]: result for result in map(json.loads, lines)}
    for done, name in enumerate(types):
        if name in results:
            continue
        results[name] = in_a_process(name, options.backend, options.seed, options.timeout)
        print(f"{done + 1}/{len(types)} {line_of(results[name])}", flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as file:
                file.write(json.dumps(results[name]) + "\n")
    found = [results[name] for name in types]
    counts = collections.Counter(result["status"] for result in found)
    print(f"{len(found)} types on {options.backend}, seed {options.seed}: ", end="")
    print(", ".join(f"{count} {status}" for status, count in counts.most_common()))
    wrong = [result["type"] for result in found if result["status"] in ("different", "fails")]
    if wrong:
        print(f"wrong: {', '.join(wrong)}")
    return 1 if wrong else 0


def line_of(result: dict[str, Any]) -> str:
    """A result as it is printed."""
    off = f" off by {result['off']:.1e}" if "off" in result else ""
    return f"{result['type']:28} {result['status']}{off} {result.get('reason', '')}".rstrip()


def causal_types() -> list[str]:
    """Every model type that `AutoModelForCausalLM` makes a model of."""
    from transformers import AutoModelForCausalLM

    return sorted({config.model_type for config in AutoModelForCausalLM._model_mapping} - {""})


def in_a_process(name: str, backend: str, seed: int, timeout: float) -> dict[str, Any]:
    """The result of `check`, or that it took too long or ended the process."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, name, backend, seed), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(timeout):
            return receiver.recv()
        return {"type": name, "status": "not tried", "reason": f"took more than {timeout:.0f} s"}
    except EOFError:
        process.join()
        return {"type": name, "status": "fails", "reason": f"ended the process ({process.exitcode})"}
    finally:
        process.kill()
        process.join()


def _work(sender: Connection, name: str, backend: str, seed: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    sender.send(check(name, backend, seed))


def check(name: str, backend: str = "xla", seed: int = 0) -> dict[str, Any]:
    """type, status (equal, different, equal by torch.compile, refused, fails, not tried), how far off, why."""
    import torch

    import easytorch.frontend
    from easytorch.backends import BackendError
    from easytorch.frontend.errors import LoweringError

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    result: dict[str, Any] = {"type": name, "status": "not tried"}
    tokens = torch.randint(3, 200, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
    # A process boundary: whatever a model of transformers raises is its line of the table.
    model, reason = _built(name, tokens)
    if model is None:
        return result | {"reason": reason}

    def logits(called: Any) -> Any:
        with torch.no_grad():
            return called(input_ids=tokens, use_cache=False).logits

    def exported() -> Any:
        program = easytorch.frontend.compile(model, {"input_ids": tokens, "use_cache": False}, backend=backend)
        return logits(program)

    def by_torch_compile() -> Any:
        torch._dynamo.reset()
        return logits(torch.compile(model, backend="easytorch", options={"backend": backend}))

    try:
        return result | compared(model, exported, lambda: logits(model), "equal")
    except (LoweringError, BackendError) as error:
        result["reason"] = str(error).splitlines()[0]
    except Exception as error:
        return result | {"status": "fails", "reason": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    try:
        return result | compared(model, by_torch_compile, lambda: logits(model), "equal by torch.compile")
    except Exception as error:
        reason = f"{result['reason']}; by torch.compile {type(error).__name__}: {str(error).splitlines()[0]}"
        return result | {"status": "fails", "reason": reason}


def _built(name: str, tokens: Any) -> tuple[Any, str]:
    """A small model of the type that stock runs, or None and why there is none."""
    import torch
    import transformers

    from easytorch.auto.tiny import ATTEMPTS, shrunken

    reason = ""
    for attempt in range(len(ATTEMPTS)):
        try:
            config = shrunken(transformers.CONFIG_MAPPING[name](), attempt)
            if "is_decoder" in vars(config):  # what a causal model's checkpoint says, and some classes insist on
                config.is_decoder = True
            model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
            with torch.no_grad():
                if torch.isfinite(model(input_ids=tokens, use_cache=False).logits).all():
                    return model, ""
            reason = "its logits are not finite"
        except Exception as error:
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None, reason


def compared(model: Any, ours: Callable[[], Any], stock: Callable[[], Any], equal: str) -> dict[str, Any]:
    """How far `ours()` is off `stock()`; rounding is `equal` too, as both calls with `model` in float64 show."""
    from easytorch.auto.comparison import in_float64, is_rounding

    found, wanted = ours(), stock()
    off = ((found - wanted).abs().max() / wanted.abs().max()).item()
    if off <= TOLERANCE:
        return {"off": off, "status": equal}
    with in_float64(model, {}):
        exact = [ours()], [stock()]
    if is_rounding([found], [wanted], *exact):
        return {"off": off, "status": equal, "reason": "rounding, as float64 shows"}
    return {"off": off, "status": "different"}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main())
