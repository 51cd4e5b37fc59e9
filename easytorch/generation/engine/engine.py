"""`Engine`: continuous batching, one step at a time."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from easytorch.cache import Chunk, RaggedPagesCache, RaggedStep, StateSlots
from easytorch.cache.arguments import positive
from easytorch.cache_names import cache_argument
from easytorch.generation.engine.decode_graphs import DecodeGraphs
from easytorch.generation.engine.logprobs import logprobs_of
from easytorch.generation.engine.memory import cache_sizes
from easytorch.generation.engine.outputs import Logprob, RequestOutput
from easytorch.generation.engine.pages import PagePool
from easytorch.generation.engine.params import SamplingParams
from easytorch.generation.engine.request import Request, token_sequences
from easytorch.generation.engine.sampler import sample
from easytorch.generation.engine.scheduler import ScheduledChunk, Scheduler
from easytorch.generation.engine.stop import StoppedText
from easytorch.generation.engine.structured import StructuredOutputs, StructuredText
from easytorch.generation.engine.supported import (
    cached_layers,
    empty_masks,
    max_sequence_length,
    page_size_refusal,
    refusal,
)
from easytorch.generation.text import LONE_SURROGATE, valid_text

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Sampled = tuple[Request, int, dict[int, Logprob] | None]
# For a model whose config states no maximum length.
_MOST_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters since construction; waiting, running and the counts of pages are current. captured_steps: those that
    replayed a CUDA graph."""

    waiting: int
    running: int
    num_pages: int
    free_pages: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int
    captured_steps: int


class Engine:
    """Continuous batching over pages: prompts and single tokens of all requests run in one call of the model.

    model: a native causal language model (docs/models.md); `ValueError` with the reason for one that the
    engine does not support. tokenizer: for prompts and outputs as text.
    max_memory: for keys, values and recurrent states; bytes as an int, or a share of the free memory as a float. By
    default half of it on a CPU, 0.9 elsewhere, and no more than all requests can fill.
    max_batch_tokens: tokens of a step. max_requests: requests that run at once; others wait. max_model_length: tokens
    of a request, prompt and output; by default what model and memory allow.
    prefix_reuse: share the pages of common prefixes of prompts; not for models with recurrent states.
    enforce_eager: on a GPU too run every step as it is; by default steps without prompts are CUDA graphs there.
    kv_cache_dtype: "auto", or the name of the model's dtype, which the pages have; another one is a `ValueError`.

    Not thread-safe: one thread calls it.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_memory: int | float | None = None,
        max_batch_tokens: int = 2048,
        max_requests: int = 256,
        max_model_length: int | None = None,
        page_size: int = 16,
        prefix_reuse: bool = True,
        enforce_eager: bool = False,
        kv_cache_dtype: str = "auto",
    ) -> None:
        if (reason := refusal(model)) is not None:
            raise ValueError(f"the engine does not support this model: {reason}")
        if kv_cache_dtype not in ("auto", own := str(model.dtype).removeprefix("torch.")):
            raise ValueError(
                f"kv_cache_dtype={kv_cache_dtype!r}: the pages hold keys and values in the model's dtype; "
                f"give 'auto' or {own!r}"
            )
        positive(max_batch_tokens=max_batch_tokens, max_requests=max_requests, page_size=page_size)
        if not isinstance(prefix_reuse, bool):
            raise ValueError(f"prefix_reuse={prefix_reuse!r} must be True or False")
        if not isinstance(enforce_eager, bool):
            raise ValueError(f"enforce_eager={enforce_eager!r} must be True or False")
        if (reason := page_size_refusal(model, page_size)) is not None:
            raise ValueError(reason)
        if max_model_length is not None:
            positive(max_model_length=max_model_length)
        self.model, self.tokenizer = model, tokenizer
        longest, why = max_sequence_length(model)
        if max_model_length is not None and longest is not None and max_model_length > longest:
            raise ValueError(f"max_model_length={max_model_length} is above the {longest} positions: {why}")
        layers = cached_layers(model)
        assert layers is not None
        sizes = cache_sizes(
            model, layers, max_memory, page_size, max_model_length or longest or _MOST_TOKENS, max_requests
        )
        metadata = sizes.metadata
        if max_model_length is not None and metadata.max_model_length < max_model_length:
            raise ValueError(
                f"a request of max_model_length={max_model_length} tokens takes {-(-max_model_length // page_size)} "
                f"pages of {metadata.page_bytes} bytes, and max_memory={max_memory!r} has {metadata.num_pages}"
            )
        self.max_model_length = metadata.max_model_length
        self._cache = RaggedPagesCache(metadata, model.device)
        self._pool = PagePool(metadata.num_pages)
        # one more for the rows of padding in a captured step
        self._states = StateSlots(sizes.num_slots + 1) if layers.has_states else None
        self._scheduler = Scheduler(
            self._pool, metadata.page_size, max_batch_tokens=max_batch_tokens, max_requests=sizes.num_slots,
            # a recurrent state covers all tokens before it, and none is kept at the end of a page
            prefix_reuse=prefix_reuse and self._states is None,
        )  # fmt: skip
        self._masks = empty_masks(model)
        self._cache_name = cache_argument(model.forward)
        self._graphs = DecodeGraphs(
            model, self._cache, self._states, self._masks, self._cache_name, enforce_eager=enforce_eager
        )
        self._vocabulary: int = model.get_input_embeddings().weight.shape[0]
        self._end_tokens = _end_tokens(model, tokenizer)
        self.structured_outputs = StructuredOutputs(tokenizer, self._vocabulary, self._end_tokens)
        self._requests: dict[str, Request] = {}
        self._not_returned: list[RequestOutput] = []  # of a step that was interrupted
        self._numbers = itertools.count()
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = self._steps = 0

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        index: int = 0,
        structure: StructuredText | None = None,
    ) -> str:
        """Puts a request into the queue, and returns its id: the given one, or a new one.

        prompt: text, or a list of tokens. index: the number of this continuation among the `params.n` of a prompt, each
        of which is a request of its own. structure: the compiled `params.structured_outputs`, which is copied; compiled
        here unless given. `ValueError` for what cannot be generated; nothing is queued then.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        if request_id is None:
            request_id = str(next(self._numbers))
            while request_id in self._requests:
                request_id = str(next(self._numbers))
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} exists already; request ids must be unique")
        tokens = self.truncated(self.tokens_of(prompt), params)
        max_length = self._max_length(len(tokens), params)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            given: Iterable[int] | None = getattr(params, name)
            if given and (wrong := [token for token in given if token >= self._vocabulary]):
                raise ValueError(f"{name} has token {wrong[0]}; the vocabulary has {self._vocabulary}")
        end_tokens = frozenset() if params.ignore_eos else self._end_tokens
        stop_tokens = frozenset(params.stop_token_ids or ())
        if params.min_tokens and params.allowed_token_ids and end_tokens | stop_tokens >= {*params.allowed_token_ids}:
            raise ValueError("allowed_token_ids has end and stop tokens alone, which min_tokens forbids at first")
        for name, texts in (("stop strings", params.stop_strings), ("bad_words", params.bad_words)):
            if texts and self.tokenizer is None:
                raise ValueError(f"{name} need a tokenizer, which the engine has not: give it one")
        if params.structured_outputs is None:
            structure = None
        elif structure is None:
            structure = self.structured_outputs.compile(params.structured_outputs)
        else:
            structure = structure.copy()
        seed = int(torch.randint(0, 2**31 - 1, ()).item()) if params.seed is None else params.seed + index
        text = None
        if self.tokenizer is not None and params.detokenize:
            text = StoppedText(
                self.tokenizer, params.stop_strings, include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )  # fmt: skip
        request = Request(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_length=len(tokens),
            tokens=tokens,
            params=params,
            seed=seed,
            max_length=max_length,
            end_tokens=end_tokens,
            stop_tokens=stop_tokens,
            bad_words=token_sequences(self.tokenizer, params.bad_words or ()),
            text=text,
            structure=structure,
            index=index,
        )
        self._requests[request_id] = request
        self._scheduler.add(request)
        self._prompt_tokens += len(tokens)
        return request_id

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """A prompt's tokens; `ValueError` for an empty one, and for tokens outside the vocabulary."""
        tokens: list[int]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("the engine has no tokenizer: give it one, or prompts as tokens")
            if not valid_text(prompt):
                raise ValueError(f"the prompt has {LONE_SURROGATE}")
            tokens = list(self.tokenizer(prompt)["input_ids"])
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
            tokens = [*prompt]
        else:
            raise ValueError(f"a prompt is text or a list of ints, not {type(prompt).__name__}: {prompt!r:.100}")
        if not tokens:
            raise ValueError("the prompt has no tokens; generation needs at least one to begin from")
        for token in tokens:
            if type(token) is not int or not 0 <= token < self._vocabulary:
                raise ValueError(f"the prompt has token {token!r}; tokens are ints from 0 to {self._vocabulary - 1}")
        return tokens

    def truncated(self, tokens: list[int], params: SamplingParams) -> list[int]:
        """The last of a prompt's tokens, as many as `params.truncate_prompt_tokens` keeps."""
        most = params.truncate_prompt_tokens
        if most is None:
            return tokens
        if most == -1:
            most = max(1, self.max_model_length - (1 if params.max_tokens is None else params.max_tokens))
        return tokens[-most:]

    def step(self) -> list[RequestOutput]:
        """Runs the model once and returns the outputs of the requests that got a token; [] when there is nothing to do.
        `SamplingParams.output_kind` says what they hold, and whether those that go on have any.

        A step that raises, or is interrupted, takes no token from a request: all of them are recomputed in the next
        one, which returns the outputs of those that had got theirs too.
        """
        try:
            chunks = self._scheduler.schedule()
            requests = [chunk.request for chunk in chunks if chunk.samples]
            sampled = self._run(chunks, requests)
            self._steps += bool(chunks)
            for request, token, given in sampled:
                if request.generated == 0:
                    self._cached_tokens += request.cached or 0
                if request.params.max_tokens == 0:
                    request.finish_reason = "length"
                else:
                    request.append(token, given)
                    self._generated_tokens += 1
                if request.finish_reason is not None:
                    self._drop(request)
                if (output := request.output()) is not None:
                    self._not_returned.append(output)
        except BaseException:
            self._scheduler.restart()  # the pages may be half written, and some requests be without their token
            raise
        outputs, self._not_returned = self._not_returned, []
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The outputs of one request, one for each token (or by `params.output_kind`); other queued requests run in the
        same steps.

        Closing the iterator before the end aborts the request.
        """
        if params is not None and params.n != 1:
            raise ValueError(f"streaming supports n=1 only, got n={params.n}")
        request_id = self.add_request(prompt, params)
        return self._outputs(request_id)

    def _outputs(self, request_id: str) -> Iterator[RequestOutput]:
        try:
            while request_id in self._requests:
                yield from (output for output in self.step() if output.request_id == request_id)
        finally:
            self.abort(request_id)

    def abort(self, request_id: str) -> bool:
        """Ends a request and frees its pages; False for an unknown id."""
        if (request := self._requests.get(request_id)) is None:
            return False
        request.finish_reason = "abort"
        self._drop(request)
        return True

    def abort_all(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache; call it after the model's weights have changed."""
        if self._requests:
            raise ValueError(f"{len(self._requests)} requests are running or queued; wait for them or abort them first")
        self._pool.clear_cache()

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, summed over layers."""
        return self._cache.metadata.page_bytes

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @property
    def eager_reason(self) -> str | None:
        """Why steps without prompts are no CUDA graphs; None where they are."""
        return self._graphs.reason

    def stats(self) -> EngineStats:
        return EngineStats(
            waiting=len(self._scheduler.waiting),
            running=len(self._scheduler.running),
            num_pages=len(self._pool),
            free_pages=self._pool.free,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._scheduler.preemptions,
            steps=self._steps,
            captured_steps=self._graphs.replays,
        )

    @torch.inference_mode()
    def _run(self, chunks: Sequence[ScheduledChunk], requests: Sequence[Request]) -> list[Sampled]:
        """The next tokens of `requests`, which are those of the chunks with `samples`."""
        if not chunks:
            return []
        parts = [Chunk(chunk.request.pages, chunk.start, chunk.end, chunk.request.slot) for chunk in chunks]
        tokens = [token for chunk in chunks for token in chunk.request.tokens[chunk.start : chunk.end]]
        decodes = len(requests) == len(chunks) and not any(chunk.scored for chunk in chunks)
        if decodes and (captured := self._graphs.logits(parts, tokens)) is not None:
            return self._sample(captured, requests)
        step = RaggedStep(self._cache, parts, self._states)
        ends = list(itertools.accumulate(chunk.end - chunk.start for chunk in chunks))
        wanted = [end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.samples]
        # a position's row among all chunks' tokens is its distance from the end of its chunk
        scored = [
            (chunk.request, end - chunk.end, at) for chunk, end in zip(chunks, ends, strict=True) for at in chunk.scored
        ]
        wanted += [offset + at for _, offset, at in scored]
        device = self._cache.device
        output = self.model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=step.positions,
            attention_mask=self._masks,
            use_cache=True,
            logits_to_keep=torch.tensor(wanted, dtype=torch.int64, device=device),
            **{self._cache_name: step},
        )
        logits, of_prompts = output.logits[0].split([len(requests), len(scored)])
        self._score(of_prompts, [(request, at + 1) for request, _, at in scored])
        return self._sample(logits, requests)

    def _sample(self, logits: Tensor, requests: Sequence[Request]) -> list[Sampled]:
        """logits (B, V) after the last tokens of B requests."""
        tokens = sample(logits, requests) if requests else []
        most = [request.params.logprobs for request in requests]
        return list(zip(requests, tokens, logprobs_of(logits, tokens, most, self.tokenizer), strict=True))

    def _score(self, logits: Tensor, scored: Sequence[tuple[Request, int]]) -> None:
        """logits (B, V) of the positions before B tokens of prompts, each given by its request and position."""
        tokens = [request.tokens[position] for request, position in scored]
        most = [request.params.prompt_logprobs for request, _ in scored]
        for (request, _), found in zip(scored, logprobs_of(logits, tokens, most, self.tokenizer), strict=True):
            request.prompt_logprobs.append(found)

    def _drop(self, request: Request) -> None:
        self._scheduler.remove(request)
        del self._requests[request.request_id]

    def _max_length(self, prompt_length: int, params: SamplingParams) -> int:
        room = self.max_model_length - prompt_length
        if room < 0 or (room == 0 and params.max_tokens != 0):
            raise ValueError(
                f"the prompt has {prompt_length} tokens, and a request at most {self.max_model_length}, one of which "
                "must be new; shorten the prompt"
            )
        if params.max_tokens is None:
            return self.max_model_length
        if params.max_tokens > room:
            raise ValueError(
                f"the prompt has {prompt_length} tokens and max_tokens={params.max_tokens} follow, which is more than "
                f"the {self.max_model_length} of a request; shorten the prompt or lower max_tokens"
            )
        return prompt_length + params.max_tokens


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Those of the model's generation config, else the tokenizer's."""
    given = getattr(model.generation_config, "eos_token_id", None)
    if given is None and tokenizer is not None:
        given = tokenizer.eos_token_id
    if given is None:
        return frozenset()
    return frozenset([given] if isinstance(given, int) else given)
