"""Adapters (LoRA) of JAX models: EasyDeL's and Flax NNX's `lora_a` and `lora_b`, Qwix's and MaxText's, and back.

    tree = lora_to_flax(model, scheme="maxtext", leaves="qwix")
    lora_from_flax(model, tree, alpha=16)      # then model.save_pretrained("adapter") writes PEFT's files

Beside a kernel there stand, for `rank` r, `a` (in, r) and `b` (r, out), and the layer adds x @ a @ b times a factor:

- "nnx": `q_proj/lora_a`, of `flax.nnx.LoRA`, which EasyDeL puts around its layers. There is no factor.
- "qwix": `q_proj/kernel_lora_a`, of Qwix's `LoraProvider`, which MaxText uses. The factor is alpha / r.
- "maxtext": `query/lora_a/kernel`, of MaxText's own adapters. The factor is alpha / r.

Where a kernel has several dimensions of inputs or outputs so have a and b, or they are flat; where layers are stacked
(`scan_layers`) both are, along the same axis. Which input and output of torch's layer each of theirs is, is read off
what the bridge's rules do to the kernel: rotary halves interleaved, heads, and factors in the kernel (MaxText's queries
hold 1 / sqrt(d), which b then holds too).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from easytorch.argument_types import check_types
from easytorch.bridge.core.nested import nested
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.dtypes import to_numpy
from easytorch.bridge.errors import CheckpointError, nearest
from easytorch.bridge.memory.tree import Framework, MemoryTree, Tree, placing
from easytorch.bridge.names.architecture import Architecture
from easytorch.bridge.rules.plan import Step, plan_from_torch
from easytorch.bridge.rules.table import compile_rules
from easytorch.bridge.schemes.registry import TORCH, names
from easytorch.protocol.adapters import active_adapters
from easytorch.protocol.conversion import architecture_of_class, rules_of
from easytorch.protocol.lora import apply_lora_to_layers, merge_lora_params, split_lora_params
from easytorch.protocol.wrappers import unwrapped

# How each program names the two leaves beside those of a kernel: of its folder, of the kernel itself.
LEAVES = {"nnx": "{module}/lora_{part}", "qwix": "{kernel}_lora_{part}", "maxtext": "{module}/lora_{part}/kernel"}
_FOUND = re.compile(r"(?P<stem>.*?)(/(?P<module>lora_(?P<one>[ab]))|_lora_(?P<two>[ab])|/lora_(?P<three>[ab])/kernel)")
_WRAPPER = "params/"


class _Place(NamedTuple):
    """The inputs and outputs of torch layers as indices into a Flax kernel, its input and output dimensions flattened.

    inputs (in,): torch's columns. outputs, sources, factors (layers, out): torch's rows, the place of their layer in
    `layers`, and what the kernel holds the weight times. axis: along which layers are stacked, None for one.
    """

    leaf: str
    layers: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    axis: int | None
    inputs: np.ndarray
    outputs: np.ndarray
    sources: np.ndarray
    factors: np.ndarray
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]


@check_types()
def lora_to_flax(
    model: PreTrainedModel,
    adapter_name: str | None = None,
    *,
    scheme: str = "flax",
    leaves: str = "nnx",
    framework: Framework = "numpy",
) -> Tree:
    """The adapter of `model`, the active one by default, as a nested dict of arrays beside the kernels' names.

    scheme: the program whose names and layouts the kernels have, as in `to_flax`: "flax", "easydel", "maxtext", ...
    leaves: "nnx" (b holds the factor alpha / rank), "qwix" or "maxtext" (which are told alpha themselves).

    `ValueError` for DoRA and adapters of embeddings, which these programs do not have, for layers that are one leaf
    there (experts, fused projections of different adapters), and where layers of a stack have other ranks.
    """
    if leaves not in LEAVES:
        raise ValueError(f"leaves={leaves!r} must be one of {', '.join(LEAVES)}")
    model = unwrapped(model)
    values = split_lora_params(model, adapter_name)
    wanted = adapter_name if adapter_name is not None else active_adapters(model)[0]
    layers: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in values.items():
        layer, _, part = name.removesuffix(".weight").rpartition(".")
        if part not in ("lora_A", "lora_B"):
            raise ValueError(f"{name} has no place in JAX: only lora_A and lora_B of linear layers have")
        layers.setdefault(layer, {})[part] = to_numpy(tensor.detach().cpu())
    config: Any = model.peft_config[wanted]
    factor = _factor(config) if leaves == "nnx" else _factor(config) * config.r / config.lora_alpha
    found: dict[str, np.ndarray] = {}
    left = set(layers)
    for place in _places(model, scheme, left.__contains__):
        module = place.leaf.rpartition("/")[0]
        left -= set(place.layers)
        for part, array in zip("ab", _written(place, layers, factor, flat=leaves != "maxtext"), strict=True):
            found[LEAVES[leaves].format(module=module, kernel=place.leaf, part=part)] = array
    if left:
        raise ValueError(f"{min(left)} has no kernel of its own in {scheme}, beside which an adapter could stand")
    put = placing(framework, None)
    return nested({name: put(name, array) for name, array in found.items()})


@check_types()
def lora_from_flax(
    model: PreTrainedModel,
    tree: Any,
    *,
    alpha: float | None = None,
    adapter_name: str = "default",
    scheme: str | None = None,
) -> Any:
    """Puts the adapter of `tree` (nested arrays, an `nnx.State`, ...) into `model`, which is returned.

    alpha: what the adapter counts is alpha / rank; None is a factor of 1, as of `flax.nnx.LoRA`. scheme: whose names
    and layouts the kernels have; None is the first that knows them all. Other leaves, as those of the base model, are
    left out. The layers are PEFT's (`apply_lora_to_layers`), and a stacked adapter is in every layer of its stack.

    `CheckpointError` where a leaf has no layer, lacks its pair or has another shape, `ValueError` for an adapter of
    another model; the model is then unchanged.
    """
    read = MemoryTree(tree, as_stored=True)
    pairs = _pairs(read)
    schemes = [name for name in names() if name not in (TORCH, "gguf")] if scheme is None else [scheme]
    found: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    for stem, place in _known(model, schemes, pairs).items():
        for layer, rows, a, b in _parts(place, [read.read(name) for name in pairs[stem]], pairs[stem]):
            found.setdefault(layer, []).append((rows, a, b))
    adapters = {layer: _joined(layer, parts) for layer, parts in found.items()}
    ranks = sorted({a.shape[0] for a, _ in adapters.values()})
    if len(ranks) > 1:
        raise CheckpointError(f"the adapter has the ranks {ranks}, and one is read: split the tree")
    pattern = "|".join(f"^{re.escape(layer)}$" for layer in adapters)
    counts = float(ranks[0]) if alpha is None else alpha
    apply_lora_to_layers(model, ranks[0], pattern, alpha=counts, adapter_name=adapter_name)
    state = {}
    for layer, (a, b) in adapters.items():
        state[f"{layer}.lora_A.weight"], state[f"{layer}.lora_B.weight"] = torch.from_numpy(a), torch.from_numpy(b)
    return merge_lora_params(model, state, adapter_name)


def _factor(config: Any) -> float:
    return float(config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r))


def _pairs(tree: MemoryTree) -> dict[str, tuple[str, str]]:
    """Kernel (or the folder that holds it, where its own name is not in the leaf's) -> the names of its a and b."""
    found: dict[str, dict[str, str]] = {}
    for name in tree.tensors:
        match = _FOUND.fullmatch(name.removesuffix("/value"))
        if match is not None:
            part = match["one"] or match["two"] or match["three"]
            found.setdefault(match["stem"], {})[part] = name
    for parts in found.values():
        if len(parts) < 2:
            raise CheckpointError(f"has no pair lora_{'b' if 'a' in parts else 'a'}", tensor=next(iter(parts.values())))
    if not found:
        raise CheckpointError(
            "the tree holds no adapter: its leaves are named lora_a and lora_b, or kernel_lora_a, ..."
        )
    return {stem: (parts["a"], parts["b"]) for stem, parts in found.items()}


def _known(model: PreTrainedModel, schemes: Sequence[str], stems: Mapping[str, Any]) -> dict[str, _Place]:
    """The place of each of `stems` in the first scheme that knows them all; `CheckpointError` for one in none."""
    reason: CheckpointError | None = None
    architecture = architecture_of_class(type(model), model.config)
    for scheme in schemes:
        wanted = {_bare(model, stem): stem for stem in stems}

        def owner(leaf: str, wanted: Mapping[str, str] = wanted) -> str | None:
            own = _bare(model, leaf)
            found = [wanted[one] for one in (own, own.rpartition("/")[0]) if one in wanted]
            if len(found) > 1:  # beside the kernel and beside its folder
                raise CheckpointError("is given twice", tensor=found[1])
            return found[0] if found else None

        try:
            steps = _steps(model, architecture, scheme)
        except CheckpointError as error:  # a family that this program does not have
            reason = reason or error
            continue
        leaves = [target.name for step, _ in steps for target in step.targets]
        if unknown := sorted(set(stems) - {owner(leaf) for leaf in leaves}):
            hint = nearest(_bare(model, unknown[0]), [_bare(model, leaf) for leaf in leaves])
            reason = CheckpointError(f"is beside no kernel of {type(model).__name__}{hint}", tensor=unknown[0])
            continue
        places = _places_of(steps, lambda leaf, _: owner(leaf) is not None)
        return {str(owner(place.leaf)): place for place in places}
    assert reason is not None
    raise reason


def _bare(model: PreTrainedModel, path: str) -> str:
    while path.startswith(_WRAPPER):
        path = path.removeprefix(_WRAPPER)
    return path.removeprefix(f"{model.base_model_prefix}/")


def _places(model: PreTrainedModel, scheme: str, wanted: Callable[[str], bool]) -> Iterator[_Place]:
    """The kernels that hold a layer that is `wanted`."""
    architecture = architecture_of_class(type(model), model.config)
    return _places_of(_steps(model, architecture, scheme), lambda _, layers: any(map(wanted, layers)))


def _steps(model: PreTrainedModel, architecture: Architecture, scheme: str) -> list[tuple[Step, tuple[str, ...]]]:
    """How kernels are made of torch's matrices, and the names of these layers in the model."""
    rules = rules_of(architecture, model.config, scheme)
    infos = {name: TensorInfo(name, shape, "float32") for name, shape in architecture.shapes.items()}
    plan = plan_from_torch(infos, compile_rules(rules), tie=architecture.tie, same=lambda one, other: True)
    found = []
    for step in plan.steps:
        layers = tuple(architecture.names.places[name].name.removesuffix(".weight") for name in step.sources)
        if all(name.endswith(".weight") and len(infos[name].shape) == 2 for name in step.sources):
            found.append((step, layers))
    return found


def _places_of(
    steps: Sequence[tuple[Step, tuple[str, ...]]], wanted: Callable[[str, tuple[str, ...]], bool]
) -> Iterator[_Place]:
    for step, layers in steps:
        if not any(wanted(target.name, layers) for target in step.targets):
            continue
        shapes = tuple(_torch_shapes(step))
        # What stands where is read off what becomes of the numbers of layers, rows and columns.
        probes = [
            [np.full(shape, number + 1, np.float32) for number, shape in enumerate(shapes)],
            [np.broadcast_to(np.arange(1, shape[0] + 1, dtype=np.float32)[:, None], shape) for shape in shapes],
            [np.broadcast_to(np.arange(1, shape[1] + 1, dtype=np.float32), shape) for shape in shapes],
        ]
        wide = replace(step, targets=tuple(replace(target, dtype="float32") for target in step.targets))
        factors = [_reduced(one) for one in wide.run([np.ones(shape, np.float32) for shape in shapes])]
        made = [[_reduced(one) for one in wide.run(probe)] for probe in probes]
        for index, target in enumerate(step.targets):
            if wanted(target.name, layers):
                alone = step.transform.stacked_along if len(layers) == 1 else None
                yield _place(target, layers, shapes, [one[index] for one in made], factors[index], alone)


def _torch_shapes(step: Step) -> Sequence[tuple[int, ...]]:
    if step.reverse:
        raise CheckpointError("is a matrix of several leaves, beside which no adapter is read", tensor=step.sources[0])
    shapes = step.transform.torch_shapes(step.targets[0].shape)
    return [(int(shape[0]), int(shape[1])) for shape in shapes]


def _reduced(array: np.ndarray) -> np.ndarray:
    """The same with one place of each dimension along which nothing changes."""
    for axis in range(array.ndim):
        first = array.take([0], axis)
        if array.shape[axis] > 1 and np.array_equal(np.broadcast_to(first, array.shape), array):
            array = first
    return array


def _place(
    target: TensorInfo, layers: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], made: list[np.ndarray],
    factors: np.ndarray, alone: int | None,
) -> _Place:  # fmt: skip
    sources, outputs, inputs = (np.rint(one / factors).astype(np.int64) - 1 for one in made)
    sizes = target.shape
    of = [{axis for axis in range(len(sizes)) if one.shape[axis] > 1} for one in (sources, outputs, inputs, factors)]
    stack, rows, columns = of[0] - of[1], of[1], of[2]
    stack = stack if alone is None else {alone}  # a stack of one layer, along which nothing changes
    if len(stack) > 1 or columns & (stack | rows | of[3]):
        raise CheckpointError("is laid out so that no adapter can stand beside it", tensor=target.name)
    axis = next(iter(stack), None)
    if not columns:  # one column, or one row: whichever dimensions are left
        columns = set(range(len(sizes))) - stack - rows
    order = [*sorted(stack), *[one for one in range(len(sizes)) if one not in stack | columns], *sorted(columns)]
    layer_count = 1 if axis is None else sizes[axis]
    out_shape = tuple(sizes[one] for one in range(len(sizes)) if one not in stack | columns)
    in_shape = tuple(sizes[one] for one in sorted(columns))

    def by_row(array: np.ndarray) -> np.ndarray:
        whole = tuple(1 if one in columns else sizes[one] for one in range(len(sizes)))
        return np.broadcast_to(array, whole).transpose(order).reshape(layer_count, -1)

    whole = tuple(sizes[one] if one in columns else 1 for one in range(len(sizes)))
    return _Place(
        target.name, layers, shapes, axis, np.broadcast_to(inputs, whole).reshape(-1), by_row(outputs), by_row(sources),
        by_row(factors), in_shape, out_shape,
    )  # fmt: skip


def _written(
    place: _Place, layers: Mapping[str, Mapping[str, np.ndarray]], factor: float, *, flat: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The leaves a and b of a kernel; layers of a stack that have no adapter get zeros."""
    given = {name: layers[name] for name in place.layers if name in layers}
    ranks = {one["lora_A"].shape[0] for one in given.values()}
    if len(ranks) > 1:
        raise ValueError(f"{place.leaf} holds layers whose adapters have the ranks {sorted(ranks)}, and takes one")
    rank, dtype = ranks.pop(), next(iter(given.values()))["lora_A"].dtype
    a = np.zeros((len(place.outputs), len(place.inputs), rank), dtype)
    b = np.zeros((len(place.outputs), rank, place.outputs.shape[1]), dtype)
    for number, sources in enumerate(place.sources):
        here = [place.layers[one] for one in np.unique(sources)]
        first = next((given[one]["lora_A"] for one in here if one in given), None)
        if first is None:
            continue
        for name in here:
            if name not in given or not np.array_equal(given[name]["lora_A"], first):
                raise ValueError(f"{place.leaf} holds {', '.join(here)}, whose adapters have no lora_A in common")
            rows = sources == place.layers.index(name)
            times = (place.factors[number, rows] * factor)[:, None]
            b[number][:, rows] = (given[name]["lora_B"][place.outputs[number, rows]] * times).T
        a[number] = first[:, place.inputs].T
    if not flat:
        a, b = a.reshape(len(a), *place.in_shape, rank), b.reshape(len(b), rank, *place.out_shape)
    return (a[0], b[0]) if place.axis is None else (np.moveaxis(a, 0, place.axis), np.moveaxis(b, 0, place.axis))


def _parts(
    place: _Place, arrays: Sequence[np.ndarray], leaves: Sequence[str]
) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """(layer, the rows of its matrix in this kernel, lora_A (r, in), those rows of lora_B (rows, r)) of each layer."""
    count, rank = len(place.outputs), arrays[0].shape[-1] if arrays[0].ndim else 0
    stacked = [one if place.axis is None or one.ndim < 3 else np.moveaxis(one, place.axis, 0) for one in arrays]
    sizes = (count, len(place.inputs), rank), (count, rank, place.outputs.shape[1])
    for name, one, size in zip(leaves, stacked, sizes, strict=True):
        if one.size != math.prod(size) or one.size == 0 or (place.axis is not None and one.shape[0] != count):
            raise CheckpointError(
                f"is {one.shape}, and {size} numbers, by layer, belong beside {place.leaf}",
                tensor=name,
            )
    a, b = (one.reshape(size) for one, size in zip(stacked, sizes, strict=True))
    for number, sources in enumerate(place.sources):
        for source in np.unique(sources):
            rows = sources == source
            down = np.empty((rank, len(place.inputs)), a.dtype)
            down[:, place.inputs] = a[number].T
            up = (b[number][:, rows].T / place.factors[number, rows][:, None]).astype(b.dtype)
            yield place.layers[int(source)], place.outputs[number, rows], down, up


def _joined(layer: str, parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """(lora_A, lora_B) of a layer, all of whose rows are in one kernel."""
    rows, a, b = parts[0]
    if len(parts) > 1:
        raise CheckpointError("is given twice", tensor=layer)
    up = np.empty_like(b)
    up[rows] = b
    return _plain(a), _plain(up)


def _plain(array: np.ndarray) -> np.ndarray:
    """float32, which holds every 16-bit number and which torch reads from numpy."""
    return np.ascontiguousarray(array.astype(np.float32))
