"""One program with one model, for scripts/bench_generation.py: answers a line of JSON for each it is given.

    python scripts/generation/worker.py PROGRAM MODEL DTYPE THREADS POSITIONS [small]

["logits", n]: of the last of n tokens. ["generate", n]: seconds for n tokens after a prompt. ["prefill", n]: seconds
for the logits of the last of n tokens. ["long", n]: seconds for a few tokens after a context of n, which is computed
once. Programs that serve many requests (batched.py) answer [case, n]: seconds for its n requests. It ends with its
input.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from generation.batched import Batched, ContinuousBatching, LlamaSlots, OurEngine, OurServer
from generation.requests import AFTER_CONTEXT

PROMPT = 16
# Bytes that no cache of the CPU holds, and the side of a product that is bound by arithmetic.
READ_BYTES, GEMM = 2**28, 1024


def prompt(length: int) -> list[int]:
    """Token ids that every model has."""
    return [2 + 7 * index % 61 for index in range(length)]


class Program(ABC):
    @abstractmethod
    def logits(self, tokens: int) -> list[float]: ...

    @abstractmethod
    def generate(self, tokens: int) -> None: ...

    @abstractmethod
    def prefill(self, tokens: int) -> None: ...

    def begin(self, context: int) -> int:
        """Computes a context, unless that was done, and one token after it, which is returned."""
        raise NotImplementedError(f"{type(self).__name__} has no long contexts")

    def go_on(self, token: int) -> int:
        """One more token."""
        raise NotImplementedError(f"{type(self).__name__} has no long contexts")

    def measure(self, request: str, number: int) -> Any:
        if request == "logits":
            return self.logits(number)
        if request == "long":
            token = self.begin(number)
            start = time.perf_counter()
            for _ in range(AFTER_CONTEXT):
                token = self.go_on(token)
            return time.perf_counter() - start
        start = time.perf_counter()
        {"generate": self.generate, "prefill": self.prefill}[request](number)
        return time.perf_counter() - start


class TorchModel(Program):
    """EasyTorch and transformers: the same calls."""

    def __init__(self, library: str, folder: str, dtype: str) -> None:
        source, file = __import__(library), Path(folder)
        given: dict[str, Any] = {"gguf_file": file.name} if file.suffix == ".gguf" else {}
        self._model = source.AutoModelForCausalLM.from_pretrained(
            file.parent if given else file, dtype=getattr(torch, dtype), **given
        ).eval()
        self._cache: Any = None
        self._last = 0

    def logits(self, tokens: int) -> list[float]:
        ids = torch.tensor([prompt(tokens)])
        with torch.inference_mode():
            output = self._model(ids, use_cache=True, logits_to_keep=1)
        numbers: list[float] = output.logits[0, -1].float().tolist()
        return numbers

    def prefill(self, tokens: int) -> None:
        with torch.inference_mode():
            self._model(torch.tensor([prompt(tokens)]), use_cache=True, logits_to_keep=1)

    def generate(self, tokens: int) -> None:
        ids = torch.tensor([prompt(PROMPT)])
        mask = torch.ones_like(ids)
        self._model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )  # fmt: skip

    def begin(self, context: int) -> int:
        from transformers import DynamicCache

        if self._cache is None:
            self._cache = DynamicCache(config=self._model.config)
            self._last = self._forward(prompt(context))
        if more := self._cache.get_seq_length() - context:
            self._cache.crop(-more)
        return self.go_on(self._last)

    def go_on(self, token: int) -> int:
        return self._forward([token])

    def _forward(self, tokens: list[int]) -> int:
        with torch.inference_mode():
            output = self._model(torch.tensor([tokens]), past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())


class LlamaCpp(Program):
    """llama.cpp through its C interface, as `llama-bench` calls it; the next token is the largest logit's."""

    def __init__(self, file: str, threads: int, positions: int) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)  # kept: C calls it
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp does not load {file}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch = positions, positions
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._context_length = self._last = 0
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def _decode(self, tokens: list[int]) -> torch.Tensor:
        """(V,): the logits of the last token, without a copy."""
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        status = self._api.llama_decode(self._context, self._api.llama_batch_get_one(ids, len(tokens)))
        if status:
            raise SystemExit(f"llama_decode of {len(tokens)} tokens gives status {status}")
        row = self._api.llama_get_logits_ith(self._context, -1)
        address = ctypes.cast(row, ctypes.POINTER(ctypes.c_float * self._vocabulary))
        return torch.frombuffer(address.contents, dtype=torch.float32)

    def _forget(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)

    def logits(self, tokens: int) -> list[float]:
        self._forget()
        numbers: list[float] = self._decode(prompt(tokens)).tolist()
        return numbers

    def prefill(self, tokens: int) -> None:
        self._forget()
        self._decode(prompt(tokens))

    def generate(self, tokens: int) -> None:
        self._forget()
        next_ = prompt(PROMPT)
        for _ in range(tokens):
            next_ = [int(self._decode(next_).argmax())]

    def begin(self, context: int) -> int:
        if self._context_length != context:
            self._forget()
            self._last = int(self._decode(prompt(context)).argmax())
            self._context_length = context
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(self._context), 0, context, -1)
        return self.go_on(self._last)

    def go_on(self, token: int) -> int:
        return int(self._decode([token]).argmax())


class Machine(Program):
    """The machine's limits: `generate` reads READ_BYTES once a token, `prefill` multiplies GEMM^3 once a token."""

    def __init__(self, dtype: str) -> None:
        self._read = torch.ones(READ_BYTES // 4)
        self._factors = [torch.ones(GEMM, GEMM, dtype=getattr(torch, dtype)) for _ in range(2)]

    def logits(self, tokens: int) -> list[float]:
        raise NotImplementedError("a machine has no logits")

    def generate(self, tokens: int) -> None:
        for _ in range(tokens):
            self._read.max()

    def prefill(self, tokens: int) -> None:
        for _ in range(tokens):
            torch.mm(*self._factors)


def load(program: str, model: str, dtype: str, threads: int, positions: int, small: bool) -> Program | Batched:
    torch.set_num_threads(threads)
    if program.startswith("engine"):
        return OurEngine(model, dtype, small=small, prefix_reuse=program == "engine")
    if program.startswith("server"):
        return OurServer(model, dtype, threads, small=small, streams=program == "server-streams")
    if program == "continuous-batching":
        return ContinuousBatching(model, dtype, small=small)
    if program == "llama.cpp-slots":
        return LlamaSlots(model, threads, small=small)
    if program == "llama.cpp":
        return LlamaCpp(model, threads, positions)
    return Machine(dtype) if program == "machine" else TorchModel(program, model, dtype)


def main() -> None:
    name, model, dtype, threads, positions, *small = sys.argv[1:]
    # replies have the output to themselves: libraries print
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as replies, contextlib.redirect_stdout(sys.stderr):
        os.dup2(sys.stderr.fileno(), 1)
        program = load(name, model, dtype, int(threads), int(positions), bool(small))
        try:
            for line in sys.stdin:
                replies.write(json.dumps(program.measure(*json.loads(line))) + "\n")
                replies.flush()
        finally:
            if isinstance(program, OurServer):
                program.close()


if __name__ == "__main__":
    main()
