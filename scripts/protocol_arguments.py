"""Every documented argument of every name of the module protocol, compared with torch written by hand.

`scripts/check_protocol.py` runs these on its `Case`s. `parse` reads `DOCUMENTED` off the text of EasyDeL's page.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from easytorch import protocol
from easytorch.cache import RaggedPagesCache
from easytorch.cache_names import CACHE

_LOSS = (
    "input_ids labels inputs_embeds attention_mask mask_info position_ids segment_ids past_key_values cache_metadata "
)
DOCUMENTED: dict[str, str] = {
    "apply_lora_to_layers": "lora_rank lora_pattern verbose rngs",
    "compute_loss": f"{_LOSS}output_attentions output_hidden_states output_router_logits loss_config loss_kwargs",
    "create_cache_metadata": "batch_size max_length pad_token_id",
    "create_paged_metadata": "hbm_utilization page_size max_model_length",
    "float": "change_runtime_dtype",
    "from_pretrained": "pretrained_model_name_or_path",
    "gather_model": "partition_rules mesh",
    "generate": "input_ids generation_config prng_key trace logits_processor",
    "get_module_repr": "module",
    "half": "change_runtime_dtype",
    "init_cache": "batch_size max_length starts shardings pad_token_id",
    "init_ragged_pages": "metadata page_size hbm_utilization max_model_length",
    "merge_lora_params": "pytree",
    "merge_params": "tree",
    "merge_params_dict": "params_dict",
    "prepare_inputs_for_generation": "input_ids max_length pad_token_id starts shardings attention_mask token_type_ids "
    "mask_info",
    "prettify_nnx": "module indent depth max_depth module_param",
    "printify_nnx": "model",
    "push_to_hub": "repo_id use_temp_dir commit_message private token create_pr gather_fns float_dtype verbose "
    "mismatch_allowed revision commit_description",
    "quantize": "quantization_config quantize_tensors verbose",
    "return_type_adjuster": "original_return_type",
    "save_pretrained": "save_directory push_to_hub token gather_fns float_dtype step",
    "shard_model": "partition_rules mesh",
    "split_params_dict": "params_dict",
    "to_dtype": "dtype",
    "unwrap_lora_to_layers": "verbose",
    "update_inputs_for_generation": "model_outputs model_kwargs",
}


def parse(text: str) -> dict[str, str]:
    """Name -> arguments of each signature in the text of the documentation."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        signature = re.match(
            r"(?:easydel\.infra\.mixins\.protocol\.|abstract |classmethod )*(\w+)\((.*)\)( |\[|#)", line
        )
        if signature is None:
            continue
        depth, part, parts = 0, "", []
        for letter in signature[2] + ",":
            depth += (letter in "([{") - (letter in ")]}")
            if letter == "," and depth == 0:
                parts.append(part.strip())
                part = ""
            elif depth >= 0:
                part += letter
        names = found.setdefault(signature[1], [])
        for one in parts:
            name = re.split(r"[:=]", one)[0].strip()
            if re.fullmatch(r"[a-z_]+", name) and name not in names:
                names.append(name)
    return {name: " ".join(names) for name, names in found.items() if names}


IDS = torch.tensor([[5, 9, 33, 71, 8, 2], [4, 40, 90, 12, 60, 3]])
Check = Callable[[Any], None]
CHECKS: dict[str, Check] = {}


def of(name: str, arguments: str) -> Callable[[Check], Check]:
    """The decorator of a check of these arguments of `name`."""

    def register(check: Check) -> Check:
        for argument in arguments.split():
            assert f"{name}({argument})" not in CHECKS
            CHECKS[f"{name}({argument})"] = check
        return check

    return register


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def refused(call: Callable[[], Any], words: str = "") -> None:
    try:
        call()
    except (TypeError, ValueError) as reason:
        assert words in str(reason) and len(str(reason)) > 20, f"the reason is {reason}"
    else:
        raise AssertionError("it should be refused")


def inputs_of(case: Any, ids: torch.Tensor = IDS) -> dict[str, Any]:
    if case.name == "vit":
        return dict(case.inputs)
    if case.name == "t5":
        return {"input_ids": ids, "decoder_input_ids": case.model.prepare_decoder_input_ids_from_labels(labels=ids)}
    return {"input_ids": ids}


def cross_entropy(case: Any, logits: torch.Tensor, labels: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Of causal models of the next token, term by term."""
    if case.causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    logarithms = logits.flatten(0, -2) - logits.flatten(0, -2).exp().sum(-1, keepdim=True).log()
    labels, smooth = labels.flatten(), settings.get("label_smoothing", 0.0)
    counted = labels != -100
    hit = logarithms.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return -((1 - smooth) * hit + smooth * logarithms.mean(-1))[counted].sum() / counted.sum()


def logits_of(case: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return case.model(**inputs).logits


def loss_of(case: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return case.call("compute_loss", **inputs)[1].loss


@of("compute_loss", "input_ids labels loss_config loss_kwargs")
def loss_settings(case: Any) -> None:
    labels = case.labels if case.name == "vit" else IDS.masked_fill(IDS == 9, -100)
    inputs = inputs_of(case)
    logits = logits_of(case, **inputs)
    close(loss_of(case, **inputs, labels=labels), cross_entropy(case, logits, labels))
    expected = cross_entropy(case, logits, labels, label_smoothing=0.2)
    close(loss_of(case, **inputs, labels=labels, loss_config=protocol.LossConfig(label_smoothing=0.2)), expected)
    close(loss_of(case, **inputs, labels=labels, loss_kwargs={"label_smoothing": 0.2}), expected)
    if case.causal:
        close(loss_of(case, **inputs), cross_entropy(case, logits, IDS))
    else:
        refused(lambda: loss_of(case, **inputs), "needs labels")


@of("compute_loss", "inputs_embeds")
def loss_of_embeddings(case: Any) -> None:
    if case.name == "vit":
        given = inputs_of(case) | {"labels": case.labels}  # images have no embeddings: ignored, with a warning
        assert torch.equal(loss_of(case, **given, inputs_embeds=torch.ones(2, 5, 32)), loss_of(case, **given))
        return
    inputs = inputs_of(case)
    expected = cross_entropy(case, logits_of(case, **inputs), IDS)
    embedded = case.model.get_input_embeddings().weight[inputs.pop("input_ids")]
    close(loss_of(case, **inputs, inputs_embeds=embedded, labels=IDS), expected)


@of("compute_loss", "attention_mask mask_info")
def loss_without_padding(case: Any) -> None:
    if case.name == "vit":
        return  # images have no padding
    short = IDS[:, :4]
    right = cross_entropy(case, logits_of(case, **inputs_of(case, short)), short)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]] * 2)
    inputs, labels = inputs_of(case), IDS.masked_fill(mask == 0, -100)
    close(loss_of(case, **inputs, labels=labels, attention_mask=mask), right)
    info = protocol.MaskInfo.from_attention_mask(mask)
    close(loss_of(case, **inputs, labels=labels, mask_info=info), right)
    refused(lambda: loss_of(case, **inputs, labels=labels, attention_mask=mask, mask_info=info), "given twice")


@of("compute_loss", "position_ids")
def loss_at_positions(case: Any) -> None:
    places = torch.tensor([[0, 1, 2, 5, 6, 7]] * 2)
    if case.name == "vit":  # ignored, with a warning
        given = inputs_of(case) | {"labels": case.labels}
        assert torch.equal(loss_of(case, **given, position_ids=places), loss_of(case, **given))
        return
    if case.name in ("t5", "mpt"):  # positions are relative
        refused(lambda: loss_of(case, **inputs_of(case), labels=case.labels, position_ids=places))
        return
    logits = logits_of(case, input_ids=IDS, position_ids=places)
    assert not torch.allclose(logits, logits_of(case, input_ids=IDS), atol=1e-5)
    close(loss_of(case, input_ids=IDS, labels=IDS, position_ids=places), cross_entropy(case, logits, IDS))


@of("compute_loss", "segment_ids")
def loss_of_packed_rows(case: Any) -> None:
    segments = torch.tensor([[0, 0, 0, 1, 1, 1]])
    row = IDS[:1]
    given = {"segment_ids": segments, "labels": case.labels if case.name == "vit" else row}
    if case.name in ("vit", "t5", "mpt"):
        refused(lambda: loss_of(case, **inputs_of(case, row), **given))
        return
    parts = [cross_entropy(case, logits_of(case, input_ids=one), one) for one in (row[:, :3], row[:, 3:])]
    close(loss_of(case, input_ids=row, **given), (parts[0] + parts[1]) / 2)
    info = protocol.MaskInfo.from_segments(segments)
    close(loss_of(case, input_ids=row, labels=row, mask_info=info), (parts[0] + parts[1]) / 2)


@of("compute_loss", "past_key_values cache_metadata")
def loss_behind_a_prefix(case: Any) -> None:
    if not case.causal:
        refused(lambda: case.call("compute_loss", **inputs_of(case), labels=case.labels, cache_metadata=object()))
        return
    metadata = case.call("create_cache_metadata", 2, 8)
    cache = case.call("init_cache", 2, 8, kind="dynamic")
    logits = logits_of(case, input_ids=IDS)[:, 3:]
    with torch.no_grad():
        case.model(IDS[:, :3], past_key_values=cache, use_cache=True)
    loss = loss_of(case, input_ids=IDS[:, 3:], labels=IDS[:, 3:], past_key_values=cache, cache_metadata=metadata)
    close(loss, cross_entropy(case, logits, IDS[:, 3:]))
    wrong = case.call("create_cache_metadata", 3, 8)
    refused(lambda: loss_of(case, input_ids=IDS, past_key_values=cache, cache_metadata=wrong))


@of("compute_loss", "output_attentions output_hidden_states output_router_logits")
def what_a_loss_returns(case: Any) -> None:
    labels = case.labels if case.name == "vit" else IDS
    output, _ = case.call("compute_loss", **inputs_of(case), labels=labels, output_hidden_states=True)
    states = output.encoder_hidden_states if case.name == "t5" else output.hidden_states
    layers = getattr(case.model.config, "num_hidden_layers", 2)
    assert len(states) == layers + 1 and states[0].shape[-1] == 32
    case.model.set_attn_implementation("eager")
    output, _ = case.call("compute_loss", **inputs_of(case), labels=labels, output_attentions=True)
    for one in output.encoder_attentions if case.name == "t5" else output.attentions:
        close(one.sum(-1), torch.ones_like(one[..., 0]))
    if case.name == "qwen3_moe":
        output, metrics = case.call("compute_loss", input_ids=IDS, labels=IDS, output_router_logits=True)
        shares = torch.cat(output.router_logits).softmax(-1)
        chosen = torch.zeros_like(shares).scatter(-1, shares.topk(2, -1).indices, 1.0)
        balance = 4 * (chosen.mean(0) * shares.mean(0)).sum()
        close(metrics.aux_loss, balance.detach())
        expected = cross_entropy(case, output.logits, IDS) + case.model.config.router_aux_loss_coef * balance
        close(metrics.loss, expected)


@of("apply_lora_to_layers", "lora_rank lora_pattern verbose rngs")
def adapters(case: Any) -> None:
    pattern = {"llama": "q_proj", "qwen3_moe": "v_proj", "bert": "query", "t5": r"SelfAttention\.q$"}.get(
        case.name, "q_proj|query|Wqkv"
    )
    models = [protocol.apply_lora_to_layers(case.copied(), 3, pattern, True, seed) for seed in (7, 7, 8)]
    first, same, other = (protocol.split_lora_params(one) for one in models)
    wanted = {name for name, one in case.model.named_modules() if re.search(pattern, name) and hasattr(one, "weight")}
    assert {name.split(".lora_")[0] for name in first} == wanted
    assert all(one.shape[0] == 3 for name, one in first.items() if "lora_A" in name)
    assert all(torch.equal(one, same[name]) for name, one in first.items())
    assert not all(torch.equal(one, other[name]) for name, one in first.items())
    refused(lambda: protocol.apply_lora_to_layers(case.copied(), 33, pattern), "lora_rank=33")
    refused(lambda: protocol.apply_lora_to_layers(case.copied(), 2, "nothing"), "nothing")
    try:
        import jax
        from flax import nnx
    except ImportError:
        return
    for key in (jax.random.key(0), nnx.Rngs(0)):
        refused(lambda key=key: protocol.apply_lora_to_layers(case.copied(), 2, pattern, rngs=key), "seed")


@of("merge_lora_params", "pytree")
@of("unwrap_lora_to_layers", "verbose")
def adapters_of_a_tree(case: Any) -> None:
    model = protocol.apply_lora_to_layers(case.copied(), 2, rngs=0)
    values = {name: torch.full_like(one, 0.05) for name, one in protocol.split_lora_params(model).items()}
    protocol.merge_lora_params(model, protocol.unflatten(values))
    before = {name: one.clone() for name, one in case.model.named_parameters()}
    assert protocol.unwrap_lora_to_layers(model, verbose=True) is model
    layers = {name.split(".lora_")[0] for name in values}
    for name, one in model.named_parameters():
        added = 2 * 0.05**2 if name.removesuffix(".weight") in layers and name.endswith(".weight") else 0.0
        close(one, before[name] + added)


@of("create_cache_metadata", "batch_size max_length pad_token_id")
@of("init_cache", "batch_size max_length starts shardings pad_token_id")
def dense_caches(case: Any) -> None:
    if not case.generates:
        refused(lambda: case.call("create_cache_metadata", 2, 8))
        return
    metadata = case.call("create_cache_metadata", batch_size=2, max_length=8, pad_token_id=3)
    assert (metadata.batch_size, metadata.max_length, metadata.pad_token_id) == (2, 8, 3)
    for kind in ("static", "dynamic"):
        made = case.call("init_cache", 2, 8, torch.tensor([0, 2]), None, 3, kind=kind)
        cache = getattr(made, "self_attention_cache", made)
        assert cache.starts.tolist() == [0, 2] and (cache.rows, cache.longest) == (2, 8)
        assert cache.metadata.pad_token_id == 3
        for rows, length in ((3, 1), (2, 9)):
            refused(
                lambda rows=rows, length=length, cache=cache: cache.update(*[torch.ones(rows, 4, length, 8)] * 2, 0),
                "cache is",
            )
    refused(lambda: case.call("init_cache", 2, 8, torch.tensor([0, 9])), "starts")
    refused(lambda: case.call("init_cache", 2, 8, shardings={"a": None}), "shardings")


@of("create_paged_metadata", "hbm_utilization page_size max_model_length")
@of("init_ragged_pages", "metadata page_size hbm_utilization max_model_length")
def pages(case: Any) -> None:
    if not case.generates or case.name == "t5":
        refused(lambda: case.call("create_paged_metadata", 0.5, 4, 16))
        return
    metadata = case.call("create_paged_metadata", hbm_utilization=0.9, page_size=4, max_model_length=16)
    heads = getattr(case.model.config, "num_key_value_heads", None) or 4
    a_page = 2 * 4 * heads * (8 + 8) * 4  # layers, tokens, heads, keys and values, bytes of a float32
    assert metadata.page_bytes == a_page
    assert (metadata.page_size, metadata.max_model_length) == (4, 16) and metadata.num_pages > 0
    small = dataclasses.replace(metadata, num_pages=6)
    cache = case.call("init_ragged_pages", small)
    assert isinstance(cache, RaggedPagesCache) and cache.free_pages == 6
    refused(lambda: case.call("init_ragged_pages", small, page_size=4), "give metadata")
    refused(lambda: case.call("init_ragged_pages", page_size=4), "give metadata")
    for wrong in ({"hbm_utilization": 1.5}, {"page_size": 0}, {"max_model_length": 0}):
        given = {"hbm_utilization": 0.9, "page_size": 4, "max_model_length": 16} | wrong
        refused(lambda given=given: case.call("create_paged_metadata", **given), next(iter(wrong)))
        refused(lambda given=given: case.call("init_ragged_pages", **given), next(iter(wrong)))


@of("float", "change_runtime_dtype")
@of("half", "change_runtime_dtype")
@of("to_dtype", "dtype")
def dtypes(case: Any) -> None:
    for function, dtype in ((protocol.half, torch.float16), (protocol.float32, torch.float32)):
        changed, kept = function(case.copied()), function(case.copied().bfloat16(), change_runtime_dtype=False)
        assert {one.dtype for one in (*changed.parameters(), *kept.parameters())} == {dtype}
        assert changed.config.dtype == dtype
    for dtype in (torch.bfloat16, "bfloat16"):
        model = protocol.to_dtype(case.copied(), dtype)
        assert {one.dtype for one in model.parameters()} == {torch.bfloat16} and model.dtype == torch.bfloat16
    refused(lambda: protocol.to_dtype(case.copied(), "int3"), "int3")


@of("gather_model", "partition_rules mesh")
@of("shard_model", "partition_rules mesh")
def sharding(case: Any) -> None:
    rules = ((".*", None),)
    assert case.call("shard_model", rules, None) is case.model and case.call("gather_model", rules, None) is case.model
    for name in ("shard_model", "gather_model"):
        refused(lambda name=name: case.call(name, (("nothing at all", None),)), "nothing at all")
        refused(lambda name=name: case.call(name, None, object()), "DeviceMesh")
        try:
            import jax
        except ImportError:
            continue
        mesh = jax.sharding.Mesh(jax.devices("cpu")[:1], ("tp",))
        refused(lambda name=name, mesh=mesh: case.call(name, None, mesh), "JAX")


@of("generate", "input_ids generation_config prng_key trace logits_processor")
def generation(case: Any) -> None:
    if not case.generates:
        refused(lambda: protocol.generate(case.model, IDS), "generates nothing")
        return
    model, settings = case.model, {"pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 3}
    config = transformers.GenerationConfig(do_sample=False, **settings)
    config.decoder_start_token_id = 0 if case.name == "t5" else None
    found = protocol.generate(model, IDS, config)
    tokens = torch.zeros(2, 1, dtype=torch.long) if case.name == "t5" else IDS
    for _ in range(3):
        given = {"input_ids": IDS, "decoder_input_ids": tokens} if case.name == "t5" else {"input_ids": tokens}
        tokens = torch.cat([tokens, logits_of(case, **given)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, tokens)

    class Forbid(transformers.LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return scores.index_fill(-1, found[:, -1].unique(), -torch.inf)

    processors = transformers.LogitsProcessorList([Forbid()])
    forbidden = protocol.generate(model, IDS, config, logits_processor=processors)
    assert not set(forbidden[:, -3:].flatten().tolist()) & set(found[:, -1].tolist())
    state = torch.get_rng_state()
    sampled = [protocol.generate(model, IDS, prng_key=key, do_sample=True, **settings) for key in (3, 3, 4)]
    assert torch.equal(sampled[0], sampled[1]) and not torch.equal(sampled[0], sampled[2])
    assert torch.equal(state, torch.get_rng_state()), "a key of a call is that call's"
    refused(lambda: protocol.generate(model, IDS, trace=False), "JAX")
    refused(lambda: protocol.generate(model, IDS, prng_key=object()), "JAX")


@of("prepare_inputs_for_generation", DOCUMENTED["prepare_inputs_for_generation"])
@of("update_inputs_for_generation", "model_outputs model_kwargs")
def steps(case: Any) -> None:
    if not case.generates or case.name == "t5":
        return  # refused by init_cache, and T5's prompt is its encoder's
    prepare = protocol.prepare_inputs_for_generation
    kind = "dynamic" if case.name == "mpt" else "static"
    padded = torch.cat([torch.zeros_like(IDS[:, :2]), IDS[:, :4]], 1)
    right = logits_of(case, input_ids=IDS[:, :5])
    mask = (padded != 0).long()
    ways: list[dict[str, Any]] = [
        {"pad_token_id": 0},
        {"pad_token_id": 1, "starts": torch.tensor([2, 2])},
        {"pad_token_id": 1, "attention_mask": mask},
        {"mask_info": protocol.MaskInfo(attention_mask=mask)},
    ]
    for way in ways:
        kwargs = prepare(case.model, padded, 9, kind=kind, **way)
        with torch.no_grad():
            output = case.model(padded, **kwargs)
            close(output.logits[:, -1], right[:, 3])
            before = dict(kwargs)
            following = case.call("update_inputs_for_generation", output, kwargs)
            assert kwargs.keys() == before.keys() and all(kwargs[name] is one for name, one in before.items())
            close(case.model(IDS[:, 4:5], **following).logits[:, -1], right[:, 4])
    types = prepare(case.model, IDS, 9, 0, token_type_ids=torch.ones_like(IDS), kind=kind)["token_type_ids"]
    assert bool((types == 1).all())
    refused(lambda: prepare(case.model, IDS, 3, 0), "max_length=3")
    refused(lambda: prepare(case.model, IDS, 9, 0, shardings={"a": None}), "shardings")
    refused(lambda: case.call("update_inputs_for_generation", object(), {}), CACHE)


@of("merge_params", "tree")
@of("merge_params_dict", "params_dict")
@of("split_params_dict", "params_dict")
def state(case: Any) -> None:
    model = case.copied()
    doubled = {name: 2 * one for name, one in protocol.split_params(model).items()}
    for tree in (doubled, protocol.unflatten(doubled)):
        case_model = protocol.merge_params(case.copied(), tree)
        assert all(torch.equal(one, doubled[name]) for name, one in case_model.named_parameters())
    parts = protocol.split_params_dict(model, model.state_dict())
    held = dict(model.named_parameters(remove_duplicate=False))  # a tied weight may come under each of its names
    assert dict(model.named_parameters()).keys() <= parts["params"].keys() <= held.keys()
    assert all(torch.equal(one, held[name]) for name, one in parts["params"].items())
    name = next(iter(doubled))
    before = {key: one.clone() for key, one in model.named_parameters()}
    protocol.merge_params_dict(model, {name: doubled[name]})
    assert all(torch.equal(one, doubled[key] if key == name else before[key]) for key, one in model.named_parameters())
    for wrong in ({"no.such": torch.ones(1)}, {name: torch.ones(1, 2, 3)}):
        refused(lambda wrong=wrong: protocol.merge_params_dict(model, wrong))
        refused(lambda wrong=wrong: protocol.merge_params(model, doubled | wrong))
    assert all(torch.equal(one, doubled[key] if key == name else before[key]) for key, one in model.named_parameters())


@of("quantize", "quantization_config quantize_tensors verbose")
def few_bits(case: Any) -> None:
    model = protocol.quantize(case.copied(), None, verbose=True)  # int8 is the default
    plain = dict(protocol.dequantize(copy.deepcopy(model)).named_parameters())
    for name, one in case.model.named_parameters():
        if torch.equal(plain[name], one):
            continue
        assert float((plain[name] - one).abs().max()) <= float(one.abs().max()) / 254 * 1.001, name
    config = protocol.QuantizationConfig("nf4", group_size=16)
    error = logits_of(case, **case.inputs) - case.logits(protocol.quantize(case.copied(), config))
    assert float(error.norm()) > 0
    if case.name == "qwen3_moe":
        held = protocol.quantize(case.copied(), "int8", quantize_tensors=False)
        assert any(name.endswith("experts.gate_up_proj") for name, _ in held.named_parameters())
    refused(lambda: protocol.quantize(case.copied(), "int9"), "int9")


@of("from_pretrained", "pretrained_model_name_or_path")
@of("save_pretrained", "save_directory push_to_hub token gather_fns float_dtype step")
def files(case: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        case.call("save_pretrained", Path(folder), push_to_hub=False, token=None, float_dtype=torch.bfloat16, step=12)
        path = Path(folder) / "checkpoint-12"
        found = type(case.model).from_pretrained(path)
        halved = {name: one.bfloat16() for name, one in case.model.named_parameters()}
        assert all(torch.equal(one.bfloat16(), halved[name]) for name, one in found.named_parameters())
        assert {one.dtype for one in case.model.parameters()} == {torch.float32}
    refused(lambda: case.call("save_pretrained", "unused", gather_fns={}), "JAX")
    refused(lambda: case.call("save_pretrained", "unused", step=-1), "step=-1")


@of("push_to_hub", DOCUMENTED["push_to_hub"])
def upload(case: Any) -> None:
    sent: dict[str, Any] = {}

    def theirs(model: Any, repo_id: str, **kwargs: Any) -> str:
        sent.update(kwargs, repo_id=repo_id, dtype=model.dtype)
        return f"https://huggingface.co/{repo_id}"

    given = {"commit_message": "m", "private": True, "token": "t", "create_pr": True, "revision": "r"}
    given |= {"commit_description": "d"}
    from easytorch.protocol.reference_arguments import push_to_hub

    url = push_to_hub(case.model, "me/it", **given, float_dtype="bfloat16", verbose=True, theirs=theirs)
    assert url.endswith("me/it") and sent == given | {"repo_id": "me/it", "dtype": torch.bfloat16}
    assert case.model.dtype == torch.float32
    for name, value in (("use_temp_dir", True), ("gather_fns", {}), ("mismatch_allowed", True)):
        refused(lambda name=name, value=value: case.call("push_to_hub", "me/it", **{name: value}), "JAX")


@of("get_module_repr", "module")
@of("prettify_nnx", "module indent depth max_depth module_param")
@of("printify_nnx", "model")
@of("return_type_adjuster", "original_return_type")
def text(case: Any) -> None:
    layer = next(one for one in case.model.modules() if isinstance(one, torch.nn.Linear))
    assert f"weight: float32 {tuple(layer.weight.shape)}" in protocol.get_module_repr(layer)
    lines = protocol.prettify_nnx(case.model, indent="> ").splitlines()
    assert lines[0].startswith(f"> {type(case.model).__name__}(") and all(one.startswith("> ") for one in lines)
    top = protocol.prettify_nnx(case.model, max_depth=0)
    assert "..." in top and top == protocol.prettify_nnx(case.model, depth=2, max_depth=2)
    name, _ = next(iter(case.model.named_parameters()))
    owner = case.model.get_submodule(name.rpartition(".")[0])
    shown = protocol.prettify_nnx(owner, module_param={name.rpartition(".")[2]: torch.ones(3, 5)})
    assert "(3, 5)" in shown
    assert f"{sum(one.numel() for one in case.model.parameters()):,}" in protocol.printify_nnx(case.model)
    assert protocol.return_type_adjuster(str)(abs)(-3) == 3  # type: ignore[arg-type]
