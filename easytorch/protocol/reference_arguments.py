"""`generate`, `save_pretrained` and `push_to_hub` of transformers with the arguments that EasyDeL has beside theirs.

What means something to JAX alone is refused with the reason.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import validate_repo_id
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from easytorch.argument_types import check_types
from easytorch.cache_names import under_installed_name
from easytorch.protocol.adapters import check_savable
from easytorch.protocol.cache_checks import check_own_cache
from easytorch.protocol.dtypes import dtype_of, to_dtype
from easytorch.protocol.lazy import require_memory
from easytorch.protocol.mixed_adapters import generate_rows
from easytorch.protocol.wrappers import is_peft_model

_LOG = logging.getLogger(__name__)
# argument: why it has no meaning here, and what stands in its place
OF_JAX = {
    "trace": "it says whether JAX compiles the loop; torch.compile(model) compiles here",
    "gather_fns": "they gather JAX's shards for a file; gather_model makes a sharded model whole",
    "mismatch_allowed": "it is about parameters that JAX's trees lack; a model is written whole here",
    "use_temp_dir": "the model is always written to a temporary folder first",
}

_ADDED = {"prng_key", "trace", "adapter_names"}


def refuse_jax(**given: Any) -> None:
    """`ValueError` with the reason where one of `given`, names of `OF_JAX`, is not None."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} is JAX's alone: {OF_JAX[name]}; leave it out")


@check_types("prng_key", "trace")
def generate(
    model: PreTrainedModel,
    input_ids: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    prng_key: torch.Generator | int | None = None,
    trace: bool | None = None,
    logits_processor: list[Any] | None = None,
    **kwargs: Any,
) -> Any:
    """transformers' `generate`. prng_key: a seed, or a generator one is drawn from, for this call's sampling.
    adapter_names: an adapter for each prompt, "__base__" for none, as PEFT's `generate` takes them.

    `ValueError` for `trace`, and `TypeError` for a key of JAX.
    """
    if is_peft_model(model):
        raise TypeError(f"generate: {type(model).__name__} is PEFT's wrapper; call its own generate, or pass the model")
    if not isinstance(model, GenerationMixin) or not model.can_generate():
        raise ValueError(f"{type(model).__name__} generates nothing: it has no language modeling head")
    require_memory(model, "generate", by_calls=True)
    kwargs = under_installed_name(model.forward, kwargs)
    check_own_cache(model, kwargs)
    return generate_by(
        type(model).generate, model, input_ids, generation_config=generation_config, prng_key=prng_key, trace=trace,
        logits_processor=logits_processor, **kwargs,
    )  # fmt: skip


def generate_by(
    theirs: Callable[..., Any],
    model: Any,
    *args: Any,
    prng_key: Any = None,
    trace: Any = None,
    adapter_names: Any = None,
    **kwargs: Any,
) -> Any:
    """`theirs`, a `generate` of transformers, with EasyDeL's two arguments and PEFT's beside its own."""
    refuse_jax(trace=trace)
    if adapter_names is not None:
        theirs = functools.partial(generate_rows, theirs)
        kwargs["adapter_names"] = adapter_names
    if prng_key is None:
        return theirs(model, *args, **kwargs)
    if isinstance(prng_key, bool) or not isinstance(prng_key, torch.Generator | int):
        raise TypeError(f"prng_key={prng_key!r} must be a seed or a torch.Generator: a key of JAX seeds nothing here")
    seed = prng_key
    if isinstance(prng_key, torch.Generator):
        seed = int(torch.randint(2**63 - 1, (), generator=prng_key, device=prng_key.device))
    devices = [] if model.device.type == "cpu" else [model.device]
    with torch.random.fork_rng(devices=devices, device_type=model.device.type if devices else "cuda"):
        torch.manual_seed(seed)
        return theirs(model, *args, **kwargs)


def also_with_ours(model_class: Any) -> None:
    """Gives a class that generates `generate_by` of its own `generate`."""
    theirs = model_class.generate

    @functools.wraps(theirs)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "meta":
            require_memory(self, "generate", by_calls=True)
        kwargs = under_installed_name(self.forward, kwargs)
        if kwargs.keys() & _ADDED:
            return generate_by(theirs, self, *args, **kwargs)
        return theirs(self, *args, **kwargs)

    model_class.generate = generate


@check_types("step", "float_dtype", "gather_fns")
def save_pretrained(
    model: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    push_to_hub: bool = False,
    token: str | bool | None = None,
    gather_fns: Mapping[str, Any] | None = None,
    float_dtype: torch.dtype | str | None = None,
    step: int | None = None,
    *,
    theirs: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Any:
    """transformers' `save_pretrained`, and with `to="flax"` and others the formats that native models write.

    float_dtype: of the floating tensors in the files; the model keeps its own. step: the folder is
    `save_directory/checkpoint-<step>`, as transformers' Trainer names it.

    `ValueError` for `gather_fns`. theirs: the method to call, the class's by default.
    """
    refuse_jax(gather_fns=gather_fns)
    require_memory(model, "save_pretrained", by_transformers=True)
    check_savable(model)
    from easytorch.protocol import mesh_saving  # which imports this module

    if theirs is None and mesh_saving.by_ranks(model, {**kwargs, "float_dtype": float_dtype}):
        given = {**kwargs, "push_to_hub": push_to_hub, "token": token, "float_dtype": float_dtype, "step": step}
        save = functools.partial(type(model).save_pretrained, model)
        return mesh_saving.save_sharded(model, save_directory, save, given)
    folder = folder_of(save_directory, step)
    if token is not None:
        kwargs["token"] = token
    if float_dtype is None:
        return (theirs or type(model).save_pretrained)(model, folder, push_to_hub=push_to_hub, **kwargs)
    if kwargs.get("state_dict") is not None or push_to_hub:
        raise ValueError("float_dtype goes with neither state_dict nor push_to_hub=True: cast the model by to_dtype")
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        raise ValueError(
            f"float_dtype does not go with {type(quantizer).__name__}, which writes tensors of its own: leave it out"
        )
    dtype = dtype_of(float_dtype)
    cast: dict[Any, Tensor] = {}  # tied weights stay one tensor
    state = dict(model.state_dict())
    for name, one in state.items():
        if one.is_floating_point():
            place = (one.data_ptr(), one.shape, one.stride())
            state[name] = cast[place] if place in cast else cast.setdefault(place, one.to(dtype))
    result = (theirs or type(model).save_pretrained)(model, folder, state_dict=state, **kwargs)
    file = Path(folder) / "config.json"
    if file.is_file():  # an adapter's folder has none
        content = json.loads(file.read_text(encoding="utf-8"))
        content["dtype"] = str(dtype).removeprefix("torch.")
        made = file.with_suffix(".json.new")
        made.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        made.replace(file)
    return result


def folder_of(save_directory: str | os.PathLike[str], step: int | None) -> str | os.PathLike[str]:
    """The folder of a save: of a step that of transformers' Trainer. `ValueError` for what is no step."""
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(f"step={step!r} must be an int of at least 0")
    return save_directory if step is None else Path(save_directory) / f"checkpoint-{step}"


@check_types("gather_fns", "use_temp_dir", "mismatch_allowed", "float_dtype")
def push_to_hub(
    model: PreTrainedModel,
    repo_id: str,
    use_temp_dir: bool | None = None,
    commit_message: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    create_pr: bool = False,
    gather_fns: Mapping[str, Any] | None = None,
    float_dtype: torch.dtype | str | None = None,
    verbose: bool = False,
    mismatch_allowed: bool | None = None,
    revision: str | None = None,
    commit_description: str | None = None,
    *,
    theirs: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Any:
    """transformers' `push_to_hub`. float_dtype: uploads a copy in that dtype. verbose: logs where it is.

    A model over a mesh: each rank calls this, all write the files, and the first one uploads them.

    `ValueError` for `gather_fns`, `use_temp_dir` and `mismatch_allowed`. theirs: as in `save_pretrained`.
    """
    refuse_jax(gather_fns=gather_fns, use_temp_dir=use_temp_dir, mismatch_allowed=mismatch_allowed)
    validate_repo_id(repo_id)
    from easytorch.protocol import mesh_saving  # which imports this module

    if mesh_saving.is_sharded(model):
        result = mesh_saving.push_sharded_model(
            model, repo_id, float_dtype=float_dtype, commit_message=commit_message, private=private, token=token,
            create_pr=create_pr, revision=revision, commit_description=commit_description, **kwargs,
        )  # fmt: skip
        if verbose:
            _LOG.warning("uploaded to %s", result)
        return result
    uploaded = model if float_dtype is None else to_dtype(copy.deepcopy(model), float_dtype)
    result = (theirs or type(model).push_to_hub)(
        uploaded, repo_id, commit_message=commit_message, private=private, token=token, create_pr=create_pr,
        revision=revision, commit_description=commit_description, **kwargs,
    )  # fmt: skip
    if verbose:
        _LOG.warning("uploaded to %s", result)
    return result
