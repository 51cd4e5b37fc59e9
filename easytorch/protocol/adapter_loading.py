"""`load_adapter`: transformers' own, for adapters of this model alone."""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.integrations import PeftAdapterMixin

from easytorch.argument_types import check_types
from easytorch.bridge.errors import CheckpointError
from easytorch.protocol.adapter_files import check_adapter_folder
from easytorch.protocol.adapters import (
    active_adapters,
    adapter_names,
    keep_what_adapters_change,
    put_back,
    require_peft,
    wrapped_layers,
)
from easytorch.protocol.mixed_adapters import BASE
from easytorch.protocol.wrappers import refuse_peft_model

_LOG = logging.getLogger(__name__)
# A user's or organization's name and that of a repository, or the latter alone.
_ON_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")


@check_types()
def load_adapter(
    model: PreTrainedModel,
    peft_model_id: str | os.PathLike[str] | None = None,
    adapter_name: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`PreTrainedModel.load_adapter` with its arguments: PEFT's folder, or a name on the Hub, into `model`.

    `ValueError` where the adapter is of another model: a layer or a shape that is not the model's, which transformers
    leaves out or stops at halfway; `CheckpointError` for a folder with a damaged file. The model is then as it was.
    """
    require_peft()
    refuse_peft_model(model, "load_adapter")
    folder = None if peft_model_id is None else os.fspath(peft_model_id)
    name, known = adapter_name or "default", adapter_names(model)
    check_adapter_name(name)
    if folder is not None:
        _check_folder(folder, args, kwargs)
    sizes_may_differ = kwargs.pop("ignore_mismatched_sizes", None)
    if sizes_may_differ is None:
        sizes_may_differ = getattr(kwargs.get("load_config"), "ignore_mismatched_sizes", False)
    kwargs["weight_mapping"] = _with_magnitudes(model, name, kwargs)
    if name in known:  # an error of transformers, or a hot swap
        return PeftAdapterMixin.load_adapter(model, folder, adapter_name, *args, **kwargs)
    keep_what_adapters_change(model, {}, True)
    active = active_adapters(model) if known else []
    required = {key: one.requires_grad for key, one in model.named_parameters()}
    done = False
    try:
        info: Any = PeftAdapterMixin.load_adapter(
            model, folder, adapter_name, *args, **kwargs, ignore_mismatched_sizes=True
        )
        left = sorted(getattr(info, "unexpected_keys", ()))
        missing = _of_adapter(model, name, getattr(info, "missing_keys", ()))
        shapes = [] if sizes_may_differ else sorted(getattr(info, "mismatched_keys", ()))
        if left or missing or shapes:
            if left or missing:
                what = f"{left[0]!r} is no part of it" if left else f"{missing[0]!r} is not in it"
            else:
                key, stored, wanted = shapes[0]
                what = f"{key!r} has the shape {tuple(stored)}, and {tuple(wanted)} in the model"
            raise ValueError(f"the adapter of {peft_model_id} is of another model than {type(model).__name__}: {what}")
        done = True
        begins = str(getattr(model.peft_config[name], "init_lora_weights", ""))
        if begins.startswith("pissa_niter"):
            _LOG.warning(
                "the adapter of %s began with init_lora_weights=%r, which draws random numbers: the weights below it "
                "are near those that it was trained with, and not the same", peft_model_id, begins,
            )  # fmt: skip
    finally:
        if not done:
            put_back(model, name, known, active, required)
    return info


def _check_folder(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Checks a folder of this machine; a name on the Hub is left to transformers, which downloads it."""
    given = inspect.signature(PeftAdapterMixin.load_adapter).bind_partial(None, path, None, *args, **kwargs).arguments
    more = {**given.get("kwargs", {}), **(given.get("adapter_kwargs") or {})}
    folder = Path(path) / (more.get("subfolder") or "")
    if folder.is_dir():
        config, weights = given.get("peft_config") is None, given.get("adapter_state_dict") is None
        check_adapter_folder(folder, config=config, weights=weights)
    elif Path(path).exists() or not _ON_HUB.fullmatch(path):
        raise CheckpointError("is no folder; pass one with adapter_config.json, or a name on the Hub", file=folder)


def check_adapter_name(name: str) -> None:
    """`ValueError` for the name that stands for no adapter in a batch's `adapter_names`."""
    if name == BASE:
        raise ValueError(f"adapter_name={BASE!r} stands for no adapter, in adapter_names; give this one another name")


def _with_magnitudes(model: Any, name: str, kwargs: dict[str, Any]) -> list[Any]:
    """The renamings of a load, and that of DoRA's magnitudes: tensors in PEFT's files, in its layers modules' weights.

    Without it transformers leaves out the magnitudes of the file, and keeps those of the base's own weights.
    """
    given = kwargs.get("weight_mapping") or getattr(kwargs.get("load_config"), "weight_mapping", None)
    magnitude = WeightRenaming(rf"(lora_magnitude_vector\.{re.escape(name)})$", r"\1.weight")
    return [*(given or get_model_conversion_mapping(model)), magnitude]


def _of_adapter(model: Any, name: str, keys: Iterable[str]) -> list[str]:
    """Those of `keys`, sorted, that are tensors of the adapter `name`, which may be the name of a layer too."""
    copies: Any = require_peft().utils.other.ModulesToSaveWrapper
    parts = {(path, part) for path, layer in wrapped_layers(model).items() for part in layer.adapter_layer_names}
    parts |= {(path, "modules_to_save") for path, one in model.named_modules() if isinstance(one, copies)}
    begins = tuple(f"{path}.{part}.{name}." for path, part in parts)
    return sorted(key for key in keys if f"{key}.".startswith(begins))
