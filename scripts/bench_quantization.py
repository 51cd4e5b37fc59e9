"""The accuracy of quantized weights: perplexity of the demo's Llama on held-out text, cosine similarity of MiniLM.

    easytorch demo                                              # trains the Llama, in easytorch-demo/llama
    python scripts/bench_quantization.py                        # prints the table
    python scripts/bench_quantization.py --markdown docs/protocol.md

Every format of `quantize`, beside torchao's of the same bits (`pip install torchao`) and llama.cpp's (`pip install
llama-cpp-python`), whose files its own quantizer makes; they are run by llama.cpp and, loaded in their blocks, by us.
Packages that are not installed are left out. Activations are float32, but for the row "bfloat16". MiniLM's score is
the mean over the demo's sentences of cos(embedding, float32's embedding); its 384 columns are no multiple of 256, the
block of K-quants.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from bench.report import put_section

import easytorch
from easytorch import bridge, protocol
from easytorch.cli.demo.sentences import SENTENCES, find_weights, sentence_embeddings
from easytorch.layers.quantized import QuantizedLinear
from easytorch.training.data import TokenBlocks

# format, its settings, and torchao's config of the same bits
OURS: tuple[tuple[str, dict[str, Any], str | None], ...] = (
    ("int8", {"group_size": -1}, "int8 rows"),
    ("int8", {"group_size": 32}, "int8 groups"),
    ("int4", {"group_size": 32}, "int4 groups"),
    ("affine", {"group_size": 32}, "int4 zeros"),
    ("int4", {"group_size": 128}, None),
    ("nf4", {}, None),
    ("fp8", {}, "fp8 rows"),
    ("mxfp8", {}, None),
    ("mxfp4", {}, None),
    ("nvfp4", {}, None),
    ("ternary", {}, None),
)
# llama.cpp's number of a file (LLAMA_FTYPE_MOSTLY_*), and whether MiniLM's widths fit its blocks
LLAMA_CPP = {"Q8_0": (7, True), "Q6_K": (18, False), "Q4_K_M": (15, False), "Q4_0": (2, True)}


def torchao_config(name: str) -> Any:
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        MappingType,
        PerGroup,
        PerRow,
    )

    if name.startswith("int8"):
        return Int8WeightOnlyConfig(granularity=PerRow() if name.endswith("rows") else PerGroup(32))
    if name == "fp8 rows":
        return Float8WeightOnlyConfig()
    mapping = MappingType.ASYMMETRIC if name.endswith("zeros") else MappingType.SYMMETRIC
    return IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32), mapping_type=mapping)


class Text:
    """Held-out blocks of tokens, (N, T)."""

    def __init__(self, checkpoint: Path, blocks: int) -> None:
        stated = json.loads((checkpoint.parent / "training.json").read_text(encoding="utf-8"))
        tokens = TokenBlocks(
            checkpoint.parent / "data" / "tokens.npy", stated["block_size"], stated.get("eval_fraction", 0.05)
        )
        count = min(blocks, tokens.eval_count)
        self.blocks = tokens.batch(range(tokens.train_count, tokens.train_count + count))

    def perplexity(self, logits: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """logits: (B, T) -> (B, T, V)."""
        total = 0.0
        for part in self.blocks.split(8):
            found = logits(part)[:, :-1].float()
            total += float(
                torch.nn.functional.cross_entropy(found.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
            )
        return math.exp(total / self.blocks[:, 1:].numel())


def of_model(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    model.eval()

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = model(tokens).logits
            return found

    return logits


class Sentences:
    """The demo's sentences by MiniLM, and the embeddings of float32."""

    def __init__(self) -> None:
        self.folder = find_weights()
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder)
        self._inputs = dict(tokenizer(list(SENTENCES), padding=True, return_tensors="pt"))
        self._right = self.embeddings(easytorch.AutoModel.from_pretrained(self.folder, dtype=torch.float32))

    def embeddings(self, model: Any) -> torch.Tensor:
        with torch.inference_mode():
            hidden = model.eval()(**self._inputs).last_hidden_state.float()
        return sentence_embeddings(hidden, self._inputs["attention_mask"])

    def similarity(self, model: Any) -> float:
        return float((self.embeddings(model) * self._right).sum(-1).mean())


def bits(model: Any) -> float:
    """Bits per weight of the quantized layers."""
    layers = [one for one in model.modules() if isinstance(one, QuantizedLinear)]
    stored = sum(buffer.numel() * buffer.element_size() for one in layers for buffer in one.buffers())
    return 8 * stored / sum(one.in_features * one.out_features for one in layers)


def rows(llama: Path, text: Text, sentences: Sentences, folder: Path) -> Iterator[tuple[str, ...]]:
    causal, encoder = easytorch.AutoModelForCausalLM, easytorch.AutoModel
    for dtype in (torch.float32, torch.bfloat16):
        found = text.perplexity(of_model(causal.from_pretrained(llama, dtype=dtype)))
        near = sentences.similarity(encoder.from_pretrained(sentences.folder, dtype=dtype))
        yield str(dtype).removeprefix("torch."), f"{dtype.itemsize * 8}", f"{found:.3f}", f"{near:.5f}", "", ""
    has_torchao = importlib.util.find_spec("torchao") is not None
    for name, settings, theirs in OURS:
        model = protocol.quantize(causal.from_pretrained(llama, dtype=torch.float32), name, **settings)
        small = protocol.quantize(encoder.from_pretrained(sentences.folder, dtype=torch.float32), name, **settings)
        size = settings.get("group_size")
        label = name if size is None else f"{name}, {'rows' if size == -1 else f'groups of {size}'}"
        own = f"{bits(model):.2f}", f"{text.perplexity(of_model(model)):.3f}", f"{sentences.similarity(small):.5f}"
        other = ("", "")
        if theirs is not None and has_torchao:
            other = with_torchao(llama, text, sentences, torchao_config(theirs))
        yield label, *own, *(f"torchao {one}" if one else "" for one in other)
    if importlib.util.find_spec("llama_cpp") is None:
        return
    plain = {"llama": llama, "minilm": sentences.folder}
    for name, path in plain.items():
        bridge.convert(path, folder / name, to="gguf", dtype="f32")
    for kind, (number, fits) in LLAMA_CPP.items():
        file = quantized_file(folder / "llama" / "model.gguf", folder / f"llama-{kind}.gguf", number)
        model = causal.from_pretrained(llama, gguf_file=str(file), dtype=torch.float32)
        found, right = text.perplexity(of_model(model)), text.perplexity(LlamaCpp(file, text.blocks.shape[1]).logits)
        near = ""
        if fits:
            file = quantized_file(folder / "minilm" / "model.gguf", folder / f"minilm-{kind}.gguf", number)
            small = encoder.from_pretrained(sentences.folder, gguf_file=str(file), dtype=torch.float32)
            near = f"{sentences.similarity(small):.5f}"
        yield f"GGUF {kind}", f"{bits(model):.2f}", f"{found:.3f}", near, f"llama.cpp {right:.3f}", ""


def with_torchao(llama: Path, text: Text, sentences: Sentences, config: Any) -> tuple[str, str]:
    """torchao's perplexity and similarity, of transformers' models, without the head."""
    from torchao.quantization import quantize_

    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    quantize_(model.model, config)
    small = transformers.AutoModel.from_pretrained(sentences.folder, dtype=torch.float32).eval()
    quantize_(small, config)
    with torch.no_grad():  # torchao's tensors take no inference mode
        found = text.perplexity(lambda tokens: model(tokens).logits)
    return f"{found:.3f}", f"{sentences.similarity(small):.5f}"


def quantized_file(source: Path, target: Path, number: int) -> Path:
    """`source` in llama.cpp's file type `number`, by its own quantizer."""
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = number
    silence()
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(settings)):
        raise SystemExit(f"llama.cpp does not quantize {source}")
    return target


_KEPT: list[Any] = []


def silence() -> None:
    """llama.cpp's log goes nowhere; C keeps calling the function, which therefore stays."""
    import llama_cpp

    if not _KEPT:
        _KEPT.append(llama_cpp.llama_log_callback(lambda level, text, data: None))
        llama_cpp.llama_log_set(_KEPT[0], ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()


class LlamaCpp:
    """A GGUF file in llama.cpp, which gives the logits of every token."""

    def __init__(self, file: Path, positions: int) -> None:
        import llama_cpp

        silence()
        self._api: Any = llama_cpp
        self._model = llama_cpp.llama_model_load_from_file(
            str(file).encode(), llama_cpp.llama_model_default_params()
        )  # fmt: skip
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = positions
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._one(row) for row in tokens.tolist()])

    def _one(self, tokens: list[int]) -> torch.Tensor:
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), False)
        batch = api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, place
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, 1
        if api.llama_decode(self._context, batch):
            raise SystemExit("llama_decode fails")
        count = len(tokens) * self._vocabulary
        address = ctypes.cast(api.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float * count))
        found = torch.frombuffer(address.contents, dtype=torch.float32).reshape(len(tokens), -1).clone()
        api.llama_batch_free(batch)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, help="a checkpoint that `easytorch train` wrote; else the demo's")
    parser.add_argument("--blocks", type=int, default=100, help="held-out blocks of text")
    parser.add_argument("--markdown", type=Path, help="the page whose section the table replaces")
    given = parser.parse_args()
    llama = given.llama
    if llama is None:
        found = sorted(Path("easytorch-demo/llama").glob("checkpoint-*"), key=lambda one: int(one.name.split("-")[1]))
        if not found:
            raise SystemExit("there is no easytorch-demo/llama: run `easytorch demo`, or give --llama")
        llama = found[-1]
    text = Text(llama, given.blocks)
    packages = [name for name in ("torch", "torchao", "llama_cpp_python") if importlib.util.find_spec(module(name))]
    lines = [
        f"{text.blocks.numel()} held-out tokens; {', '.join(f'{name} {version(name)}' for name in packages)}.",
        "",
        "| Weights | Bits a number | Perplexity | MiniLM's similarity | Perplexity elsewhere | Similarity elsewhere |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(llama, text, Sentences(), Path(folder)):
            lines.append(f"| {' | '.join(row)} |")
            print(lines[-1], flush=True)
    if given.markdown is not None:
        put_section(given.markdown, "bench_quantization", "\n".join(lines))


def module(package: str) -> str:
    return {"llama_cpp_python": "llama_cpp"}.get(package, package)


if __name__ == "__main__":
    main()
