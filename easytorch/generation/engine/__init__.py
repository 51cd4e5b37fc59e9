"""Continuous batching of many requests over pages, by vLLM's names.

params.py     `SamplingParams`: the sampling settings of a request
request.py    `Request`: the state of one continuation
outputs.py    `RequestOutput`: what users get of it
pages.py      `PagePool`: pages in use, and free ones whose contents are cached
prefix.py     hashes of pages, by which prompts with a common prefix share them
scheduler.py  `Scheduler`: what runs in the next step, and which request is preempted
sampler.py    the next token of each request
stop.py       text up to a stop string
structured.py text that follows a JSON schema, a regular expression, a choice or a grammar
supported.py  which models are supported
memory.py     how many pages the cache has
engine.py     `Engine`: add_request, step, stream, abort
llm.py        `LLM`: generate, chat
"""

from easytorch.generation.engine.engine import Engine, EngineStats
from easytorch.generation.engine.llm import LLM
from easytorch.generation.engine.outputs import CompletionOutput, Logprob, RequestOutput
from easytorch.generation.engine.params import RequestOutputKind, SamplingParams
from easytorch.generation.engine.structured import StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineStats",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
