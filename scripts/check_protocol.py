"""Calls every name of the module protocol with its documented arguments, and compares it with torch written by hand.

    python scripts/check_protocol.py [--models llama qwen3_moe ...] [--reference TEXT]

`protocol_arguments.py` has a check for each documented argument; --reference is the text of EasyDeL's page of the
protocol, whose signatures are then read and must be those. The names are the rows of docs/protocol.md, which
tests/protocol/test_page.py holds to EasyDeL's. A name that a model does not have is refused by a clear error, which is
checked too. Exit status 1 where one differs.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # of this checkout, installed or not

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402

import easytorch  # noqa: E402
from easytorch import protocol  # noqa: E402
from scripts import protocol_arguments as arguments_of  # noqa: E402

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MOE = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 97}
VIT = {"image_size": 8, "patch_size": 4, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
MODELS: dict[str, tuple[str, Any]] = {
    "llama": ("CausalLM", transformers.LlamaConfig(**SIZES)),
    "qwen3_moe": ("CausalLM", transformers.Qwen3MoeConfig(**MOE, num_experts_per_tok=2)),
    "bert": ("MaskedLM", transformers.BertConfig(**SIZES)),
    "t5": ("Seq2SeqLM", transformers.T5Config(**T5, decoder_start_token_id=0)),
    "vit": ("ImageClassification", transformers.ViTConfig(**VIT, num_attention_heads=4, num_labels=3)),
    "mpt": ("CausalLM", transformers.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=97)),  # not native
}
IDS = torch.tensor([[5, 9, 33, 71, 8, 2]])
# Calls with what means something to JAX alone: each is refused, and the reason is printed.
OF_JAX: dict[str, Callable[[Any], Any]] = {
    "generate(prng_key=a key)": lambda model: protocol.generate(model, IDS, prng_key=object()),  # type: ignore[arg-type]
    "generate(trace)": lambda model: protocol.generate(model, IDS, trace=True),
    "save_pretrained(gather_fns)": lambda model: protocol.save_pretrained(model, "unused", gather_fns={}),
    "push_to_hub(gather_fns)": lambda model: protocol.push_to_hub(model, "me/unused", gather_fns={}),
    "push_to_hub(use_temp_dir)": lambda model: protocol.push_to_hub(model, "me/unused", use_temp_dir=True),
    "push_to_hub(mismatch_allowed)": lambda model: protocol.push_to_hub(model, "me/unused", mismatch_allowed=True),
    "apply_lora_to_layers(rngs=a key)": lambda model: protocol.apply_lora_to_layers(model, 2, rngs=object()),  # type: ignore[arg-type]
    "init_cache(shardings)": lambda model: protocol.init_cache(model, 1, 8, shardings={}),
    "QuantizationConfig(runtime_dtype)": lambda _: protocol.QuantizationConfig(runtime_dtype="bf16"),  # type: ignore[arg-type]
    "QuantizationConfig(jax_native)": lambda _: protocol.QuantizationConfig(jax_native=True),
    "shard_model(mesh=jax's)": lambda model: protocol.shard_model(model, None, object()),
}


class Case:
    """A model by name, and what it is called with."""

    def __init__(self, name: str) -> None:
        head, config = MODELS[name]
        torch.manual_seed(0)
        self.name = name
        self.model: Any = getattr(easytorch, f"AutoModelFor{head}").from_config(copy.deepcopy(config)).eval()
        self.inputs: dict[str, Any] = {"input_ids": IDS}
        self.labels: Any = IDS
        if name == "vit":
            self.inputs = {"pixel_values": torch.randn(2, 3, 8, 8)}
            self.labels = torch.tensor([0, 2])
        elif name == "t5":
            self.inputs |= {"decoder_input_ids": self.model.prepare_decoder_input_ids_from_labels(labels=IDS)}
        self.causal = head == "CausalLM"
        self.generates = self.model.can_generate() and name != "bert"

    def copied(self) -> Any:
        return copy.deepcopy(self.model)

    def logits(self, model: Any = None) -> torch.Tensor:
        with torch.no_grad():
            return (model or self.model)(**self.inputs).logits

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The method where there is one, and the function of the protocol."""
        own = getattr(type(self.model), name, None)
        if own is not None and type(self.model).__module__.startswith("easytorch."):
            return getattr(self.model, name)(*args, **kwargs)
        return getattr(protocol, name)(self.model, *args, **kwargs)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def refused(error: type[Exception], call: Callable[[], Any]) -> None:
    try:
        call()
    except error as reason:
        assert len(str(reason)) > 20, "the error says too little"
    else:
        raise AssertionError(f"it should be refused by {error.__name__}")


def state(case: Case) -> None:
    model = case.model
    right = {name: one.detach() for name, one in model.named_parameters()}
    for found in (case.call("split_params"), protocol.graphstate(model)):
        assert found.keys() == right.keys() and all(torch.equal(found[name], one) for name, one in right.items())
    parts = case.call("split_params_dict")
    assert parts["params"].keys() == right.keys() and parts["buffers"].keys() == dict(model.named_buffers()).keys()
    assert protocol.graphother(model).keys() == dict(model.named_buffers()).keys()
    definition = protocol.graphdef(model)
    tensors = {**right, **dict(model.named_buffers())}
    with torch.no_grad():
        close(definition.apply(tensors, **case.inputs).logits, case.logits())
    other = case.copied()
    for one in other.parameters():
        one.data.zero_()
    protocol.merge_params(other, protocol.unflatten(right))
    close(case.logits(other), case.logits())
    first = next(iter(right))
    protocol.merge_params_dict(other, {first: torch.ones_like(right[first])})
    assert bool((other.get_parameter(first) == 1).all())
    empty = protocol.lazy_init(type(model), copy.deepcopy(model.config))
    assert all(one.is_meta for one in empty.parameters())


def life_cycle(case: Case) -> None:
    model = case.model
    assert model.config is not None and isinstance(model.config, model.config_class)
    # T5's prefix is of checkpoints older than its class
    assert isinstance(model.base_model_prefix, str) and isinstance(model.can_generate(), bool)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        close(case.logits(type(model).from_pretrained(folder).eval()), case.logits())
        case.call("save_pretrained", f"{folder}/run", float_dtype=torch.bfloat16, step=5)
        halved = type(model).from_pretrained(f"{folder}/run/checkpoint-5").eval()
        close(case.logits(halved.float()), case.logits(copy.deepcopy(model).bfloat16().float()))
    for name, dtype in (("half", torch.float16), ("float32", torch.float32)):
        assert all(one.dtype == dtype for one in getattr(protocol, name)(case.copied()).parameters())
    assert all(one.dtype == torch.bfloat16 for one in protocol.to_dtype(case.copied(), torch.bfloat16).parameters())
    assert "return_dict" in protocol.get_static_arguments(model) or protocol.get_static_arguments(model)
    assert protocol.get_torch_loader(type(model)).__name__.startswith("AutoModel")
    count = sum(one.numel() for one in model.parameters())
    assert f"{count:,}" in protocol.printify_nnx(model) and type(model).__name__ in protocol.prettify_nnx(model)
    assert "weight" in protocol.get_module_repr(
        next(one for one in model.modules() if isinstance(one, torch.nn.Linear))
    )
    assert protocol.return_type_adjuster(int)(len)([1]) == 1
    assert callable(model.push_to_hub)
    close(case.logits(protocol.to_torch(model).eval()), case.logits())


def flax(case: Case) -> None:
    tree = protocol.to_flax(case.model)
    leaves = protocol.transform_fn(case.model)(case.model.state_dict())
    assert protocol.flatten(tree).keys() == protocol.flatten(leaves).keys()


def train_state(case: Case) -> None:
    model = case.copied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    protocol.compute_loss(model, **case.inputs, labels=case.labels)[1].loss.backward()
    optimizer.step()
    made, after = protocol.to_state(model, optimizer, step=3), case.logits(model)
    again = case.copied()
    assert made.restore(again, torch.optim.AdamW(again.parameters(), lr=1e-2)) == 3
    close(case.logits(again), after)


def lora(case: Case) -> None:
    model = case.copied()
    protocol.apply_lora_to_layers(model, 2, rngs=0)
    generator = torch.Generator().manual_seed(1)
    values = {
        name: torch.randn(one.shape, generator=generator) * 0.1
        for name, one in protocol.split_lora_params(model).items()
    }
    protocol.merge_lora_params(model, values)
    changed = case.logits(model)
    by_hand = case.copied()  # W + B @ A
    with torch.no_grad():
        for name in (one.removesuffix(".lora_A.weight") for one in values if one.endswith("lora_A.weight")):
            by_hand.get_submodule(name).weight += values[f"{name}.lora_B.weight"] @ values[f"{name}.lora_A.weight"]
    close(case.logits(by_hand), changed)
    protocol.unwrap_lora_to_layers(model)
    close(case.logits(model), changed)
    assert not torch.equal(changed, case.logits())
    refused(ValueError, lambda: protocol.unwrap_lora_to_layers(model))


def loss(case: Case) -> None:
    _, metrics = case.call("compute_loss", **case.inputs, labels=case.labels)
    logits = case.logits()
    labels = F.pad(case.labels, (0, 1), value=-100)[:, 1:] if MODELS[case.name][0] == "CausalLM" else case.labels
    close(metrics.loss.detach(), F.cross_entropy(logits.flatten(0, -2), labels.flatten()))


def caches(case: Case) -> None:
    if not case.generates:
        refused(ValueError, lambda: case.call("init_cache", 1, 16))
        return
    prompt = {"inputs": IDS, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    prompt |= {"pad_token_id": 0, "use_cache": True}  # MPT's config says that it uses none
    right = case.model.generate(**prompt)
    chosen = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 5}
    assert torch.equal(protocol.generate(case.model, IDS, **chosen, do_sample=False), right)
    sampled = [protocol.generate(case.model, IDS, prng_key=key, do_sample=True, **chosen) for key in (1, 1)]
    assert torch.equal(*sampled)
    assert case.call("create_cache_metadata", 1, 16).max_length == 16
    kind = "dynamic" if case.name == "mpt" else "static"  # its own attention takes no static cache
    assert torch.equal(case.model.generate(**prompt, past_key_values=case.call("init_cache", 1, 16, kind=kind)), right)
    if case.name == "t5":
        refused(ValueError, lambda: case.call("create_paged_metadata", 1.0, 4, 16))
        return
    metadata = dataclasses.replace(case.call("create_paged_metadata", 1.0, 4, 16), num_pages=8)
    assert torch.equal(case.model.generate(**prompt, past_key_values=case.call("init_ragged_pages", metadata)), right)
    kwargs = protocol.prepare_inputs_for_generation(case.model, IDS, 16, 0, kind=kind)
    tokens, found = IDS, []
    with torch.no_grad():
        for _ in range(5):
            output = case.model(tokens, **case.call("prepare_inputs_for_call", **kwargs))
            kwargs = case.call("update_inputs_for_generation", output, kwargs)
            tokens = output.logits[:, -1:].argmax(-1)
            found.append(tokens)
    assert torch.equal(torch.cat(found, 1), right[:, IDS.shape[1] :])


def quantized(case: Case) -> None:
    model = protocol.quantize(case.copied(), "int8", group_size=16)
    error = (case.logits(model) - case.logits()).norm() / case.logits().norm()
    assert 0 < float(error) < 0.03
    close(case.logits(protocol.dequantize(copy.deepcopy(model))), case.logits(model))


def one_device(case: Case) -> None:
    assert case.call("shard_model", ((".*", None),)) is case.model and case.call("gather_model") is case.model
    assert set(protocol.params_sharding(case.model).values()) == {None}


# What checks each name of the page.
CHECKS: dict[Callable[[Case], None], str] = {
    state: "graphdef graphother graphstate lazy_init merge_params merge_params_dict split_params split_params_dict",
    life_cycle: "base_model_prefix can_generate config config_class float from_pretrained get_module_repr "
    "get_static_arguments get_torch_loader half prettify_nnx printify_nnx push_to_hub return_type_adjuster "
    "save_pretrained to_dtype to_torch",
    flax: "pure_transform_fn transform_fn",
    train_state: "to_state",
    lora: "apply_lora_to_layers merge_lora_params split_lora_params unwrap_lora_to_layers",
    loss: "compute_loss",
    caches: "create_cache_metadata create_paged_metadata generate init_cache init_ragged_pages prepare_inputs_for_call "
    "prepare_inputs_for_generation update_inputs_for_generation",
    quantized: "quantize",
    one_device: "gather_model mesh params_sharding shard_model",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--reference", type=Path, help="the text of easydel.infra.mixins.protocol's page")
    given = parser.parse_args(arguments)
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(\w+)` \| .+ \| there.* \|$", page, re.MULTILINE))
    checked = {name for names in CHECKS.values() for name in names.split()}
    failed = sorted(rows ^ checked)
    for name in failed:
        print(f"{name}: {'no check' if name in rows else 'no row in docs/protocol.md'}")
    signatures = arguments_of.DOCUMENTED
    if given.reference is not None:
        signatures = arguments_of.parse(given.reference.read_text(encoding="utf-8"))
    documented = {f"{name}({one})" for name, some in signatures.items() for one in some.split()}
    for name in sorted(documented ^ arguments_of.CHECKS.keys()):
        failed.append(name)
        print(f"{name}: {'no check' if name in documented else 'not documented'}")
    checks = [*CHECKS, *dict.fromkeys(arguments_of.CHECKS.values())]
    for model in given.models:
        for check in checks:
            try:
                check(Case(model))
            except Exception as error:  # a report of every failure, at the process's boundary
                failed.append(check.__name__)
                print(f"{model}: {check.__name__}: {type(error).__name__}: {error}")
        print(f"{model}: {len(CHECKS)} groups of names, {len(documented)} arguments")
    llama = Case("llama").model
    for name, call in OF_JAX.items():
        try:
            call(llama)
        except (TypeError, ValueError) as reason:
            print(f"JAX's alone: {name}: {reason}")
        else:
            failed.append(name)
            print(f"{name}: it should be refused")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
