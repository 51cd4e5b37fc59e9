"""Generation: the decode loop, sampling, and text as it is generated.

The names load on first use: vLLM imports this package in each of its processes to ask whether our plugin is wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from easytorch.lazy_names import load_on_first_use

_HOME = {
    "SamplingConfig": "easytorch.generation.sampling",
    "generate_tokens": "easytorch.generation.decode",
    "stream_text": "easytorch.generation.text",
}
__all__ = ["SamplingConfig", "generate_tokens", "stream_text"]

if TYPE_CHECKING:
    from easytorch.generation.decode import generate_tokens as generate_tokens
    from easytorch.generation.sampling import SamplingConfig as SamplingConfig
    from easytorch.generation.text import stream_text as stream_text

__getattr__ = load_on_first_use(__name__, _HOME)
