"""`model.generate` of native models on a GPU: the decode steps of transformers' loop are a CUDA graph.

transformers' loop stays, with its processors, criteria and streamers. It calls `get_compiled_call` for the steps over a
static cache, which it compiles by torch.compile; here they are captured as they are. Greedy and sampled generation
that asks for no cache has a static one, where it is small beside the weights.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from easytorch.cache.static import LEAST_CACHE, bucket, changes_on_the_device_alone, full_static_cache, reads_little
from easytorch.cache_names import CACHE, cache_keyword, takes_cache
from easytorch.layers.captured_step import CapturedStep, StaticInputs
from easytorch.layers.config import scales_by_slot
from easytorch.layers.cuda_graph import GraphPool, graph_of
from easytorch.layers.decoder import DecoderBackbone
from easytorch.layers.kept_steps import KeptSteps
from easytorch.layers.model_snapshot import ModelSnapshot, capture_refusal, plain_values

logger = logging.getLogger(__name__)


class CapturedForward:
    """`model(**inputs)` for decode steps over one static cache: eager first, then captured, then replayed.

    Another cache, other shapes or values that are no tensors, and a model that has changed are captured anew. compiled:
    gives transformers' own call, for caches that change in Python with each token.
    reason: why the last call was no replay of a graph, or None.
    """

    def __init__(self, model: Any, compiled: Callable[[], Callable[..., Any]]) -> None:
        self._model, self._compiled = model, compiled
        self.cache: Any = None
        self._inputs: StaticInputs | None = None
        self._snapshot: ModelSnapshot | None = None
        self._step: CapturedStep[Any] | None = None
        self.reason: str | None = None

    @takes_cache
    def __call__(self, cache: Any = None, **inputs: Any) -> Any:
        if not changes_on_the_device_alone(cache):
            return self._compiled()(**cache_keyword(cache), **inputs)
        if not self.holds():
            self._snapshot, self._step = ModelSnapshot(self._model), None
            self.reason = capture_refusal(self._model)
            if self.reason is not None:
                logger.warning("generate runs without a CUDA graph: %s", self.reason)
        if self.reason is not None or _asks_for_more(inputs):
            return self._model(**cache_keyword(cache), **inputs)
        if self._step is None or self._inputs is None or cache is not self.cache or not self._inputs.take(inputs):
            self.cache, self._inputs = cache, StaticInputs(inputs)
            run = functools.partial(self._model, **cache_keyword(cache), **self._inputs.call)
            self._step = CapturedStep(run, self._model.device, GraphPool())
        output = self._step()
        self.reason = self._step.refusal
        return output

    def holds(self) -> bool:
        """Whether the model is what it was at the last call."""
        return self._snapshot is not None and self._snapshot.holds()

    def keep(self, cache: Any) -> bool:
        """Lets go of the model, if the step over `cache` is captured; False, and nothing changes, where it is not."""
        if self._step is None or not self._step.captured or self.cache is not cache:
            return False
        self._step.forget_run()
        self._model = self._compiled = None  # type: ignore[assignment]
        return True

    def go_on(self, model: Any, compiled: Callable[[], Callable[..., Any]]) -> None:
        """The opposite of `keep`, for another call."""
        self._model, self._compiled = model, compiled


class _Kept(NamedTuple):
    """What a call of `generate` leaves for the next: the captured step, and its cache. case: of which calls; values:
    those of the model that no snapshot sees."""

    forward: CapturedForward
    cache: Any
    case: tuple[Any, ...]
    values: list[Any]


_KEPT: KeptSteps[_Kept] = KeptSteps()
# The step that the call of `generate` which begins goes on with; where there is none it is put here once it is made.
# The call's loop takes it out: other calls, of a criterion or a streamer, run inside of it.
_RUNNING: ContextVar[list[CapturedForward] | None] = ContextVar("_RUNNING", default=None)


def _asks_for_more(inputs: dict[str, Any]) -> bool:
    """Whether the output has more than logits, or adapters are switched by hooks during the call."""
    names = ("output_attentions", "output_hidden_states", "adapter_names", "labels")
    return any(inputs.get(name) is not None and inputs.get(name) is not False for name in names)


def compiled_call(model: Any, compile_config: Any, theirs: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    """What `get_compiled_call` returns: a captured forward, unless a compile_config asks for torch.compile."""
    asked = compile_config is not None or getattr(model.generation_config, "compile_config", None) is not None
    if asked or graph_of(model.device, GraphPool()) is None:
        return theirs(compile_config)
    compiled = functools.partial(theirs, compile_config)
    running = _RUNNING.get()
    _RUNNING.set(None)
    if running:
        running[0].go_on(model, compiled)
        return running[0]
    made = CapturedForward(model, compiled)
    if running is not None:
        running.append(made)
    return made


def also_captured(model_class: Any) -> None:
    """`_sample`, transformers' loop of greedy and sampled generation, of a class: on a static cache where that is
    chosen, whose captured step the next call of as many rows goes on with."""
    theirs = model_class._sample

    @functools.wraps(theirs)
    def sample(self: Any, input_ids: Tensor, *args: Any, generation_config: Any, **kwargs: Any) -> Any:
        if not takes_static_cache(self, input_ids, generation_config, kwargs):
            return theirs(self, input_ids, *args, generation_config=generation_config, **kwargs)
        types, length = self.base_model.config_of_cache(), _rounded(self, input_ids, generation_config.max_length)
        case = (input_ids.shape[0], length, self.device, torch.is_inference_mode_enabled())
        values = plain_values(self)
        kept = _KEPT.take(self, lambda one: one.case == case and one.values == values and one.forward.holds())
        if kept is None:
            cache, running = _static_cache_of(types, length), []
        else:
            cache, running = kept.cache, [kept.forward]
            cache.reset()  # in place: the step reads and writes where it did
        token = _RUNNING.set(running)
        try:
            found = theirs(
                self, input_ids, *args, generation_config=generation_config, **{**kwargs, **cache_keyword(cache)}
            )
        finally:
            _RUNNING.reset(token)
        if running and running[0].keep(cache):
            _KEPT.put(self, _Kept(running[0], cache, case, values))
        return found

    model_class._sample = sample


def _rounded(model: Any, input_ids: Tensor, length: int) -> int:
    """A length of the cache that other calls have too, where one of it is small beside the weights still."""
    longer = bucket(length, LEAST_CACHE)
    by_slot = scales_by_slot(model.config)
    return longer if not by_slot and reads_little(model, input_ids.shape[0], longer) else length


def _static_cache_of(config: Any, length: int) -> Any:
    from transformers.cache_utils import get_layer_types_and_kwargs

    return full_static_cache(get_layer_types_and_kwargs(config)[0], length)


def takes_static_cache(model: Any, input_ids: Tensor, generation_config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call that has been given no cache decodes by captured steps over a static one."""
    cache = kwargs.get(CACHE)
    if graph_of(model.device, GraphPool()) is None or not isinstance(
        getattr(model, "base_model", None), DecoderBackbone
    ):
        return False
    if type(cache) is not DynamicCache or getattr(cache, "_is_user_defined", False) or cache.get_seq_length():
        return False
    if getattr(cache, "offloading", False) or kwargs.get("inputs_embeds") is not None or _asks_for_more(kwargs):
        return False
    given = generation_config
    if given.disable_compile or given.compile_config is not None or given.return_dict_in_generate or given.is_assistant:
        return False
    if given.cache_implementation is not None or given.max_length is None or given.prefill_chunk_size is not None:
        return False
    return capture_refusal(model, before_prompt=True) is None and reads_little(
        model, input_ids.shape[0], given.max_length
    )
