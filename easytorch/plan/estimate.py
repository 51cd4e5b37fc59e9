"""The plan: bytes of each device, operations and collectives of a step, of a model that nobody has made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from easytorch.auto import causal
from easytorch.auto.failures import FAILURES, MOST_LAYERS, first_line
from easytorch.backends.xla.aot import Facts
from easytorch.distributed.mesh import DATA, parse_axes
from easytorch.distributed.refusals import check_sharding
from easytorch.distributed.staged_call import layers_of_stage
from easytorch.frontend.optimizer_rules import slots
from easytorch.frontend.step_layout import Layout, layout_of
from easytorch.plan.balanced import balance_experts
from easytorch.plan.compiled import compile_step, compiler_devices
from easytorch.plan.depth import Layers, layers_of
from easytorch.plan.devices import Device, device_of

# precision -> (dtype of parameters, dtype of products)
PRECISIONS: Mapping[str, tuple[torch.dtype, torch.dtype | None]] = {
    "mixed": (torch.float32, torch.bfloat16),
    "bf16": (torch.bfloat16, None),
    "fp32": (torch.float32, None),
}
OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
}


@dataclass(frozen=True)
class Plan:
    """Of one device, in bytes: `parameters`, `optimizer`, `gradients`, and `activations`, which is everything else that
    the program takes. flops: of a step on one device. collectives: kind -> (how many, bytes of their results) a step.
    """

    model: str
    mesh: dict[str, int]
    device: str
    devices: int
    parameter_count: int
    parameters: int
    optimizer: int
    gradients: int
    activations: int
    capacity: int
    flops: float
    step_seconds: float
    tokens: int
    collectives: dict[str, tuple[int, int]]
    compiler: str
    compiled_layers: list[int]

    @property
    def memory(self) -> int:
        """Bytes of a device in all."""
        return self.parameters + self.optimizer + self.gradients + self.activations

    @property
    def fits(self) -> bool:
        return self.memory <= self.capacity

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**dataclasses.asdict(self), "memory": self.memory, "fits": self.fits}


def make_plan(
    config: Any,
    mesh: str,
    device: str,
    *,
    name: str = "",
    batch_size: int | None = None,
    sequence_length: int | None = None,
    micro_batches: int | None = None,
    optimizer: str = "adamw",
    precision: str = "mixed",
    recompute: bool = True,
    compiler: str = "auto",
) -> Plan:
    """The plan of training a causal language model with transformers' `config` over a mesh of a device.

    mesh: axes and sizes, "fsdp=16,tp=4", of dp, fsdp, pp, ep, sp and tp. batch_size: sequences of all devices, by
    default one for each place of the mesh with data of its own. micro_batches: of a pipeline; by default its stages.
    compiler: "libtpu", "cpu" (whose schedule keeps more) or "auto", the first that is there.

    Parameters, gradients and the optimizer's state are counted. The rest is the compiler's own figure for the step with
    few layers of each kind, extrapolated to all of them; tokens go to experts evenly. `ValueError` for an unknown
    device, axis, optimizer or precision, and for a dimension that does not divide, which it names;
    `NotImplementedError` for a model that cannot be divided over one of the axes: as `shard_model` refuses them.
    """
    found = device_of(device)
    for value, known, what in ((optimizer, OPTIMIZERS, "optimizer"), (precision, PRECISIONS, "precision")):
        if value not in known:
            raise ValueError(f"unknown {what} {value!r}; known: {', '.join(known)}")
    counts = {"batch_size": batch_size, "sequence_length": sequence_length, "micro_batches": micro_batches}
    for what, count in counts.items():
        if count is not None and (type(count) is not int or count < 1):
            raise ValueError(f"{what} must be an integer of at least 1, got {count!r}")
    axes = _axes(mesh)
    stages = axes.pop("pp", 1)
    axes = axes or {"dp": 1}  # a stage of a pipeline alone is a program of one device
    _check_depth(config)
    if (why := causal.refusal(config)) is not None:
        raise ValueError(why)
    model = _on_meta(config, PRECISIONS[precision][0])
    check_sharding(model, {**axes, "pp": stages})
    layout = layout_of(model, axes, None)
    layers = layers_of(model)
    stage = _largest_stage(model, layers, layout, stages)
    places = math.prod(axes.get(axis, 1) for axis in DATA)
    pieces = stages if micro_batches is None else micro_batches
    rows = places * pieces if batch_size is None else batch_size
    if rows % (places * pieces):
        raise ValueError(
            f"batch size {rows} does not divide over {places} places with data of their own x {pieces} micro-batches; "
            f"give a multiple of {places * pieces}"
        )
    length = sequence_length or min(4096, getattr(config, "max_position_embeddings", None) or 4096)
    made = OPTIMIZERS[optimizer](list(model.parameters()))
    state = _State.of(model, layout, made, stage.weights)
    balance_experts(model, axes)
    used, devices = compiler_devices(math.prod(axes.values()), compiler, found.name)

    def compiled(few_layers: list[int]) -> _Sample:
        layers.keep(few_layers)
        few = OPTIMIZERS[optimizer](list(model.parameters()))
        own = Layout(axes, layout_of(model, axes, None).weights)
        facts = compile_step(
            model, few, own, (rows // pieces, length), devices,
            recompute=recompute, autocast=PRECISIONS[precision][1],
        )  # fmt: skip
        counted = _State.of(model, own, few)
        return _Sample(few_layers, facts, facts.memory - counted.kept - counted.gradients)

    samples = _sampled(layers, compiled)
    return _plan(
        found, layers, stage.layers, samples, state, stages, pieces, name or str(getattr(config, "model_type", "")),
        {**axes, **({"pp": stages} if stages > 1 else {})}, rows * length, used,
    )  # fmt: skip


def _plan(
    device: Device,
    layers: Layers,
    own: list[int],
    samples: list[_Sample],
    state: _State,
    stages: int,
    pieces: int,
    name: str,
    mesh: dict[str, int],
    tokens: int,
    compiler: str,
) -> Plan:
    """Of a stage, which has `own` of the layers of each kind, and of its micro-batches in flight."""
    places, facts = [one.layers for one in samples], [one.facts for one in samples]
    rest = [max(one.rest, samples[0].rest) for one in samples]  # a layer never takes less than nothing
    activations = layers.extrapolate(places, rest, own)
    if stages > 1:  # 1F1B: the first stage holds the inputs of as many micro-batches as there are stages
        fixed = layers.extrapolate(places, rest, [0.0] * len(own))
        activations = max(fixed, 0.0) + max(activations - fixed, 0.0) * min(stages, pieces)
    flops = pieces * max(layers.extrapolate(places, [one.flops for one in facts], own), 0.0)
    kinds = sorted({kind for one in facts for kind in one.collectives})
    collectives = {}
    for kind in kinds:
        by_sample = [one.collectives.get(kind, (0, 0)) for one in facts]
        number = pieces * layers.extrapolate(places, [count for count, _ in by_sample], own)
        size = pieces * layers.extrapolate(places, [size for _, size in by_sample], own)
        collectives[kind] = round(max(number, 0)), round(max(size, 0))
    return Plan(
        name, mesh, device.name, math.prod(mesh.values()), state.count, state.parameters, state.optimizer,
        state.gradients, round(max(activations, 0)), device.usable, flops, flops / device.flops, tokens, collectives,
        compiler, [sum(counts) for counts in places],
    )  # fmt: skip


class _Sample(NamedTuple):
    """A step with so many layers of each kind. rest: bytes of a device beside parameters, optimizer and gradients."""

    layers: list[int]
    facts: Facts
    rest: int


# How many layers more are tried where a deeper program takes less than a shallower one.
_DEEPER = 2


def _sampled(layers: Layers, compiled: Callable[[list[int]], _Sample]) -> list[_Sample]:
    """The samples that are extrapolated.

    A compiler's schedule of a shallow program may be another one, which takes more than that of a deeper one (of
    DeepSeek V3 in bf16, three layers took 52 GB and four 37): such a sample says nothing of the model, and deeper ones
    are compiled.
    """
    made: dict[tuple[int, ...], _Sample] = {}
    for more in range(_DEEPER + 1):
        places = layers.samples(more)
        for place in places:
            if tuple(place) not in made:
                made[tuple(place)] = compiled(place)
        found = [made[tuple(place)] for place in places]
        if min(one.rest for one in found) >= found[0].rest:
            break
    return found


@dataclass(frozen=True)
class _State:
    """What is counted, in bytes of a device, and the number of parameters of the whole model."""

    count: int
    parameters: int
    optimizer: int
    gradients: int

    @property
    def kept(self) -> int:
        return self.parameters + self.optimizer

    @classmethod
    def of(
        cls, model: nn.Module, layout: Layout, optimizer: torch.optim.Optimizer, weights: int | None = None
    ) -> _State:
        """weights: bytes of those that a device has, where it has a stage alone."""
        kept = len(slots(optimizer, optimizer.param_groups[0]))
        own = sum(_bytes_by_name(model, layout).values()) if weights is None else weights
        return cls(sum(one.numel() for one in model.parameters()), own, own * kept, own)


class _Stage(NamedTuple):
    """weights: their bytes on a device. layers: how many of each kind it has."""

    weights: int
    layers: list[int]


def _largest_stage(model: Any, layers: Layers, layout: Layout, stages: int) -> _Stage:
    """The stage with the most bytes of weights: its layers, and the embedding of the first, the rest of the last."""
    sizes = _bytes_by_name(model, layout)
    if stages == 1:
        return _Stage(sum(sizes.values()), layers.counts)
    names = {id(one): name for name, one in model.named_parameters()}
    of_layers = [sum(sizes[names[id(one)]] for one in layer.parameters()) for layer in layers.all]
    embedding = sum(sizes[names[id(one)]] for one in _embedding(model).parameters())
    ends = {0: embedding, stages - 1: sum(sizes.values()) - sum(of_layers) - embedding}
    found = []
    for stage in range(stages):
        places = layers_of_stage(len(layers.all), stage, stages)
        weights = sum(of_layers[place] for place in places) + ends.get(stage, 0)
        found.append(_Stage(weights, [sum(place in places for place in kind) for kind in layers.kinds]))
    return max(found)


def _bytes_by_name(model: nn.Module, layout: Layout) -> dict[str, int]:
    return {name: _local_bytes(one, layout.weights[name], layout.axes) for name, one in model.named_parameters()}


def _embedding(model: Any) -> nn.Module:
    found: nn.Module = model.get_input_embeddings()
    return found


def _local_bytes(tensor: Tensor, sharding: Any, axes: Mapping[str, int]) -> int:
    parts = 1
    for one in sharding:
        for axis in (one,) if isinstance(one, str) else one or ():
            parts *= axes.get(axis, 1)
    return tensor.numel() * tensor.element_size() // parts


def _axes(mesh: str) -> dict[str, int]:
    """The mesh's axes; all sizes are given, since they say how many devices there are."""
    try:
        count = math.prod(int(part.partition("=")[2]) for part in mesh.split(",") if part.strip())
    except ValueError:
        count = 1  # parse_axes says what is wrong
    if count < 1:
        raise ValueError(f"--mesh {mesh}: give every size, which says how many devices there are, as in fsdp=16,tp=4")
    return parse_axes(mesh, count)


def _check_depth(config: Any) -> None:
    """`ValueError` for more layers than anybody has: they are made one by one, which takes hours."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and not 1 <= layers <= MOST_LAYERS:
        raise ValueError(f"a plan is of 1 to {MOST_LAYERS:,} layers, and the config has {layers:,}")


def _on_meta(config: Any, dtype: torch.dtype) -> nn.Module:
    import easytorch

    try:
        with torch.device("meta"):
            model: nn.Module = easytorch.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except FAILURES as error:
        raise ValueError(f"{config.model_type!r} cannot be made from this config: {first_line(error)}") from error
    return model.train()
