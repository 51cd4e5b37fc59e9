"""Every function of `easytorch.protocol`: an argument of another type is one error that names it."""

from __future__ import annotations

import copy
import inspect
import linecache
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

import easytorch
from easytorch import protocol
from easytorch.argument_types import check_types

SIZES = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
FUNCTIONS = {name: one for name in protocol.__all__ if isinstance(one := getattr(protocol, name), types.FunctionType)}
TOKENS = torch.ones(1, 4, dtype=torch.long)


class Wrong:
    """Of no type that any argument takes."""


@pytest.fixture(scope="module")
def right() -> dict[str, Any]:
    """A value for every argument that has no default."""
    model = easytorch.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    graphdef, parameters, buffers = protocol.split_module(model)
    return {
        "model": model, "module": model, "model_class": type(model), "config": model.config, "lora_rank": 2,
        "input_ids": TOKENS, "batch_size": 1, "max_length": 8, "hbm_utilization": 0.5, "page_size": 4, "step": 0,
        "max_model_length": 8, "optimizer": torch.optim.SGD(model.parameters()), "pytree": {}, "tree": {}, "leaves": {},
        "params_dict": {}, "definition": graphdef, "parameters": parameters, "buffers": buffers, "repo_id": "a/b",
        "save_directory": "folder", "model_outputs": None, "model_kwargs": {}, "train_state": {}, "params": {},
        "folder": "folder", "dtype": "float32", "original_return_type": int,
    }  # fmt: skip


# What the function itself checks, having more to say; other arguments of the call.
BY_ITSELF: dict[tuple[str, str], dict[str, Any]] = {
    ("compute_loss", "cache_metadata"): {"input_ids": TOKENS},
    ("from_flax", "params"): {},
    ("from_optax", "train_state"): {},
    ("gather_model", "mesh"): {},
    ("gather_model", "partition_rules"): {},
    ("lora_from_flax", "tree"): {},
    ("shard_model", "mesh"): {},
    ("shard_model", "partition_rules"): {},
    ("to_flax", "shardings"): {},
    ("to_optax", "opt_state"): {"optimizer": "with momentum"},
    ("update_inputs_for_generation", "model_outputs"): {},
}
# Refused by the function that is returned.
LATER = {("transform_fn", "shardings")}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_argument_of_another_type(name, right):
    function = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters
    required = {
        key: right[key] for key, one in parameters.items() if one.default is one.empty and one.kind not in (2, 4)
    }
    tried = 0
    for key, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or (name, key) in LATER:
            continue
        tried += 1
        with pytest.raises((TypeError, ValueError)) as found:
            given = {**required, **BY_ITSELF.get((name, key), {}), key: Wrong()}
            if given.get("optimizer") == "with momentum":
                given["optimizer"] = torch.optim.SGD(right["model"].parameters(), momentum=0.9)
            function(**given)
        if (name, key) not in BY_ITSELF and key not in vars(function)["left_to_the_function"]:
            assert str(found.value).startswith(f"{name}: {key}=<Wrong> must be "), found.value
        else:
            frame = found.traceback[-1]
            lines = [linecache.getline(str(frame.path), frame.lineno + 1 - back) for back in range(4)]
            assert "site-packages" not in str(frame.path) and any("raise " in line for line in lines), found.value
    assert tried


def test_what_counts_as_a_type():
    @check_types()
    def function(a: int, b: float | None = None, c: list[str] | str = "x", d: type[int] = int) -> int:
        return a

    assert function(1, 2, ["y"], bool) == function(1, b=2.5) == function(a=1, b=None) == 1
    for wrong, words in (
        ({"a": True}, "function: a=True must be int"),
        ({"a": 1, "b": "2"}, "function: b='2' must be float or None"),
        ({"a": 1, "c": 3}, "function: c=3 must be list or str"),
        ({"a": 1, "d": 3}, "function: d=3 must be a class"),
        ({"a": torch.ones(2)}, "function: a=<Tensor> must be int"),
    ):
        with pytest.raises(TypeError) as found:
            function(**wrong)
        assert str(found.value) == words
    with pytest.raises(TypeError, match="unexpected keyword argument 'e'"):
        function(1, e=2)


def test_what_python_takes_for_a_type_is_taken():
    @check_types()
    def function(
        a: int = 1, b: float = 1.0, c: list[Any] | None = None, d: dict[str, Any] | None = None, e: bool = True,
        f: str | Path = "x",
    ) -> None: ...  # fmt: skip

    class Folder:
        def __fspath__(self) -> str:
            return "x"

    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("of the user")

    for given in ({"a": np.int64(2)}, {"b": np.float32(2)}, {"c": ()}, {"d": types.MappingProxyType({})}, {"e": 0},
                  {"e": np.bool_(True)}, {"f": Folder()}, {"f": Path("x")}):  # fmt: skip
        function(**given)
    for wrong in ({"a": np.bool_(True)}, {"a": 1.0}, {"a": np.float32(1)}, {"e": 2}, {"c": {}}, {"f": Broken()}):
        with pytest.raises(TypeError, match=rf"function: {next(iter(wrong))}="):
            function(**wrong)
    with pytest.raises(TypeError, match=r"^function\(\) got an unexpected keyword argument 'g'"):
        function(g=1)


def test_starts_and_folders_as_the_reference_has_them(tmp_path):
    model = easytorch.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    for starts in (2, [2, 2, 2], torch.tensor([2, 2, 2])):
        assert model.init_cache(3, 8, starts=starts).layers
        model.prepare_inputs_for_generation(torch.ones(3, 4, dtype=torch.long), 8, starts=starts)
    protocol.to_state(model).save(tmp_path / "state")

    class Folder:
        def __fspath__(self) -> str:
            return str(tmp_path / "state")

    assert protocol.load_state(Folder(), model_class=type(model)).step == 0
    protocol.to_state(torch.compile(model, backend="eager")).save(tmp_path / "compiled")
    again = protocol.load_state(tmp_path / "compiled", model_class=type(model)).model
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    protocol.return_type_adjuster(list[int])(len)


def test_wrappers_of_a_model_are_models():
    model = easytorch.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval()
    wrapped = torch.compile(copy.deepcopy(model), backend="eager")
    assert torch.equal(protocol.compute_loss(wrapped, input_ids=TOKENS)[1].loss, model.compute_loss(TOKENS)[1].loss)


def test_a_model_without_memory_says_so(tmp_path):
    model = protocol.lazy_init(easytorch.AutoModelForCausalLM, LlamaConfig(**SIZES))
    folder = tmp_path / "folder"
    for call in (
        lambda: model.generate(TOKENS, max_new_tokens=1),
        lambda: protocol.generate(model, TOKENS),
        lambda: model.save_pretrained(folder),
        lambda: protocol.save_pretrained(model, folder),
        lambda: model.to_state().save(folder),
        model.to_flax,
        model.to_torch,
        lambda: model.apply_lora_to_layers(2, "q_proj", init="pissa"),
    ):
        with pytest.raises(
            ValueError, match=r"'model\.embed_tokens\.weight' of .* is on the meta device and has no values"
        ):
            call()
        assert not folder.exists()
    assert model(TOKENS).logits.shape == (1, 4, 31)  # shapes are known
