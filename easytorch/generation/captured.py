"""A decoder whose step, its sampling included, is a CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from easytorch.cache.static import reads_little
from easytorch.generation.decoders import CausalLM, StaticDecoder, static_lengths, static_refusal, unwrapped
from easytorch.generation.sampling import Sampler
from easytorch.layers.captured_step import CapturedStep
from easytorch.layers.cuda_graph import GraphPool, graph_of
from easytorch.layers.decoder import DecoderBackbone
from easytorch.layers.kept_steps import KeptSteps
from easytorch.layers.model_snapshot import ModelSnapshot, capture_refusal, plain_values
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


class _Kept(NamedTuple):
    """What a call leaves for the next: the captured step and the tensors that it reads and writes. case: of which
    calls; values: those of the model that no snapshot sees."""

    step: CapturedStep[torch.Tensor]
    snapshot: ModelSnapshot
    tensors: dict[str, torch.Tensor]  # of the decoder
    of_sampler: dict[str, torch.Tensor]
    cache: Any
    case: tuple[Any, ...]
    values: list[Any]


_KEPT: KeptSteps[_Kept] = KeptSteps()
_TENSORS = ("_tokens", "_position", "_seen")


class CapturedDecoder(StaticDecoder):
    """`StaticDecoder` whose steps are captured, anew where the model has changed between two of them.

    The tokens go from step to step on the device. reason: why steps run eagerly, None where they do not. A call whose
    shapes and sampling are those of the one before goes on with its captured step.
    """

    _snapshot: ModelSnapshot | None = None
    _step: Callable[[], torch.Tensor]
    _tokens: torch.Tensor
    _sampler: Sampler | None = None
    _kept: _Kept | None = None
    reason: str | None = None

    def begin(self, sampler: Sampler) -> None:
        if graph_of(self.device, GraphPool()) is None:
            return
        self._sampler = sampler
        rows, length = self.ids.shape
        capacity = self._seen.shape[1]
        modes = torch.is_inference_mode_enabled(), self.greedy, self.device
        self._case = (rows, length, capacity, *modes, *sampler.constants)
        self._values = plain_values(unwrapped(self.model))
        self._kept = _KEPT.take(self.model, self._fits)
        if self._kept is not None:
            self._cache = self._kept.cache
            self._cache.reset()  # in place: the step reads and writes where it did

    def _fits(self, kept: _Kept) -> bool:
        return kept.case == self._case and kept.values == self._values and kept.snapshot.holds()

    def next(self, tokens: torch.Tensor | None, sampler: Sampler) -> torch.Tensor:
        if tokens is None or graph_of(self.device, GraphPool()) is None:
            return super().next(tokens, sampler)
        if self._kept is not None:
            self._go_on(self._kept, tokens, sampler)
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

    def _go_on(self, kept: _Kept, tokens: torch.Tensor, sampler: Sampler) -> None:
        """Takes over the tensors of the call before, with what is in this one's, after the prompt."""
        self._tokens = tokens.clone()
        for name, tensor in kept.tensors.items():
            setattr(self, name, tensor.copy_(getattr(self, name)))
        for name, tensor in kept.of_sampler.items():
            setattr(sampler, name, tensor.copy_(getattr(sampler, name)))
        self._snapshot, self._step, self._kept = kept.snapshot, kept.step, None

    def end(self) -> None:
        step, sampler = self.__dict__.get("_step"), self._sampler
        if not isinstance(step, CapturedStep) or not step.captured or sampler is None or self._snapshot is None:
            return
        if not reads_little(unwrapped(self.model), *self._seen.shape):
            return  # a large cache that was asked for by name is freed with its call
        step.forget_run()
        tensors = {name: getattr(self, name) for name in _TENSORS}
        kept = _Kept(step, self._snapshot, tensors, sampler.tensors(), self._cache, self._case, self._values)
        _KEPT.put(self.model, kept)
