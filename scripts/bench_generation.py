"""One Llama in EasyTorch, transformers and llama.cpp, in one run: tokens a second of generation and of prefill.

    python scripts/bench_generation.py                       # 0.44 B weights, bfloat16 and float32
    python scripts/bench_generation.py --dtypes bfloat16 --formats q8_0 q4_0 q4_k_m   # and 8 and 4 bits
    python scripts/bench_generation.py --quick               # a tiny model, to see that everything runs
    python scripts/bench_generation.py --case batch --dtypes bfloat16 --rounds 1      # 16 requests at once

llama.cpp is that of `pip install llama-cpp-python`, which compiles it; without it the other two are measured. All three
read the same weights: transformers writes random ones, and the bridge converts them to GGUF. Before anything is timed,
their logits are compared. The rows of `--formats` are of one GGUF file, which EasyTorch computes with as it is.

Each program has a process of its own, which waits while another one works; in every round all of them take turns. A
figure is the median over the rounds; *of llama.cpp* and *of transformers* are medians of the ratios within a round.
*generate* is the whole of a greedy `generate` from a prompt of 16 tokens. *read* is the share of the speed at which
torch reads memory, counting every weight but the embedding once a token; *GEMM* is the share of the rate of a large
`torch.mm`, counting the products of the layers. Both are measured in the same rounds.

The other cases, one a run: *batch*, 16 requests of mixed lengths by our engine, transformers' continuous batching and
llama.cpp's batches; *prefix*, requests with the same first 1,024 tokens, with and without reuse; *server*, the engine
and `easytorch serve`; *long*, decoding after 8,192 and 32,768 tokens, by 2 layers; *first-token*, `easytorch generate`
until its first token, and what it cannot do without: loading, and one forward of the prompt.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from bench.report import device_name, put_section
from generation.cases import CASES, CONTEXTS, LONG_LAYERS, Setting
from generation.report import Figures
from generation.requests import AFTER_CONTEXT, mixed
from generation.worker import PROMPT

from easytorch import bridge

SIZES = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32000,
}  # fmt: skip
QUICK = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip
DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # and what GGUF calls them
# Those of GGUF with fewer bits, and llama.cpp's names of the ones that it quantizes to.
FORMATS = {"q8_0": None, "q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0", "q4_k_m": "LLAMA_FTYPE_MOSTLY_Q4_K_M"}
WORKER = Path(__file__).resolve().parent / "generation" / "worker.py"
# Relative RMS error of the logits against float32's: llama.cpp keeps keys and values in float16.
TOLERANCE = {"float32": 5e-3, "bfloat16": 5e-2, "float16": 1e-2, "q8_0": 5e-2, "q4_0": 0.8, "q4_k_m": 0.8}


class Worker:
    """A process that loads one model and answers requests, one line of JSON each."""

    def __init__(self, program: str, model: Path, dtype: str, options: argparse.Namespace) -> None:
        command = [sys.executable, str(WORKER), program, str(model), dtype, str(options.threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
        self._name = f"{program} {dtype}"
        self._process = subprocess.Popen(
            [*command, str(options.positions), *["small"] * options.quick],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def ask(self, request: str, number: int = 0) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([request, number]) + "\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline()
        if not reply:
            raise SystemExit(f"{self._name} ended with status {self._process.wait()}; its messages are above")
        return json.loads(reply)

    def close(self) -> None:
        """Ends the process: it does when its input does."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def write_checkpoint(folder: Path, sizes: dict[str, int], positions: int) -> dict[str, int]:
    """A Llama of random float32 weights; how many weights a token reads, and how many of them are in the layers."""

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **sizes, max_position_embeddings=positions, pad_token_id=0, bos_token_id=None, eos_token_id=None
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    layers = sum(weight.numel() for weight in model.model.layers.parameters())
    return {"read": layers + model.lm_head.weight.numel(), "layers": layers}


def gguf(folder: Path, format_: str) -> Path:
    """The file of the model in `folder`, written by the bridge, and where llama.cpp alone can by that."""
    file = folder / f"{format_}.gguf"
    quantized = FORMATS.get(format_)
    if file.exists():
        return file
    if quantized is None:
        bridge.convert(folder / "model", file, to="gguf", dtype=format_)
        return file
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, quantized)
    source = gguf(folder, "f32")
    if llama_cpp.llama_model_quantize(bytes(source), bytes(file), settings):
        raise SystemExit(f"llama.cpp does not quantize {source.name} to {format_}")
    return file


def start_workers(folder: Path, dtype: str, options: argparse.Namespace) -> dict[str, Worker]:
    """By the name of the row; what has fewer bits than `dtype` is a file that both programs run."""
    workers = {}
    if "llama.cpp" in options.programs:
        workers["llama.cpp"] = Worker("llama.cpp", gguf(folder, DTYPES[dtype]), dtype, options)
    for format_ in options.formats:
        for program in ("llama.cpp", "easytorch"):
            if program in options.programs:
                workers[f"{program} {format_}"] = Worker(program, gguf(folder, format_), dtype, options)
    for program in ("transformers", "easytorch"):
        if program in options.programs:
            workers[program] = Worker(program, folder / "model", dtype, options)
    return workers


def compare(workers: dict[str, Worker], dtype: str) -> None:
    """`SystemExit` unless all programs compute the same model, up to the rounding of their formats."""
    logits = {name: torch.tensor(worker.ask("logits", PROMPT), dtype=torch.float64) for name, worker in workers.items()}
    whole = logits["transformers"] if "transformers" in logits else next(iter(logits.values()))
    for name, found in logits.items():
        format_ = name.partition(" ")[2]
        expected, limit = whole, TOLERANCE.get(format_, TOLERANCE[dtype])
        if name.startswith("easytorch ") and f"llama.cpp {format_}" in logits:  # of the same file
            expected, limit = logits[f"llama.cpp {format_}"], TOLERANCE["bfloat16"]
        error = float((found - expected).norm() / expected.norm())
        if not error <= limit:
            raise SystemExit(f"{name} {dtype}: its logits differ by {error:.2g}, more than {limit:.2g}: another model")


def measure(workers: dict[str, Worker], dtype: str, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Row -> for each round the seconds of generation and of prefill; `machine` gives the rates of memory and GEMM."""
    requests: dict[str, Callable[[Worker], float]] = {
        "generate": lambda worker: worker.ask("generate", options.tokens) / options.tokens,
        "prefill": lambda worker: worker.ask("prefill", options.prefill) / options.prefill,
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    for worker in workers.values():  # what a first call sets up is not a token's
        worker.ask("generate", 2)
        worker.ask("prefill", options.prefill)
    for number in range(options.rounds):
        for name in list(workers)[:: 1 if number % 2 else -1]:
            found[name].append({what: ask(workers[name]) for what, ask in requests.items()})
        print(f"{dtype}: round {number + 1} of {options.rounds}", file=sys.stderr)
    return found


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A word for each token, so that what is generated has a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{token}": token for token in range(vocabulary)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0").save_pretrained(folder)


def run_case(options: argparse.Namespace, folder: Path, versions: dict[str, str]) -> None:
    """One of `CASES`, with a model and files of its own."""
    sizes = QUICK if options.quick else SIZES
    if options.case == "long":
        sizes = sizes | {"num_hidden_layers": min(LONG_LAYERS, sizes["num_hidden_layers"])}
    write_checkpoint(folder / "model", sizes, options.positions)
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())

    if "llama.cpp" in options.programs:  # before there is a tokenizer, which GGUF would hold
        for dtype in options.dtypes:
            gguf(folder, DTYPES[dtype])
    write_tokenizer(folder / "model", sizes["vocab_size"])
    print(
        f"{device_name(torch.device('cpu'))}, {options.threads} threads, load {load} before, medians of "
        f"{options.rounds} rounds. {', '.join(f'{name} {number}' for name, number in versions.items())}.\n"
    )
    for dtype in options.dtypes:
        start = lambda program, model, dtype=dtype: Worker(program, model, dtype, options)  # noqa: E731
        setting = Setting(options, dtype, folder / "model", start, lambda dtype=dtype: gguf(folder, DTYPES[dtype]))
        for found in CASES[options.case](setting):
            print(found.markdown(), flush=True)


def positions_of(options: argparse.Namespace) -> int:
    """How many a model must have."""
    if options.case == "long":
        return max(options.contexts) + 2 * AFTER_CONTEXT
    if options.case is not None:
        return max(2048, *(len(one.prompt) + one.new for one in mixed(options.requests, small=False)))
    return max(options.prefill, PROMPT + options.tokens)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    programs = ("easytorch", "transformers", "llama.cpp")
    parser.add_argument("--case", choices=list(CASES), help="one of the others, in place of the table")
    parser.add_argument("--requests", type=int, default=16, help="of the cases batch, prefix and server")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), help="of the case long")
    parser.add_argument("--programs", nargs="+", choices=programs, default=list(programs))
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["bfloat16", "float32"])
    parser.add_argument("--formats", nargs="*", choices=list(FORMATS), default=[], help="of GGUF files, beside")
    parser.add_argument("--tokens", type=int, default=32, help="that are generated")
    parser.add_argument("--prefill", type=int, default=1024, help="tokens of the prompt that is timed alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a tiny model, few tokens, one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every measurement")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the table, between a page's marks")
    options = parser.parse_args()
    if min(options.contexts) < 1:
        parser.error(f"--contexts must be at least 1, got {min(options.contexts)}")
    for name in ("tokens", "prefill", "rounds", "threads", "requests"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.quick:
        options.tokens, options.prefill, options.rounds, options.contexts = 4, 32, 1, [64]
    if "llama.cpp" in options.programs and importlib.util.find_spec("llama_cpp") is None:
        print("llama.cpp is left out: it is not installed (pip install llama-cpp-python)", file=sys.stderr)
        options.programs.remove("llama.cpp")
        if wanted := [one for one in options.formats if FORMATS[one]]:
            parser.error(f"--formats {' '.join(wanted)} needs llama.cpp, which writes these files")
    if not options.programs:
        parser.error("there is no program to measure")
    options.positions = positions_of(options)
    return options


def main() -> None:
    options = arguments()
    packages = {"easytorch": "torch", "transformers": "transformers", "llama.cpp": "llama-cpp-python"}
    versions = {name: version(name) for name in dict.fromkeys(["torch", *(packages[p] for p in options.programs)])}
    with tempfile.TemporaryDirectory(prefix="bench_generation") as temporary:
        folder = Path(temporary)
        if options.case is not None:
            run_case(options, folder, versions)
            return
        weights = write_checkpoint(folder / "model", QUICK if options.quick else SIZES, options.positions)
        device = device_name(torch.device("cpu"))
        figures = Figures(device, options.threads, options.tokens, options.prefill, weights, versions, os.getloadavg())
        for dtype in options.dtypes:
            workers = start_workers(folder, dtype, options)
            try:
                compare(workers, dtype)
                machine = {"machine": Worker("machine", folder, dtype, options)}
                workers.update(machine)
                figures.rounds[dtype] = measure(workers, dtype, options)
                if options.json is not None:  # as far as it got: a long run may be cut off
                    options.json.write_text(figures.to_json() + "\n")
            finally:
                for worker in workers.values():
                    worker.close()
    print(figures.markdown())
    if options.markdown is not None:
        put_section(options.markdown, "bench_generation", figures.markdown())


if __name__ == "__main__":
    main()
