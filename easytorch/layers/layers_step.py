"""One token through all layers of a decoder by one operator in C++, where each half of each layer is `decoder_step`'s.

What the halves find in the modules is kept until a module, a weight, a hook, a number or a setting changes: looking at
each layer of each token would take a tenth of the time of a small model's token.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.utils.hooks import RemovableHandle
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from easytorch.cache_names import CACHE
from easytorch.kernels.decoder_step import cpu
from easytorch.kernels.decoder_step.native import FeedForwardWeights, LayerWeights
from easytorch.layers import decoder_step
from easytorch.layers.decoder_step import AttentionHalf
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.linear import watched
from easytorch.layers.masks import Masks
from easytorch.layers.model_snapshot import HOOKS, MEMBERS
from easytorch.layers.output_hooks import idle, recording

_NAME = "_layers_step"
_GLOBAL_HOOKS = (
    global_hooks._global_forward_hooks,
    global_hooks._global_forward_pre_hooks,
    global_hooks._global_backward_hooks,
    global_hooks._global_backward_pre_hooks,
)
# Of a module's class: what may be replaced there, and changes what its modules compute.
_METHODS = ("__call__", "_call_impl", "forward", "rotate", "project", "projections", "project_output", "features",
            "score_scale", "attend_to_cache", "features_of_pages", "_network", "fused", "interleaved", "output_name",
            "act_name", "mlp_name")  # fmt: skip
# Of a module: numbers that are kept. Where its class has them, as properties, they may change unseen.
_NUMBERS = ("scaling", "variance_epsilon", "config", "training", "attention_dropout")
_CALL, _FEATURES = GradientCheckpointingLayer.__call__, GroupedAttention.features
_PARAMETERS, _HOOKS = operator.itemgetter("_parameters"), operator.itemgetter(*HOOKS)


def layers_step(
    backbone: nn.Module,
    layers: Sequence[Any],
    layer_types: Sequence[str],
    x: Tensor,
    masks: Masks,
    positions: Mapping[str, Any],
    kwargs: Mapping[str, Any],
) -> Tensor | None:
    """x (B, T, D), which `decoder_step.steps` takes, through `layers` of `backbone` -> (B, T, D); None where the layers
    are to be called, and nothing was written.

    layer_types: of `layers`. masks, positions: by layer type. kwargs: the other keywords of each layer.
    """
    past = kwargs.get(CACHE)
    page_slots = getattr(past, "page_slots", None)
    if not layers or (page_slots is None and (x.shape[1] != 1 or not isinstance(past, Cache))):
        return None
    if not decoder_step.passes(kwargs) or recording():
        return None
    kept = _kept(backbone, layers, x, past)
    if kept is None:
        return None
    attended = []
    for half, layer_type in zip(kept.halves, layer_types, strict=True):
        mask, of_positions = masks[layer_type], positions.get(layer_type)
        if page_slots is None:
            one: Any = decoder_step.in_cache(half, x, of_positions, mask, past)
        else:
            one = None if mask is not None else decoder_step.in_pages(half, x, of_positions, page_slots)
        if one is None:
            return None
        attended.append(one)
    if len({id(one.memory[0][0]) for one in attended}) < len(attended):
        return None  # layers that share their keys' memory: each is to find what the one before it has written
    step: Callable[..., Tensor] = cpu.decoder_layers if page_slots is None else cpu.decoder_layers_pages
    try:
        stepped = step(decoder_step.of_rows(x), kept.packed, [one.memory for one in attended]).view(x.shape)
    except RuntimeError:  # a tensor has other numbers than it had; the modules compute with it or say what is wrong
        vars(backbone).pop(_NAME, None)  # another thread may have been here
        return None
    for half, one in zip(kept.halves, attended, strict=True):
        decoder_step.written(half, one)
    return stepped


def forget(model: nn.Module) -> None:
    """Lets go of what is kept of its modules, whose weights would stay in memory when others have taken their place."""
    for module in model.modules():
        vars(module).pop(_NAME, None)


def _kept(backbone: nn.Module, layers: Sequence[Any], x: Tensor, past: Any) -> _Layers | None:
    """The layers' weights, kept by the backbone; None where a half of a layer is to be computed by its modules."""
    if not cpu.TAKES_LISTS:
        return None
    kept = vars(backbone).get(_NAME)
    if isinstance(kept, _Layers) and kept.holds(layers, x, past):
        return kept
    refusing: int = kept if type(kept) is int and kept < len(layers) else 0  # a layer that is likely to refuse again
    halves: dict[int, tuple[AttentionHalf, FeedForwardWeights]] = {}
    for index in (refusing, *range(len(layers))):
        found = _halves(layers[index], x)
        if found is None:
            vars(backbone)[_NAME] = index
            return None
        halves[index] = found
    made = vars(backbone)[_NAME] = _Layers(layers, [halves[index] for index in range(len(layers))], x)
    return made


class _Layers:
    """The halves of some layers, and their weights as the operators take them. Copies and pickles of it are None: they
    would be of other modules."""

    def __init__(
        self, layers: Sequence[Any], halves: Sequence[tuple[AttentionHalf, FeedForwardWeights]], x: Tensor
    ) -> None:
        self.halves = [half for half, _ in halves]
        weights = [LayerWeights(one.weights, network, one.scale, one.softcap, one.sinks) for one, network in halves]
        self.packed = cpu.pack_layers(weights, x.dtype)
        self._layers, self._dtype = list(layers), x.dtype
        modules = list(itertools.chain.from_iterable(layer.modules() for layer in layers))
        self._modules, self._kinds = modules, list(map(type, modules))
        self._methods = [(kind, name, getattr(kind, name)) for kind in set(self._kinds) for name in _METHODS
                         if hasattr(kind, name)]  # fmt: skip
        # of an `nn.Linear` the weights alone are used: another attribute of it, as a forward of its own, is one more
        linear = [vars(one) for one in modules if type(one) is nn.Linear]
        self._linear, self._sizes, self._parameters = linear, list(map(len, linear)), list(map(_PARAMETERS, linear))
        configs = {id(half.module.config): half.module.config for half in self.halves}.values()
        others = [vars(one) for one in (*modules, *configs) if type(one) is not nn.Linear]
        self._variables = [*others, *(half.module._features for half in self.halves)]
        self._values = list(map(dict, self._variables))
        self._dicts = [found for one in map(vars, modules) for name in MEMBERS if (found := one[name])]
        self._members = list(itertools.chain.from_iterable(map(dict.values, self._dicts)))
        # the operators take an empty one for none, which `data = torch.empty(0)` makes of it
        self._vectors = [one for one in self.packed.tensors if type(one) is nn.Parameter and one.dim() == 1]
        self._lengths = list(map(Tensor.numel, self._vectors))
        self._hooks = [vars(one)[name] for one in modules if type(one) is not nn.Linear for name in HOOKS]
        self._next_hook = -1
        self._past: Any = lambda: None

    def holds(self, layers: Sequence[Any], x: Tensor, past: Any) -> bool:
        """Whether these are its layers still, and nothing was changed that the halves depend on. Numbers of tensors are
        read at each step, and the operator refuses those whose shapes, dtypes or strides do not fit any more."""
        try:
            return (
                x.dtype is self._dtype
                and layers == self._layers
                # C alone compares: what stayed is the same object, and tensors are not looked into
                and self._variables == self._values
                and list(map(len, self._linear)) == self._sizes
                and all(map(operator.is_, map(_PARAMETERS, self._linear), self._parameters))
                and sum(map(len, self._dicts)) == len(self._members)
                and all(map(operator.is_, itertools.chain.from_iterable(map(dict.values, self._dicts)), self._members))
                and list(map(Tensor.numel, self._vectors)) == self._lengths
                and list(map(type, self._modules)) == self._kinds
                and not any(_GLOBAL_HOOKS)
                and self._unhooked(past)
                and all(getattr(kind, name) is method for kind, name, method in self._methods)
            )
        # another tensor or array than before has no one truth value; another thread may change a dict meanwhile
        except (RuntimeError, ValueError):
            return False

    def _unhooked(self, past: Any) -> bool:
        """The hooks themselves are looked at for another cache, or when torch has made a handle of a hook anywhere."""
        made = RemovableHandle.next_id
        if made != self._next_hook or self._past() is not past:
            # those of an `nn.Linear` may be in other dicts than before, which is seen of other modules
            of_linear = itertools.chain.from_iterable(map(_HOOKS, self._linear))
            if not all(map(idle, filter(None, self._hooks))) or any(of_linear):
                return False
            self._next_hook, self._past = made, weakref.ref(past)
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _halves(layer: Any, x: Tensor) -> tuple[AttentionHalf, FeedForwardWeights] | None:
    forward = getattr(type(layer), "stepped_forward", None)  # `torch.compile(layer)` has none
    if forward is None or type(layer).forward is not forward or type(layer).__call__ is not _CALL or watched(layer):
        return None
    # what `forward` calls; the network first: that of experts is told from the class alone
    network = decoder_step.feed_forward_half(layer.post_attention_layernorm, getattr(layer, layer.mlp_name), x)
    if network is None:
        return None
    half = decoder_step.attention_half(layer.input_layernorm, layer.self_attn, x)
    if half is None or type(half.module).features is not _FEATURES or "features" in vars(half.module):
        return None
    kinds = {type(one) for one in layer.modules()}
    return None if any(hasattr(kind, name) for kind in kinds for name in _NUMBERS) else (half, network)
