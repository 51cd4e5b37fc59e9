"""Many requests through one model: continuous batching over pages, in vLLM's words.

params.py     `SamplingParams`: what a request asks for
request.py    `Request` and `RequestOutput`
pages.py      `PagePool`: pages that are held, and free ones that may come again
prefix.py     hashes of pages, by which prompts that begin alike find them
scheduler.py  `Scheduler`: what runs in the next step, and who gives pages back
sampler.py    the next token of each request
stop.py       text up to a stop string
structured.py text that follows a JSON schema, a regular expression, a choice or a grammar
carried.py    which models are supported
memory.py     how many pages there are
engine.py     `Engine`: add_request, step, stream, abort
llm.py        `LLM`: generate, chat
"""

from easytorch.generation.engine.engine import Engine, EngineStats
from easytorch.generation.engine.llm import LLM
from easytorch.generation.engine.params import SamplingParams
from easytorch.generation.engine.request import CompletionOutput, Logprob, RequestOutput
from easytorch.generation.engine.structured import StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineStats",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]
