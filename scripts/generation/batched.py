"""Programs that serve many requests at once, for scripts/generation/worker.py: each runs all of `Work` and returns."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from generation.requests import WORK, Work

ROOT = Path(__file__).resolve().parents[2]


class Batched(ABC):
    """Answers [case, count]: the seconds for its requests. small: `--quick`'s."""

    def __init__(self, *, small: bool) -> None:
        self._small = small

    @abstractmethod
    def run(self, work: Sequence[Work]) -> list[int]:
        """How many tokens each of the requests got."""

    def measure(self, request: str, number: int) -> float:
        work = WORK[request](number, small=self._small)
        start = time.perf_counter()
        found = self.run(work)
        seconds = time.perf_counter() - start
        if found != [one.new for one in work]:
            raise SystemExit(f"{type(self).__name__}: {found} tokens in place of {[one.new for one in work]}")
        return seconds


class OurEngine(Batched):
    def __init__(self, folder: str, dtype: str, *, small: bool, prefix_reuse: bool = True) -> None:
        super().__init__(small=small)
        from transformers import AutoTokenizer

        import easytorch
        from easytorch.generation.engine import LLM, SamplingParams

        self._params = SamplingParams
        model = easytorch.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self._llm = LLM(model, tokenizer, prefix_reuse=prefix_reuse, max_memory=1 << (24 if small else 31))

    def run(self, work: Sequence[Work]) -> list[int]:
        self._llm.engine.reset_prefix_cache()
        params = [self._params(temperature=0, max_tokens=one.new, ignore_eos=True) for one in work]
        outputs = self._llm.generate([one.prompt for one in work], params)
        return [len(output.outputs[0].token_ids) for output in outputs]


class ContinuousBatching(Batched):
    """transformers' own, of its own class."""

    def __init__(self, folder: str, dtype: str, *, small: bool) -> None:
        super().__init__(small=small)
        import transformers

        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self._settings = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run(self, work: Sequence[Work]) -> list[int]:
        from transformers import ContinuousBatchingConfig

        pages = -(-sum(len(one.prompt) + one.new + 256 for one in work) // 256)
        config = ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=2048)
        manager = self._model.init_continuous_batching(self._settings, continuous_batching_config=config)
        manager.start()
        try:
            names = [manager.add_request(list(one.prompt), max_new_tokens=one.new) for one in work]
            found: dict[str, int] = {}
            while len(found) < len(names):
                result = manager.get_result(timeout=1)
                if result is None:
                    if not manager.is_running():
                        raise SystemExit("transformers' continuous batching ended before its requests did")
                    continue
                if result.error is not None:
                    raise SystemExit(f"transformers' continuous batching: {result.error}")
                if result.is_finished():
                    found[result.request_id] = len(result.generated_tokens)
        finally:
            manager.stop(block=True)
        return [found[name] for name in names]


class LlamaSlots(Batched):
    """llama.cpp's batches by its C interface, as llama-server fills its slots: a token of each sequence, then prompts.

    llama-cpp-python's own server has one sequence, and does not carry llama-server.
    """

    def __init__(self, file: str, threads: int, *, small: bool) -> None:
        super().__init__(small=small)
        import llama_cpp

        self._api: Any = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)  # kept: C calls it
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._threads, self._step = threads, 2048

    def run(self, work: Sequence[Work]) -> list[int]:
        api = self._api
        settings = api.llama_context_default_params()
        settings.n_ctx = sum(len(one.prompt) + one.new for one in work) + 256
        settings.n_batch, settings.n_seq_max, settings.kv_unified = self._step, len(work), True
        settings.n_threads = settings.n_threads_batch = self._threads
        context = api.llama_init_from_model(self._model, settings)
        if not context:
            raise SystemExit("llama.cpp makes no context for these requests")
        batch = api.llama_batch_init(self._step, 0, 1)
        texts, done, made = [list(one.prompt) for one in work], [0] * len(work), [0] * len(work)
        try:
            while any(count < one.new for count, one in zip(made, work, strict=True)):
                wanted = self._fill(
                    batch, texts, done, [place for place, one in enumerate(work) if made[place] < one.new]
                )
                if status := api.llama_decode(context, batch):
                    raise SystemExit(f"llama_decode of {batch.n_tokens} tokens gives status {status}")
                for row, place in wanted:
                    texts[place].append(self._argmax(context, row))
                    made[place] += 1
        finally:
            api.llama_batch_free(batch)
            api.llama_free(context)
        return made

    def _fill(self, batch: Any, texts: list[list[int]], done: list[int], active: list[int]) -> list[tuple[int, int]]:
        """Puts what is not computed yet into the batch; (row, sequence) of each that gets a token."""
        batch.n_tokens, wanted = 0, []
        for place in sorted(active, key=lambda place: len(texts[place]) - done[place]):
            chunk = texts[place][done[place] : done[place] + self._step - batch.n_tokens]
            for offset, token in enumerate(chunk):
                row = batch.n_tokens
                batch.token[row], batch.pos[row] = token, done[place] + offset
                batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, place, False
                batch.n_tokens += 1
            done[place] += len(chunk)
            if chunk and done[place] == len(texts[place]):
                batch.logits[batch.n_tokens - 1] = True
                wanted.append((batch.n_tokens - 1, place))
        return wanted

    def _argmax(self, context: Any, row: int) -> int:
        address = ctypes.cast(
            self._api.llama_get_logits_ith(context, row), ctypes.POINTER(ctypes.c_float * self._vocabulary)
        )
        return int(torch.frombuffer(address.contents, dtype=torch.float32).argmax())


class OurServer(Batched):
    """`easytorch serve` in a process of its own, asked over HTTP; streams: every answer is a stream of events."""

    def __init__(self, folder: str, dtype: str, threads: int, *, small: bool, streams: bool) -> None:
        super().__init__(small=small)
        self._streams = streams
        self._log = Path(tempfile.mkstemp(prefix="bench_generation", suffix=".log")[1])
        options = {"port": 0, "served-model-name": "bench", "dtype": dtype, "max-memory": 0.02 if small else 2}
        given = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
        with self._log.open("wb") as log:
            # without prefixes of the rounds before
            command = [sys.executable, "-m", "easytorch", "serve", folder, *given, "--no-prefix-reuse"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        while (found := re.search(r"http://127\.0\.0\.1:(\d+)", self._log.read_text())) is None:
            if self._process.poll() is not None:
                raise SystemExit(f"the server ended:\n{self._log.read_text()}")
            time.sleep(0.05)
        self._port = int(found[1])

    def run(self, work: Sequence[Work]) -> list[int]:
        async def all_of_them() -> list[int]:
            return list(await asyncio.gather(*map(self._ask, work)))

        return asyncio.run(all_of_them())

    async def _ask(self, work: Work) -> int:
        more = {"stream": True, "stream_options": {"include_usage": True}} if self._streams else {}
        body = {"model": "bench", "prompt": work.prompt, "max_tokens": work.new, "temperature": 0, "ignore_eos": True}
        content = json.dumps(body | more).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = (
            f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        writer.write(head.encode() + content)
        raw = await reader.read()
        writer.close()
        found = re.findall(rb'"completion_tokens": ?(\d+)', raw)
        if not found:
            raise SystemExit(f"the server answers {raw[:300]!r}")
        return int(found[-1])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.unlink()
