"""The model in what a torch training loop saves: `{"model": ..., "optimizer": ..., "step": ...}` and the like.

Keys are those of torchtitan, Lightning, Accelerate and hand-written loops; prefixes of torch's wrapper modules (DDP,
FSDP1, torch.compile, activation checkpointing) are removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from easytorch.bridge.errors import CheckpointError

# Keys under which the model stands, and those under which everything else does.
WRAPPERS = frozenset(("app", "state", "state_dict", "model", "model_state", "model_state_dict", "module", "params"))
_TRAINING = re.compile(
    r"(optim|optimizers?|optimizer_state(_dict)?|optim_state(_dict)?|(lr_)?schedulers?|scaler|rng(_state)?s?"
    r"|train(er|ing)?(_state)?|dataloader|ema|step|epoch)(\.|$)"
)
_BETWEEN = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_DDP = "module."
# None is nested deeper, and a damaged one may hold itself.
_DEEPEST = 8


def own_names(names: Iterable[str], file: Path) -> dict[str, str]:
    """The model's own names of its weights -> as given; `CheckpointError` for two that are one."""
    given = list(names)
    start = len(_DDP) if given and all(name.startswith(_DDP) for name in given) else 0
    found: dict[str, str] = {}
    for name in given:
        own = _BETWEEN.sub("", name[start:])
        if own in found:
            message = f"and {found[own]!r} are both called {own!r}; save one model"
            raise CheckpointError(message, file=file, tensor=name)
        found[own] = name
    return found


def training_path(path: Sequence[str]) -> str | None:
    """The path of what a training state keeps beside the model, from there on; None for a tensor of the model."""
    for number, key in enumerate(path):
        # The last key is a module's own name, except where nothing stands above it.
        if _TRAINING.match(key) and (number < len(path) - 1 or number == 0):
            return "/".join(path[number:])
    return None


def model_in(state: Mapping[str, object], file: Path) -> tuple[Mapping[str, object], tuple[str, ...]]:
    """The state dict within `state`, and the keys beside it on the way; `state` itself where nothing wraps it."""
    left_out: list[str] = []
    for _ in range(_DEEPEST):
        wrapped = [key for key, value in state.items() if key in WRAPPERS and isinstance(value, Mapping)]
        if not wrapped:
            break
        if len(wrapped) > 1:
            raise CheckpointError(f"holds several models, under {wrapped}; save the one to use alone", file=file)
        left_out += [str(key) for key in state if key != wrapped[0]]
        inner = state[wrapped[0]]
        assert isinstance(inner, Mapping)
        state = inner
    return state, tuple(left_out)
