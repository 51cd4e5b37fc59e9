"""Norms, feed-forward networks, rotary positions and experts of transformers' own classes, replaced in one instance."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle

import pytest
import torch
import transformers as t
from torch import nn

import easytorch
from easytorch.auto import specialising
from easytorch.auto.recognition import candidates
from easytorch.auto.specialising import specialise_modules, try_module
from easytorch.function_globals import with_global
from easytorch.kernels.linear import products
from easytorch.layers import specialised
from easytorch.layers.specialised import Specialised
from easytorch.operations.dispatch.check import relative_rms_error

IDS = torch.tensor([[5, 9, 33, 71, 8, 20, 21], [4, 4, 90, 12, 60, 3, 3]])
# Wide enough for the operators in C++.
SIZES = {
    "vocab_size": 97, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def config() -> t.HunYuanMoEV1Config:
    """Norms of heads, rotary, a shared gated MLP and experts: every kind."""
    return t.HunYuanMoEV1Config(**SIZES, head_dim=128, num_experts=4, moe_topk=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of `config`, no weight of it 0 or 1."""
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(config())
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    path = tmp_path_factory.mktemp("hunyuan")
    model.save_pretrained(path)
    return path


def load(folder, **kwargs):
    return easytorch.AutoModelForCausalLM.from_pretrained(folder, **kwargs)


def stock(folder, **kwargs):
    return t.AutoModelForCausalLM.from_pretrained(folder, **kwargs)


def specialised_in(model) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Specialised)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_transformers(folder, dtype) -> None:
    ours, theirs = load(folder, dtype=dtype), stock(folder, dtype=dtype)
    with torch.no_grad():
        given, expected = ours(IDS).logits, theirs(IDS).logits
    assert relative_rms_error(given, expected) < (1e-5 if dtype == torch.float32 else 1e-2)
    if dtype == torch.float32:
        for model in (ours, theirs):
            model.train()(IDS, labels=IDS).loss.backward()
        for (name, weight), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(weight.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
        settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        assert torch.equal(ours.eval().generate(IDS, **settings), theirs.eval().generate(IDS, **settings))


def test_every_kind_is_replaced_and_runs(folder, monkeypatch) -> None:
    model = load(folder)
    kinds = {row.kind: row for row in model.easytorch_report.modules}
    assert set(kinds) == {"norm", "gated MLP", "rotary", "experts"}
    assert all(row.reason is None and row.operations for row in kinds.values()), model.easytorch_report
    assert kinds["norm"].count == 9 and kinds["experts"].count == 2
    assert model.easytorch_report() is model.easytorch_report and "9 x HunYuanMoEV1RMSNorm" in str(
        model.easytorch_report()
    )
    ran = []
    for place, name in ((specialised.rms_norm, "try_cpp"), (specialised.rotary, "try_cpp")):
        method = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, of=place, f=method: ran.append(of.primary_name()) or f(*a))
    with torch.no_grad():
        model(IDS)
    assert ran.count("rms_norm") == 9 and ran.count("rotary") == 2


def projections_by_linear(model, monkeypatch) -> list[str]:
    """The names of the projections of attention that one forward computes by `linear`."""
    names, found = {id(module): name for name, module in model.named_modules()}, []
    linear = specialised.linear

    def noted(layer, x):
        found.append(names.get(id(layer), ""))
        return linear(layer, x)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(specialised, "linear", noted)
        model(IDS)
    return sorted(name.rpartition(".")[2] for name in found if "attn" in name or "attention" in name)


def test_projections_of_attention_are_computed_by_linear(folder, monkeypatch) -> None:
    model, theirs = load(folder), stock(folder)
    four = sorted(["q_proj", "k_proj", "v_proj", "o_proj"] * 2)
    assert projections_by_linear(model, monkeypatch) == four
    assert projections_by_linear(copy.deepcopy(model), monkeypatch) == four
    row = next(row for row in model.easytorch_report.modules if row.kind == "rotary")
    assert row.operations == "rotary, linear (k_proj, o_proj, q_proj, v_proj)"
    assert list(model.state_dict()) == list(theirs.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in theirs.named_modules()]
    attention = model.model.layers[0].self_attn
    assert type(attention.q_proj) is nn.Linear and not set(vars(attention)) - set(
        vars(theirs.model.layers[0].self_attn)
    )
    # hooks, other modules and what stands there later are called
    seen = []
    handle = attention.q_proj.register_forward_hook(lambda module, args, output: seen.append(output))
    expected = model(IDS).logits
    assert len(seen) == 1
    handle.remove()
    attention.k_proj = nn.Sequential(attention.k_proj)
    torch.testing.assert_close(model(IDS).logits, expected)
    assert projections_by_linear(model, monkeypatch).count("k_proj") == 1
    attention.k_proj = attention.k_proj[0]
    quantized = torch.ao.quantization.quantize_dynamic(attention, {nn.Linear}, dtype=torch.qint8)
    assert isinstance(quantized, Specialised) and type(quantized.v_proj) is not nn.Linear
    model.model.layers[0].self_attn = quantized
    assert relative_rms_error(model(IDS).logits, expected) < 0.2
    assert projections_by_linear(model, monkeypatch) == ["k_proj", "o_proj", "q_proj", "v_proj"]  # the other layer's


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_projections_in_half_precision_are_widened(dtype, monkeypatch) -> None:
    """Where a CPU has no instructions for products in the dtype, in inference; otherwise ATen's, as before."""
    asked = []
    linear = products.linear
    monkeypatch.setattr(products, "WIDENED", frozenset({dtype}))
    monkeypatch.setattr(products, "linear", lambda x, *rest: asked.append(x.shape) or linear(x, *rest))
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(t.MistralConfig(**SIZES, head_dim=128)).eval().to(dtype)
    ids = torch.randint(3, 90, (3, 40))
    with torch.no_grad():
        wide = copy.deepcopy(model).double()(ids).logits
        before = model(ids).logits
        specialise_modules(model)
        given = model(ids).logits
    assert sum(shape[-1] in (128, 512) for shape in asked) >= 8
    assert relative_rms_error(given, wide) < 1.25 * relative_rms_error(before, wide)


def test_attention_without_rotation_and_what_its_forward_reads(monkeypatch) -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "max_position_embeddings": 64}
    del sizes["num_key_value_heads"]
    for made in (t.BertConfig(**sizes), t.OPTConfig(**sizes, ffn_dim=256, word_embed_proj_dim=128)):
        model = t.AutoModel.from_config(made).eval()
        expected = model(IDS)[0]
        rows = [row for row in specialise_modules(model) if row.kind == "projections"]
        assert rows and all(row.operations.startswith("linear (") and row.reason is None for row in rows)
        torch.testing.assert_close(model(IDS)[0], expected)
        assert len(projections_by_linear(model, monkeypatch)) == (6 if made.model_type == "bert" else 8)

    class ReadingAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three, self.four = (nn.Linear(8, 8) for _ in range(4))
            self.other = nn.ModuleDict({"two": nn.Linear(8, 8)})
            self.scale = 0.5

        def forward(self, x):
            one = self.one(x)
            x = one @ self.four.weight
            x = sum(part * self.scale for part in x.chunk(2))
            return self.four(self.three(input=x)) + self.other.two(self.two(x))

    class OtherAttention(ReadingAttention):
        def forward(self, x, given=None):
            return self.four((self if given is None else given).two(x)) + (given or self).three(x)

    class MovingAttention(ReadingAttention):
        def forward(self, x):
            self = self.other
            return self.two(x)

    assert [option.projections for option in candidates(OtherAttention())] == [("four",)]
    assert candidates(MovingAttention()) == []

    module = ReadingAttention()
    x = torch.randn(2, 8)
    options = candidates(module)
    assert [option.projections for option in options] == [("one", "three")]
    expected = module(x)
    specialised.specialise(module, try_module(module, options).how)
    torch.testing.assert_close(module(x), expected)


def test_projections_that_have_adapters_are_those_of_one_model(monkeypatch) -> None:
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(specialising, "_VERDICTS", {})
    model = t.AutoModelForCausalLM.from_config(t.MistralConfig(**SIZES, head_dim=128)).eval()
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["q_proj", "k_proj"]))
    for one, names in ((adapted, "o_proj, v_proj"), (model, "k_proj, o_proj, q_proj, v_proj")):
        row = next(row for row in specialise_modules(one) if row.kind == "rotary")
        assert row.operations == f"rotary, linear ({names})"
    attention = model.model.layers[0].self_attn
    for wrong in (None, 3):
        with pytest.raises(TypeError, match="must be Tensor"):
            attention._easytorch_q_proj(wrong)


def test_a_decorator_with_an_empty_cell_is_looked_through() -> None:
    def around(forward):
        def called(*args):
            return (forward if len(args) > 1 else unset)(*args)

        called.__wrapped__ = forward
        return called
        unset = None

    class EmptyAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)

        @around
        def forward(self, x):
            return self.one(x)

    module, x = EmptyAttention(), torch.randn(2, 8)
    expected = module(x)
    specialised.specialise(module, try_module(module, candidates(module)).how)
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("name", ["MistralAttention", "MistralRMSNorm", "MistralMLP"])
def test_a_forward_that_is_replaced_later_is_called(name, monkeypatch) -> None:
    mistral = t.models.mistral.modeling_mistral
    model = t.AutoModelForCausalLM.from_config(t.MistralConfig(**SIZES, head_dim=128)).eval()
    ours = copy.deepcopy(model)
    specialise_modules(ours)
    with monkeypatch.context() as patched:
        stock_class = getattr(mistral, name)
        kept = stock_class.forward

        def forward(self, *args, **kwargs):
            output = kept(self, *args, **kwargs)
            return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output

        # with the code that the forward before had below a decorator: the same options
        patched.setattr(stock_class, "forward", functools.wraps(kept)(forward))
        expected, later = model(IDS).logits, copy.deepcopy(model)
        specialise_modules(later)
        for one in (ours, later):
            torch.testing.assert_close(one(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(IDS).logits, expected, rtol=1e-3)
    for one in (ours, later):
        torch.testing.assert_close(one(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)


def test_a_rotation_that_differs_leaves_the_projections() -> None:
    mistral = t.models.mistral.modeling_mistral

    def apply_rotary_pos_emb(q, k, cos, sin):
        return mistral.apply_rotary_pos_emb(q, k, cos, -sin)

    class BackAttention(mistral.MistralAttention):
        forward = with_global(mistral.MistralAttention.forward, "apply_rotary_pos_emb", apply_rotary_pos_emb)

    model = t.AutoModelForCausalLM.from_config(t.MistralConfig(**SIZES, head_dim=128))
    for layer in model.model.layers:
        layer.self_attn.__class__ = BackAttention
    expected = model(IDS).logits
    row = next(row for row in specialise_modules(model) if row.name == "BackAttention")
    assert row.kind == "projections" and row.operations == "linear (k_proj, o_proj, q_proj, v_proj)"
    assert "the rotation not replaced: values in float32" in str(row)
    torch.testing.assert_close(model(IDS).logits, expected)


def test_only_the_instance_changes(folder) -> None:
    classes = {type(module) for module in stock(folder).modules()}
    before = {one: dict(vars(one)) for one in classes}
    model = load(folder)
    assert specialised_in(model) and {one: dict(vars(one)) for one in classes} == before
    assert {type(module) for module in stock(folder).modules()} == classes
    assert specialised_in(load(folder, specialise=False)) == []
    assert {module.__class__.__name__ for module in model.modules()} == {one.__name__ for one in classes}
    theirs = type(stock(folder).model.norm)
    assert isinstance(model.model.norm, theirs) and type(model.model.norm).__module__ == theirs.__module__


def test_copies_pickles_and_files(folder, tmp_path) -> None:
    model = load(folder).eval()
    expected = model(IDS).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert specialised_in(twin) == specialised_in(model)
        torch.testing.assert_close(twin(IDS).logits, expected)
        twin.model.norm.weight.data.zero_()
        assert not twin(IDS).logits.any() and model(IDS).logits.any()
    model.save_pretrained(tmp_path)
    assert "easytorch" not in (tmp_path / "config.json").read_text()
    again = stock(tmp_path)
    assert {n: w.shape for n, w in again.state_dict().items()} == {n: w.shape for n, w in model.state_dict().items()}
    plain = model.to_torch()
    for one in (again, plain):
        assert specialised_in(one) == [] and one.config._experts_implementation != "easytorch"
        torch.testing.assert_close(one.eval()(IDS).logits, expected, rtol=1e-4, atol=1e-5)


def test_compile_export_and_checkpointing(folder) -> None:
    model = load(folder).eval()
    expected = model(IDS).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    program = torch.export.export(model, (), {"input_ids": IDS, "use_cache": False}, strict=False)
    torch.testing.assert_close(program.module()(input_ids=IDS, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    model.train().gradient_checkpointing_enable()
    model(IDS, labels=IDS).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_hooks_and_adapters_are_seen(folder) -> None:
    peft = pytest.importorskip("peft")
    model = load(folder).eval()
    seen = []
    for name in ("model.norm", "model.layers.0.mlp.shared_mlp", "model.layers.0.mlp.shared_mlp.up_proj"):
        model.get_submodule(name).register_forward_hook(lambda module, args, output, name=name: seen.append(name))
    before = model(IDS).logits
    assert len(seen) == 3
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=r".*(shared_mlp\.down_proj|q_proj)", init_lora_weights=False)
    )
    assert not torch.allclose(adapted(IDS).logits, before)
    adapted.merge_and_unload()
    assert specialised_in(model)


def test_hooks_of_accelerate_call_ours() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = t.AutoModelForCausalLM.from_config(config()).eval()
    hooks.add_hook_to_module(model.model.norm, hooks.ModelHook())
    specialise_modules(model)
    assert isinstance(model.model.norm._old_forward.__self__, Specialised)
    assert model.model.norm._old_forward.__func__ is specialised.SpecialisedNorm.forward


def test_experts_that_were_named_are_kept(folder) -> None:
    model = load(folder, experts_implementation="eager")
    assert model.config._experts_implementation == "eager"
    row = next(row for row in model.easytorch_report.modules if row.kind == "experts")
    assert row.reason == "experts_implementation='eager' was asked for"
    with pytest.raises(TypeError, match="specialise must be True or False, got 'no'"):
        load(folder, specialise="no")


class Row(nn.Module):
    """LLaMA's norm, changed in one way by each class below."""

    def __init__(self, width: int = 128, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        rows = x.float()
        return self.weight * (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class PlainNorm(Row):
    pass


class OtherEpsNorm(Row):  # the eps that is read is no attribute
    def forward(self, x):
        rows = x.float()
        return self.weight * (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class ClampedNorm(Row):
    def forward(self, x):
        return super().forward(x.clamp(max=2.0))


class DetachedNorm(Row):  # the same numbers, and other gradients
    def forward(self, x):
        rows = x.float()
        scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.eps).detach()
        return self.weight * (rows * scale).to(x.dtype)


class WideNorm(Row):  # float32 out, whatever comes in
    def forward(self, x):
        return super().forward(x.float()).float()


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
        self.c, self.act = nn.Linear(96, 64), nn.SiLU()

    def forward(self, x):
        return self.c(self.act(self.b(x)) * self.a(x))


class LimitedFeed(Feed):
    def forward(self, x):
        return self.c(self.act(self.b(x)).clamp(max=0.5) * self.a(x))


class FirstTokenFeed(Feed):
    def forward(self, x):
        return super().forward(x[:, :1])


@pytest.mark.parametrize("made, reason", [
    (PlainNorm, None), (OtherEpsNorm, "another eps"), (ClampedNorm, "values in float32"),
    (DetachedNorm, "gradients in float32"), (WideNorm, "are bfloat16, not float32"),
    (Feed, None), (LimitedFeed, "float32"), (FirstTokenFeed, "shapes"),
])  # fmt: skip
def test_a_class_is_proved_before_it_is_replaced(made, reason, monkeypatch) -> None:
    monkeypatch.setattr(specialising, "_VERDICTS", {})
    module = made()
    options = candidates(module)
    verdict = try_module(module, options)
    assert options
    if reason is None:
        assert verdict.reason is None and verdict.how is not None
        if made is Feed:
            assert (verdict.how.gate, verdict.how.up, verdict.how.down) == ("b", "a", "c")
    else:
        assert verdict.how is None
        assert reason in verdict.reason
    assert try_module(made(), options) is verdict, "a class is tried once"


def test_roundings_and_zero_centred_weights_are_told_apart() -> None:
    formulas = {}
    for kind in (t.models.qwen2.modeling_qwen2.Qwen2RMSNorm, t.models.gemma.modeling_gemma.GemmaRMSNorm,
                 t.models.olmo2.modeling_olmo2.Olmo2RMSNorm):  # fmt: skip
        module = kind(64)
        formulas[kind.__name__] = try_module(module, candidates(module)).how.formula
    assert formulas == {
        "Qwen2RMSNorm": "rms_norm", "GemmaRMSNorm": "rms_norm, zero-centred", "Olmo2RMSNorm": "rms_norm, rounded last",
    }  # fmt: skip


def test_dropout_stays_in_training() -> None:
    class Dropped(Feed):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.c(self.drop(self.act(self.b(x)) * self.a(x)))

    module = Dropped().eval()
    verdict = try_module(module, candidates(module))
    assert verdict.how is not None and verdict.how.dropouts == ("drop",)
    twin = copy.deepcopy(module)
    specialised.specialise(twin, verdict.how)
    x = torch.randn(2, 3, 64)
    torch.testing.assert_close(twin(x), module(x))
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = module.train()(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(twin.train()(x), expected)


def test_turning_the_other_way_is_seen(monkeypatch) -> None:
    monkeypatch.setattr(specialising, "_TURNED", {})

    def turns_back(q, k, cos, sin):
        return t.models.mistral.modeling_mistral.apply_rotary_pos_emb(q, k, cos, -sin)

    assert specialising._rotary_disagreement(turns_back, partial=False) is not None
    right = t.models.mistral.modeling_mistral.apply_rotary_pos_emb
    assert specialising._rotary_disagreement(right, partial=False) is None
    assert specialising._rotary_disagreement(right, partial=True) is not None  # it turns whole heads alone


def test_a_decorated_attention_keeps_its_decorator() -> None:
    """As that of arguments under their older names."""
    mistral = t.models.mistral.modeling_mistral

    def renaming(function):
        @functools.wraps(function)
        def call(module, *args, **kwargs):
            if "x" in kwargs:
                kwargs["hidden_states"] = kwargs.pop("x")
            return function(module, *args, **kwargs)

        return call

    class Turning(mistral.MistralAttention):
        forward = renaming(inspect.unwrap(mistral.MistralAttention.forward))

    torch.manual_seed(0)
    config = t.MistralConfig(**SIZES, head_dim=128, attn_implementation="eager")
    module, x = Turning(config, 0).eval(), torch.randn(2, 5, config.hidden_size)
    verdict = try_module(module, candidates(module))
    assert isinstance(verdict.how, specialised.StockAttention)
    turned, angles = copy.deepcopy(module), torch.randn(1, 5, 64).repeat(1, 1, 2)
    specialised.specialise(turned, verdict.how)
    positions = (angles.cos(), angles.sin())
    with torch.no_grad():
        expected = module(x, position_embeddings=positions, attention_mask=None)[0]
        given = turned(x=x, position_embeddings=positions, attention_mask=None)[0]
    torch.testing.assert_close(given, expected)
    assert verdict.how.projections == ("k_proj", "o_proj", "q_proj", "v_proj")


def test_a_decorator_that_holds_no_function_is_left_alone() -> None:
    mistral = t.models.mistral.modeling_mistral

    class Turning(mistral.MistralAttention):
        @functools.wraps(mistral.MistralAttention.forward)
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    assert candidates(Turning(t.MistralConfig(**SIZES), 0)) == []
