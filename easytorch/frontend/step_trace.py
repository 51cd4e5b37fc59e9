"""A whole train step as one functional ATen graph: forward, backward, clipping and the optimizer's update.

Traced with fake tensors, so that a model of any size is traced without its memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from easytorch.backends.partitioning import Sharding
from easytorch.frontend import optimizer_rules
from easytorch.frontend.decompositions import decompositions
from easytorch.frontend.errors import LoweringError
from easytorch.frontend.partition_ops import barrier, with_sharding
from easytorch.frontend.step_draws import Draws
from easytorch.frontend.step_records import Records

# (parameter's name, its value) -> the value as the module computes with it
Gather = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class StepSpec:
    """What a step is made of. `trained` and `fixed` (frozen parameters, and buffers) are names of the model's tensors;
    slots: (parameter's name, name of a tensor that the optimizer keeps of it). stored, gathered: how parameters are
    divided over a mesh, and, of those that are divided further where they are stored, where they are used."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any], Tensor]
    max_norm: float | None
    recompute: bool
    trained: Mapping[str, Tensor]
    fixed: Mapping[str, Tensor]
    groups: Mapping[str, int]
    gathered: Mapping[str, Sharding] = field(default_factory=dict)
    stored: Mapping[str, Sharding] = field(default_factory=dict)
    autocast: torch.dtype | None = None

    @property
    def slots(self) -> list[tuple[str, str]]:
        groups = self.optimizer.param_groups
        return [
            (name, slot)
            for name in self.trained
            for slot in optimizer_rules.slots(self.optimizer, groups[self.groups[name]])
        ]


def trace(spec: StepSpec, leaves: Sequence[Any], structure: pytree.TreeSpec) -> GraphModule:
    """The graph of (trained, slots, fixed, the numbers of each group (G, 4), the leaves of (args, kwargs) that are
    tensors) -> (new values of trained, slots and fixed, the loss, the norm of the gradients)."""
    given = [*spec.trained.values(), *spec.fixed.values(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
    fake = detect_fake_mode(given) or FakeTensorMode(allow_non_fake_inputs=True)
    assert isinstance(fake, FakeTensorMode)

    def placeholder(tensor: Tensor) -> Tensor:
        if isinstance(tensor, torch._subclasses.FakeTensor):
            return tensor.detach()
        if tensor.is_meta:
            with fake:
                return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return fake.from_tensor(tensor.detach())

    trained = [placeholder(one) for one in spec.trained.values()]
    with fake:
        slots = [torch.empty_like(spec_of) for spec_of in (placeholder(spec.trained[name]) for name, _ in spec.slots)]
        numbers = torch.empty(len(spec.optimizer.param_groups), optimizer_rules.NUMBERS)
    fixed = [placeholder(one) for one in spec.fixed.values()]
    inputs = [placeholder(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    step = functools.partial(_step, spec, list(leaves), structure)
    functional = dispatch_functionalize(step, FunctionalTensorMode())
    with fake, _compiling():
        return make_fx(functional, decomposition_table=decompositions(), tracing_mode="real")(
            trained, slots, fixed, numbers, inputs
        )


def _step(
    spec: StepSpec,
    leaves: Sequence[Any],
    structure: pytree.TreeSpec,
    trained: list[Tensor],
    slots: list[Tensor],
    fixed: list[Tensor],
    numbers: Tensor,
    inputs: list[Tensor],
) -> list[Tensor]:
    variables = [one.detach().requires_grad_() for one in trained]
    values = dict(zip(spec.trained, variables, strict=True))
    own = dict(zip(spec.fixed, fixed, strict=True))  # functional tensors: what a forward writes to has a new value
    rest = iter(inputs)
    args, kwargs = pytree.tree_unflatten(
        [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
    )
    with torch.enable_grad(), _recomputed(spec) as inside, _precision(spec):
        used = {name: one if name in inside else _gathered(spec, name, one) for name, one in values.items()}
        inside_model = {**used, **own}
        output = _call(spec.model, inside_model, args, kwargs)
        loss = spec.loss(output)
        if loss.dim():
            raise LoweringError(f"the loss of a train step is one number, and it has the shape {tuple(loss.shape)}")
    found = torch.autograd.grad(loss, variables, allow_unused=True)
    # torch's optimizers leave a parameter that the loss does not depend on as it is, without weight decay;
    # each device keeps its own part of a gradient alone, as soon as it is there
    grads = {
        name: with_sharding(grad, spec.stored[name]) if name in spec.stored else grad
        for name, grad in zip(values, found, strict=True)
        if grad is not None
    }
    with torch.no_grad():
        norm = torch.stack([grad.float().square().sum() for grad in grads.values()]).sum().sqrt()
        if spec.max_norm is not None:
            scale = (spec.max_norm / (norm + 1e-6)).clamp(max=1.0)
            grads = {name: grad * scale.to(grad.dtype) for name, grad in grads.items()}
        new, kept = _updated(spec, values, dict(zip(spec.slots, slots, strict=True)), grads, numbers)
    after = [_as_before(name, one, inside_model[name]) for name, one in own.items()]
    return [*new, *kept, *after, loss.detach(), norm]


def _call(module: nn.Module, values: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
    """The module's output with these tensors in place of its own, and of those that are tied to them; `values` has
    then what the forward has assigned to their names.

    `tie_weights` of torch exchanges the tensors of a module that has two names twice, and so leaves traced ones in it.
    """
    own = {
        f"{prefix}.{key}" if prefix else key: one
        for prefix, inner in module.named_modules()
        for key, one in (*inner._parameters.items(), *inner._buffers.items())
        if one is not None
    }
    given = {id(own[name]): value for name, value in values.items()}
    everywhere = {name: given[id(one)] for name, one in own.items() if id(one) in given}
    output = functional_call(module, everywhere, args, kwargs, tie_weights=False)
    values.update((name, everywhere[name]) for name in list(values))
    return output


def _as_before(name: str, before: Tensor, after: Any) -> Tensor:
    """What a forward has left of a buffer."""
    if not isinstance(after, Tensor) or (after.shape, after.dtype) != (before.shape, before.dtype):
        found = (tuple(after.shape), after.dtype) if isinstance(after, Tensor) else after
        raise LoweringError(
            f"the forward of a train step makes {found} of {name}, {tuple(before.shape)} {before.dtype}"
        )
    return after.detach()


def _updated(
    spec: StepSpec,
    values: Mapping[str, Tensor],
    slots: Mapping[tuple[str, str], Tensor],
    grads: Mapping[str, Tensor],
    numbers: Tensor,
) -> tuple[list[Tensor], list[Tensor]]:
    new, kept = [], {}
    rows = [row.unbind() for row in numbers.unbind()]
    for name, value in values.items():
        number = spec.groups[name]
        group = spec.optimizer.param_groups[number]
        own = {slot: slots[name, slot] for slot in optimizer_rules.slots(spec.optimizer, group)}
        changed, after = value.detach(), own
        if name in grads:
            changed, after = optimizer_rules.update(spec.optimizer, group, changed, grads[name], own, rows[number])
        new.append(changed)
        kept.update({(name, slot): one for slot, one in after.items()})
    return new, [kept[key] for key in slots]


def _gathered(spec: StepSpec, name: str, value: Tensor) -> Tensor:
    if name not in spec.gathered:
        return value
    gathered, stored = spec.gathered[name], spec.stored.get(name, ())
    # Experts over "ep" that are stored over "ep" and "fsdp": XLA would bring the gradients of all experts to each
    # device, and take its part of them, if it were not told that they come divided over "ep".
    shared = any(kept and kept != own for kept, own in zip(gathered, stored, strict=False))
    return with_sharding(value, gathered, both_ways=shared)


def _precision(spec: StepSpec) -> contextlib.AbstractContextManager[Any]:
    if spec.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=spec.autocast, cache_enabled=False)


@contextlib.contextmanager
def _recomputed(spec: StepSpec) -> Iterator[set[str]]:
    """The names of the parameters of layers that are computed again in the backward, where they are gathered.

    transformers' layers call `_gradient_checkpointing_func` where they are told to be checkpointed.
    """
    layers = {
        name: module
        for name, module in spec.model.named_modules()
        if spec.recompute and hasattr(module, "gradient_checkpointing") and name
    }
    names = {module: name for name, module in layers.items()}
    before = {module: dict(vars(module)) for module in names}

    def checkpointed(function: Any, *args: Any) -> Any:
        layer = function.args[0]
        return _recompute(spec, names[layer], layer, function, args)

    inside = set()
    for module, name in names.items():
        if _is_layer(module):
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = checkpointed
            inside |= {f"{name}.{key}" for key, _ in module.named_parameters()} & spec.trained.keys()
    try:
        yield inside
    finally:
        for module, attributes in before.items():
            for key in ("gradient_checkpointing", "_gradient_checkpointing_func"):
                if key in attributes:
                    vars(module)[key] = attributes[key]
                else:
                    vars(module).pop(key, None)


def _is_layer(module: nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def _recompute(spec: StepSpec, prefix: str, layer: nn.Module, function: Any, args: tuple[Any, ...]) -> Any:
    """The layer's output, of which only its inputs are kept: Chen et al. 2016, arXiv:1604.06174."""
    own, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())
    flat, structure = pytree.tree_flatten((args, function.keywords))
    places = [place for place, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
    shape: list[Any] = []
    records = Records()

    def run(kept: Mapping[str, Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        weights = {
            name: _gathered(spec, f"{prefix}.{name}", one) for name, one in zip(own, tensors[: len(own)], strict=True)
        }
        leaves = list(flat)
        for place, one in zip(places, tensors[len(own) :], strict=True):
            leaves[place] = one
        positional, keywords = pytree.tree_unflatten(leaves, structure)
        with _plain(layer):
            output = records.during(lambda: _call(layer, {**weights, **kept}, positional, keywords))
        results, found = pytree.tree_flatten(output)
        shape[:] = [found, [(False, None) if isinstance(one, Tensor) else (True, one) for one in results]]
        return tuple(one for one in results if isinstance(one, Tensor))

    stored = [spec.stored.get(f"{prefix}.{name}") for name in own]
    results = _Recomputed.apply(  # type: ignore[no-untyped-call]
        run, stored, buffers, *own.values(), *(flat[place] for place in places)
    )
    found, others = shape
    rest = iter(results)
    output, recorded = pytree.tree_unflatten([one if other else next(rest) for other, one in others], found)
    records.add(recorded)
    return output


@contextlib.contextmanager
def _plain(layer: Any) -> Iterator[None]:
    layer.gradient_checkpointing = False
    try:
        yield
    finally:
        layer.gradient_checkpointing = True


class _Recomputed(torch.autograd.Function):
    """`run` of tensors, again in the backward, behind a barrier: a compiler would merge the two otherwise.

    stored: how the first of the tensors, a layer's weights, are divided where they are stored. buffers: those that the
    layer has in the forward, by name, which are no longer its own in the backward. A second barrier, after
    the backward, holds the layer before back until their gradients are there: libtpu's scheduler left those of all
    layers to the end, for which it kept what every layer had computed (0.5 GB a layer of Llama 3 70B over fsdp=16,tp=4,
    2,048 tokens).
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., tuple[Tensor, ...]],
        stored: Sequence[Sharding | None],
        buffers: Mapping[str, Tensor],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.run, ctx.stored, ctx.learning = run, stored, [one.requires_grad for one in tensors]
        ctx.buffers = list(buffers)
        # copies: the forward may write to them
        ctx.save_for_backward(*tensors, *(one.clone() for one in buffers.values()))
        ctx.draws = Draws()
        with ctx.draws:
            return run({}, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        count, own = len(grads), len(ctx.learning)
        again = barrier([*grads, *ctx.saved_tensors[:own]])
        buffers = dict(zip(ctx.buffers, ctx.saved_tensors[own:], strict=True))
        with torch.enable_grad():
            tensors = [
                one.detach().requires_grad_(learning) for one, learning in zip(again[count:], ctx.learning, strict=True)
            ]
            with ctx.draws.again():
                results = ctx.run(buffers, *tensors)
        wanted = [one for one in tensors if one.requires_grad]
        pairs = [(one, grad) for one, grad in zip(results, again[:count], strict=True) if one.requires_grad]
        found = iter(
            torch.autograd.grad([one for one, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True)
        )
        result = [next(found) if one.requires_grad else None for one in tensors]
        for place, sharding in enumerate(ctx.stored):
            if sharding is not None and (grad := result[place]) is not None:
                result[place] = with_sharding(grad, sharding)
        there = iter(barrier([one for one in result if one is not None]))
        return None, None, None, *(None if one is None else next(there) for one in result)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """`torch.compiler.is_compiling()` and `is_exporting()` are true: models take the paths that a graph can hold, of
    ATen's operations."""
    compiler: Any = torch.compiler
    before = compiler._is_compiling_flag, compiler._is_exporting_flag
    compiler._is_compiling_flag = compiler._is_exporting_flag = True
    try:
        yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = before
