"""Generation: the decode loop, sampling, and text as it is generated."""

from easytorch.generation.decode import generate_tokens
from easytorch.generation.sampling import SamplingConfig
from easytorch.generation.text import stream_text

__all__ = ["SamplingConfig", "generate_tokens", "stream_text"]
