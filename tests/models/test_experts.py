"""What families with experts share: router logits, their loss, the layouts on disk, and who computes the experts."""

from __future__ import annotations

import importlib
from unittest.mock import Mock, patch

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import easytorch
from easytorch.layers import experts
from easytorch.layers.experts import Experts, apply_experts
from easytorch.layers.routers import load_balancing_loss
from easytorch.models.mixtral import MixtralExperts
from easytorch.operations.dispatch.check import relative_rms_error
from tests.models.families import CAUSAL, EXPERTS, FAMILIES, HEADS
from tests.models.test_parity import TOLERANCE, assert_same, seen

IDS = torch.tensor([[5, 9, 33, 71, 8, 12, 3, 44, 90, 17], [4, 4, 90, 12, 60, 7, 31, 6, 88, 23]])


COMPILED = ("mixtral",)  # the others differ from it in no operation that a graph would show


# transformers lets nobody replace the experts of Llama 4, whose routers also give something else
REPLACEABLE = [family for family in EXPERTS if family != "llama4_text"]


@pytest.fixture(params=EXPERTS)
def family(request):
    return request.param


def models(make_pair, family, **changes):
    row = FAMILIES[family]
    return make_pair(CAUSAL[family], row.config(**changes), row.reference)


def test_router_logits_and_their_loss(family, make_pair, batch) -> None:
    ours, theirs = models(make_pair, family)
    rows = seen(family, batch)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    if rows is not None:
        labels[:, 1:][~rows[:, :-1]] = -100
    outputs = [model(**batch, labels=labels, output_router_logits=True) for model in (ours, theirs)]
    assert type(outputs[0]) is type(outputs[1])
    padded = {key: value for key, value in outputs[1].items() if key != "router_logits" or rows is None}
    assert_same({key: outputs[0][key] for key in padded}, padded, rows)
    assert len(outputs[0].router_logits) == len(outputs[1].router_logits) > 0
    for output in outputs:
        output.loss.backward()
    expected = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(
            weight.grad, expected[name].grad, **TOLERANCE, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_the_loss_of_an_even_load_and_of_padding() -> None:
    logits = torch.zeros(2, 6, 4)
    logits[0, range(6), [0, 1, 2, 3, 0, 1]] = 3.0
    logits[1, :, 2] = 5.0
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]])  # as if two rows of three tokens past a cache
    torch.testing.assert_close(load_balancing_loss((logits[0],), 1, mask[:1]), torch.tensor(1.0))
    past = load_balancing_loss((logits[0],), 1, torch.cat([torch.ones(1, 5, dtype=torch.long), mask[:1]], 1))
    torch.testing.assert_close(past, torch.tensor(1.0))
    assert load_balancing_loss((logits[1],), 1) > 3.8


def test_files_are_those_that_transformers_writes(family, make_pair, tmp_path) -> None:
    ours, theirs = models(make_pair, family)
    for model, folder in ((ours, tmp_path / "ours"), (theirs, tmp_path / "theirs")):
        model.save_pretrained(folder)
    written = [load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs")]
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(tensor, written[1][name]) for name, tensor in written[0].items())


def test_a_file_with_stacked_experts_loads_too(family, make_pair, tmp_path) -> None:
    ours, _ = models(make_pair, family)
    ours.config.save_pretrained(tmp_path)
    save_file({name: one.clone() for name, one in ours.state_dict().items()}, tmp_path / "model.safetensors")
    loaded = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in ours.state_dict().items())


@pytest.mark.parametrize("family", REPLACEABLE)
def test_every_implementation_runs_and_computes_the_same(family, make_pair) -> None:
    ours, theirs = models(make_pair, family)
    assert ours.config._experts_implementation == "easytorch"
    names = ("eager", "grouped_mm", "batched_mm", "easytorch")
    functions = {name: Mock(wraps=ALL_EXPERTS_FUNCTIONS[name]) for name in names[1:3]}
    with torch.no_grad(), patch.dict(ALL_EXPERTS_FUNCTIONS._global_mapping, functions):
        expected = ours(IDS).logits
        for name in names:
            for model in (ours, theirs):
                model.set_experts_implementation(name)
                torch.testing.assert_close(model(IDS).logits, expected, **TOLERANCE)
                assert [one for one, function in functions.items() if function.called] == [name] * (name in functions)
                for function in functions.values():
                    function.reset_mock()
    with pytest.raises(ValueError, match="nosuch"):
        ours.set_experts_implementation("nosuch")


def test_who_takes_an_implementation_is_as_in_transformers() -> None:
    for family, name in HEADS:
        ours = getattr(importlib.import_module(f"easytorch.models.{family}"), name)
        takes = getattr(transformers, name)._can_set_experts_implementation()
        assert ours._can_set_experts_implementation() == takes, name


def test_a_function_that_was_registered_runs(make_pair, monkeypatch) -> None:
    ours, _ = models(make_pair, "mixtral")
    calls = []

    def counted(*args):
        calls.append(args[0])
        return apply_experts(*args)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "counted", counted)
    ours.set_experts_implementation("counted")
    ours(IDS)
    assert calls == [layer.mlp.experts for layer in ours.model.layers]


@pytest.mark.parametrize("family", COMPILED)
def test_one_graph(family, make_pair) -> None:
    ours, _ = models(make_pair, family)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(ours, fullgraph=True, backend="eager")
        torch.testing.assert_close(
            compiled(IDS, use_cache=False).logits, ours(IDS, use_cache=False).logits, **TOLERANCE
        )


def test_exported(make_pair) -> None:
    ours, _ = models(make_pair, COMPILED[0])
    with torch.no_grad():
        program = torch.export.export(ours, (), {"input_ids": IDS, "use_cache": False}, strict=False)
        torch.testing.assert_close(
            program.module()(input_ids=IDS, use_cache=False).logits, ours(IDS).logits, **TOLERANCE
        )


def test_gradient_checkpointing(family, make_pair) -> None:
    ours, _ = models(make_pair, family)
    gradients = []
    for checkpointing in (False, True):
        ours.zero_grad()
        if checkpointing:
            ours.gradient_checkpointing_enable()
        ours.train()(IDS, labels=IDS, use_cache=False).loss.backward()
        learned = {name: weight for name, weight in ours.named_parameters() if ".indexer." not in name}
        gradients.append({name: weight.grad.clone() for name, weight in learned.items()})
    assert all(torch.equal(gradients[0][name], gradient) for name, gradient in gradients[1].items())


def test_experts_of_another_device_add_nothing(family, make_pair) -> None:
    ours, _ = models(make_pair, family)
    experts = next(module for module in ours.modules() if isinstance(module, Experts))
    torch.manual_seed(6)
    hidden = torch.randn(9, ours.config.hidden_size, requires_grad=True)
    indices = torch.rand(9, experts.num_experts).topk(2)[1]
    weights = torch.rand(9, 2)
    every = experts(hidden, indices, weights)
    half = experts.num_experts // 2
    total = torch.zeros_like(every)
    for start, count in ((0, half), (half, experts.num_experts - half)):
        local = type(experts)(ours.config)
        for name, parameter in experts.named_parameters():
            setattr(local, name, torch.nn.Parameter(parameter[start : start + count]))
        local.num_experts, local._is_expert_parallel = count, True
        here = (indices >= start) & (indices < start + count)
        total = total + apply_experts(
            local, hidden, (indices - start).where(here, torch.tensor(count)), weights.where(here, 0.0)
        )
    torch.testing.assert_close(total, every, **TOLERANCE)
    (given,), (expected,) = (torch.autograd.grad(one.square().sum(), hidden) for one in (total, every))
    torch.testing.assert_close(given, expected, **TOLERANCE)


def test_more_experts_a_token_than_there_are(family) -> None:
    config = FAMILIES[family].config(num_experts_per_tok=99)
    with pytest.raises(ValueError, match=r"num_experts_per_tok=99 of \d+ experts"):
        easytorch.AutoModelForCausalLM.from_config(config)


def test_adapters_on_the_experts(make_pair) -> None:
    peft = pytest.importorskip("peft")
    ours, theirs = models(make_pair, "mixtral")
    outputs = []
    for model in (ours, theirs):
        torch.manual_seed(8)
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"], init_lora_weights=False
        )
        outputs.append(peft.get_peft_model(model, config)(IDS).logits)
    torch.testing.assert_close(*outputs, **TOLERANCE)


def test_experts_in_4_bits_stay_so_or_are_unpacked(tmp_path) -> None:
    config = FAMILIES["gpt_oss"].config(intermediate_size=32)
    torch.manual_seed(9)
    state = transformers.GptOssForCausalLM(config).bfloat16().state_dict()
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        state[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        state[f"{name}_scales"] = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    unpacked = transformers.Mxfp4Config(dequantize=True)
    kept = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(kept).__module__ == "easytorch.models.gpt_oss" and kept.is_quantized
    config.name_or_path = "openai/of-the-hub"
    assert "4 bits" in str(type(kept).refusal(config, {}))  # by transformers' class
    ours, theirs = (
        library.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=unpacked, dtype=torch.bfloat16)
        for library in (easytorch, transformers)
    )
    assert type(ours).__module__ == "easytorch.models.gpt_oss"
    expected = theirs.state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in ours.state_dict().items())


@pytest.mark.parametrize("family", REPLACEABLE)
def test_weights_of_experts_are_rounded_as_in_transformers(family, make_pair) -> None:
    """In bfloat16: what the routers give has the dtypes and the bits of transformers' routers."""
    found = []
    for model in models(make_pair, family):
        given: list[tuple[torch.Tensor, ...]] = []
        recorded = model._can_record_outputs["router_logits"].target_class
        for module in model.modules():
            if isinstance(module, recorded):
                module.register_forward_hook(lambda _, __, output, given=given: given.append(output))
        with torch.no_grad():
            model.bfloat16()(IDS[:, :1])
        found.append(given[0])
    assert [one.dtype for one in found[0]] == [one.dtype for one in found[1]]
    assert all(one.isfinite().all() for one in found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_few_rows_of_experts_go_one_by_one_to_the_operator_in_cpp(dtype, biased) -> None:
    """The same numbers as `grouped_matmul`'s, wherever the rows lie, and behind the last expert's zeros."""
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(6, 1024, 1024, generator=generator) / 32).to(dtype)
    bias = torch.randn(6, 1024, generator=generator).to(dtype) if biased else None
    for counts in ([0, 3, 0, 1, 2, 0], [0, 0, 0, 0, 0, 5], [1, 1, 1, 1, 1, 1]):
        rows = torch.randn(sum(counts) + 2, 1024, generator=generator).to(dtype)
        with torch.no_grad():
            few = experts._project_few(weight, rows, counts, bias)
            expected = experts.grouped_matmul(rows, weight, torch.tensor(counts), bias, transposed=True)
        if few is None:
            pytest.skip("no operator in C++ here")
        assert relative_rms_error(few, expected) < (1e-5 if dtype == torch.float32 else 8e-3)
        assert few.shape == expected.shape and not few[sum(counts) :].any()
    many = torch.randn(65, 1024, generator=generator).to(dtype)
    with torch.no_grad():
        assert experts._project_few(weight, many, [64, 1, 0, 0, 0, 0], bias) is None, "some have too many rows"
    assert experts._project_few(weight.requires_grad_(), many[:3], [1, 2, 0, 0, 0, 0], bias) is None


def test_few_tokens_of_an_odd_choice_are_those_of_the_operations(monkeypatch) -> None:
    """No expert a token, indices that are no integers, and a gate of the instance's own."""
    module = MixtralExperts(FAMILIES["mixtral"].config())
    module.reset_parameters(0.3)
    x, index, weights = torch.randn(3, module.hidden_dim), torch.tensor([[0, 2]] * 3), torch.rand(3, 2)
    with torch.no_grad():
        assert torch.equal(apply_experts(module, x, index[:, :0], weights[:, :0]), torch.zeros_like(x))
        with pytest.raises(ValueError, match="integer indices"):
            apply_experts(module, x, index.float(), weights)
        plain = apply_experts(module, x, index, weights)
        monkeypatch.setattr(module, "_apply_gate", lambda rows: 2.0 * type(module)._apply_gate(module, rows))
        torch.testing.assert_close(apply_experts(module, x, index, weights), 2.0 * plain)
