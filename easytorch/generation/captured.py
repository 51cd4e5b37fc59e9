"""A decoder whose step, its sampling included, is a CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from easytorch.cache.static import reads_little
from easytorch.generation.decoders import CausalLM, StaticDecoder, static_lengths, static_refusal, unwrapped
from easytorch.generation.sampling import Sampler
from easytorch.layers.captured_step import CapturedStep
from easytorch.layers.cuda_graph import GraphPool, graph_of
from easytorch.layers.decoder import DecoderBackbone
from easytorch.layers.model_snapshot import ModelSnapshot, capture_refusal
from easytorch.layers.recurrent import runs_per_sequence


def prefers_capture(model: CausalLM, rows: int, prompt: int, max_new_tokens: int, device: torch.device) -> bool:
    """Whether a native model decodes by captured steps unless another cache is asked for."""
    inner = unwrapped(model)
    if graph_of(device, GraphPool()) is None:
        return False
    if not isinstance(inner.base_model, DecoderBackbone) and not any(map(runs_per_sequence, inner.modules())):
        return False
    if capture_refusal(inner, before_prompt=True) is not None or static_refusal(model) is not None:
        return False
    return reads_little(inner, rows, static_lengths(model, prompt, max_new_tokens)[1])


class CapturedDecoder(StaticDecoder):
    """`StaticDecoder` whose steps are captured, anew where the model has changed between two of them.

    The tokens go from step to step on the device. reason: why steps run eagerly, None where they do not.
    """

    _snapshot: ModelSnapshot | None = None
    _step: Callable[[], torch.Tensor]
    _tokens: torch.Tensor
    reason: str | None = None

    def next(self, tokens: torch.Tensor | None, sampler: Sampler) -> torch.Tensor:
        if tokens is None or graph_of(self.device, GraphPool()) is None:
            return super().next(tokens, sampler)
        if self._snapshot is None or not self._snapshot.holds():
            self._tokens = tokens.clone()
            self._snapshot, self.reason = ModelSnapshot(self.model), capture_refusal(self.model)  # type: ignore[arg-type]
            run = functools.partial(super().next, self._tokens, sampler)
            self._step = run if self.reason is not None else CapturedStep(run, self.device, GraphPool())
        self._tokens.copy_(tokens)
        found = self._step().clone()  # the next step writes to it
        if isinstance(self._step, CapturedStep):
            self.reason = self._step.refusal
        return found
