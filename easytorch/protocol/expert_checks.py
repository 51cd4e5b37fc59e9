"""Experts that a checkpoint stores one by one, before they are stacked: each of them is there, and of one shape.

transformers stacks those that there are, in the order of their numbers: where one is missing, the others move up.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel

from easytorch.bridge.errors import CheckpointError, nearest
from easytorch.bridge.formats.torch_files.torch_bin import PickleFile
from easytorch.protocol.checkpoint_files import torch_folder, weight_files
from easytorch.protocol.expert_names import EXPERT
from easytorch.protocol.load_checks import MismatchedShapeError

Shapes = Mapping[str, tuple[int, ...]]
_WEIGHT = ".weight"
_SWITCH = "HF_DEACTIVATE_ASYNC_LOAD"


def check_experts(model_class: type[PreTrainedModel], path: Any, kwargs: Mapping[str, Any]) -> int | None:
    """`CheckpointError` naming the first expert's weight that is missing, or of another shape than those of the others.

    path, kwargs: those of `from_pretrained`. How many weights of experts there are; None: the files are not here yet.
    """
    state = kwargs.get("state_dict")
    if state is not None:
        if isinstance(state, dict):  # others may read a tensor where one asks for it
            given = ((name, getattr(one, "shape", ())) for name, one in state.items())
            _check(model_class, dict(_of_experts(given)), None)
        return 0
    if path is None:
        return 0
    folder = torch_folder(path, dict(kwargs))
    files = weight_files(folder, kwargs) if folder.is_dir() else []
    source = files[0] if len(files) == 1 else folder
    shapes = dict(_of_experts(itertools.chain.from_iterable(map(_shapes, files))))
    _check(model_class, shapes, str(source))
    return len(shapes) if folder.is_dir() else None


@contextlib.contextmanager
def one_stack_at_a_time() -> Iterator[None]:
    """Within it transformers reads an expert's weight when it is stacked, as where it loads to a disk.

    Otherwise its threads read and cast all of them ahead, which are then held beside their stacks: 30,000 weights of
    32 KiB cast to float32 took 2.4 times the memory of the model, and 0.86 of the time.
    """
    before = os.environ.get(_SWITCH)
    os.environ.setdefault(_SWITCH, "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_SWITCH, None)


def _shapes(file: Path) -> Iterator[tuple[str, Any]]:
    if file.suffix != ".safetensors":
        with PickleFile(file) as pickled:
            yield from [(name, one.shape) for name, one in pickled.tensors.items()]
        return
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - it is no mapping
            if EXPERT.match(name):
                yield name, opened.get_slice(name).get_shape()


def _of_experts(shapes: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((name, tuple(shape)) for name, shape in shapes if EXPERT.match(name))


def _check(model_class: type[PreTrainedModel], shapes: Shapes, source: str | None) -> None:
    ignored = [re.compile(one) for one in model_class._keys_to_ignore_on_load_unexpected or ()]
    stacks: dict[str, dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for name in shapes:
        found = EXPERT.match(name)
        assert found is not None
        if not any(one.search(name) for one in ignored):
            stack = name[: found.start("number")]
            # the weight stands for the scales and zero points beside it
            part = stacks[stack][int(found["number"])]
            if found["part"] not in part or name.endswith(_WEIGHT):
                part[found["part"]] = name
    for stack, numbers in stacks.items():
        _check_stack(model_class, stack, numbers, shapes, source)


def _check_stack(
    model_class: type[PreTrainedModel],
    stack: str,
    numbers: Mapping[int, Mapping[str, str]],
    shapes: Shapes,
    source: str | None,
) -> None:
    counts = Counter(part for parts in numbers.values() for part in parts)
    known = [part for part, count in counts.items() if 2 * count > len(numbers)]
    every = range(max(numbers) + 1)
    absent = (
        f"{stack}{number}.{part}{_WEIGHT}" for number in every for part in known if part not in numbers.get(number, {})
    )
    if (first := next(absent, None)) is not None:
        more = len(every) * len(known) - sum(counts[part] for part in known) - 1
        others = f" (and {more} more)" if more else ""
        # what stands there under another part's name, or under a number beyond those that there would be
        strange = [
            name
            for number, parts in numbers.items()
            for part, name in parts.items()
            if part not in known or number > len(numbers)
        ]
        raise CheckpointError(
            f"is missing from the checkpoint{others}{nearest(first, strange)}, and {model_class.__name__} stacks the "
            f"experts of a layer by their numbers; restore it",
            file=source,
            tensor=first,
        )
    for part in known:
        names = [parts[part] for parts in numbers.values()]
        if not all(name.endswith(_WEIGHT) for name in names):
            continue  # of some the weight is there, of others its codes
        usual, count = Counter(shapes[name] for name in names).most_common(1)[0]
        if len(names) > count > len(names) // 2:  # else they are meant to be of two kinds, as ERNIE 4.5 VL's
            odd = min(name for name in names if shapes[name] != usual)
            raise MismatchedShapeError(
                f"has shape {shapes[odd]} in the checkpoint and those of {count} of the {len(names)} experts "
                f"{usual}; {model_class.__name__} stacks them: restore it",
                file=source,
                tensor=odd,
            )
