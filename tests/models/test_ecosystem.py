"""What users do with transformers models, done with ours: save, load, train, adapt, compile, place, checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import Trainer, TrainingArguments

from easytorch.models.bert import BertForMaskedLM, BertForSequenceClassification
from easytorch.models.llama import LlamaForCausalLM
from tests.models.families import FAMILIES
from tests.models.image_text_families import image_text_inputs
from tests.models.tower_families import tower_inputs


@pytest.fixture
def llama(make_pair, llama_config) -> LlamaForCausalLM:
    return make_pair("LlamaForCausalLM", llama_config())[0]


@pytest.fixture
def ids() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randint(3, 97, (2, 8))


@pytest.mark.parametrize("tied", [False, True])
def test_saved_by_us_loads_in_transformers_and_back(tied, tmp_path, ids, make_pair, llama_config) -> None:
    ours, _ = make_pair("LlamaForCausalLM", llama_config(tie_word_embeddings=tied))
    ours.save_pretrained(tmp_path / "a")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert type(theirs) is transformers.LlamaForCausalLM
    theirs.save_pretrained(tmp_path / "b", max_shard_size="20KB")
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    again = LlamaForCausalLM.from_pretrained(tmp_path / "b")
    with torch.no_grad():
        logits = ours(ids).logits
        torch.testing.assert_close(theirs(ids).logits, logits)  # our rotary rounds less often
        assert torch.equal(again(ids).logits, logits)
    assert "attn_implementation" not in (tmp_path / "a" / "config.json").read_text()


def test_dtype_and_device_map(tmp_path, llama, ids) -> None:
    llama.save_pretrained(tmp_path)
    assert LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert LlamaForCausalLM.from_pretrained(tmp_path, torch_dtype="bfloat16").dtype == torch.bfloat16
    for device_map in ("cpu", "auto", {"model": "cpu", "lm_head": "cpu"}):
        loaded = LlamaForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, llama(ids).logits)


def test_layers_offloaded_to_disk(tmp_path, llama, ids) -> None:
    llama.save_pretrained(tmp_path / "model")
    device_map = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    device_map["model.rotary_emb"] = "cpu"
    loaded = LlamaForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, llama(ids).logits)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, llama, ids) -> None:
    other = copy.deepcopy(llama)
    other.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for model in (llama.train(), other.train()):
        model(ids, labels=ids).loss.backward()
    for one, two in zip(llama.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_trainer(tmp_path, llama, ids) -> None:
    rows = [{"input_ids": row, "labels": row} for row in ids.repeat(4, 1)]
    before = llama(ids, labels=ids).loss.item()
    arguments = TrainingArguments(
        tmp_path, max_steps=8, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], use_cpu=True,
        logging_strategy="no", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(llama, arguments, train_dataset=rows)
    trainer.train()
    assert llama(ids, labels=ids).loss.item() < before - 0.5
    trainer.save_model(tmp_path / "out")
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")) is transformers.LlamaForCausalLM


def test_lora(tmp_path, llama, ids) -> None:
    peft = pytest.importorskip("peft")
    plain = llama(ids).logits.detach()
    adapted = peft.get_peft_model(
        llama, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    adapted(ids, labels=ids).loss.backward()
    optimizer.step()
    changed = adapted.eval()(ids).logits.detach()
    assert not torch.allclose(changed, plain)
    assert adapted.generate(input_ids=ids, max_new_tokens=3).shape == (2, 11)
    torch.testing.assert_close(adapted.merge_and_unload()(ids).logits, changed, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family, head, module", [
    ("gemma3_text", "Gemma3ForCausalLM", "embed_tokens"),
    ("gemma4_text", "Gemma4ForCausalLM", "embed_tokens_per_layer"),
    ("t5", "T5ForConditionalGeneration", "relative_attention_bias"),
    ("vit", "ViTForImageClassification", "projection"),
    ("qwen2_vl", "Qwen2VLForConditionalGeneration", "proj"),
    ("clip_text_model", "CLIPTextModel", "position_embedding"),
])  # fmt: skip
def test_lora_on_what_is_no_matrix_product(family: str, head: str, module: str, make_pair) -> None:
    """Outputs, gradients and merged weights are those of transformers' model with the same adapter."""
    peft = pytest.importorskip("peft")
    given = tower_inputs(head) or image_text_inputs(head) or {"input_ids": torch.tensor([[5, 9, 33, 71, 8]])}
    if family == "t5":
        given["decoder_input_ids"] = given["input_ids"]
    found = []
    for model in make_pair(head, FAMILIES[family].config(), FAMILIES[family].reference):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=[module], init_lora_weights=False)
        adapted = peft.get_peft_model(model, config).eval()
        logits = adapted(**given)[0]
        logits.square().mean().backward()
        gradients = {name: one.grad for name, one in adapted.named_parameters() if one.requires_grad}
        with torch.no_grad():
            found.append((logits.detach(), gradients, adapted.merge_and_unload()(**given)[0]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_pipeline(make_pair, bert_config, tmp_path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(92))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    ours, theirs = make_pair("BertForMaskedLM", bert_config())
    answers = [
        transformers.pipeline("fill-mask", model=m, tokenizer=tokenizer)("word1 [MASK] word2") for m in (ours, theirs)
    ]
    assert isinstance(ours, BertForMaskedLM)
    assert [a["token"] for a in answers[0]] == [a["token"] for a in answers[1]]
    assert [a["score"] for a in answers[0]] == pytest.approx([a["score"] for a in answers[1]], rel=1e-4)


def test_compile_without_graph_breaks(llama, ids) -> None:
    torch.compiler.reset()
    compiled = torch.compile(llama, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, llama(ids, use_cache=False).logits)


@pytest.mark.parametrize("lengths", [(8, 5, 1), (3, 7, 8)], ids=str)
def test_compile_for_any_length(lengths, llama, ids) -> None:
    torch.compiler.reset()
    compiled = torch.compile(llama, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for length in lengths:
            short = ids[:, :length]
            for mask in (None, torch.ones_like(short)):
                given = compiled(short, attention_mask=mask, use_cache=False).logits
                torch.testing.assert_close(given, llama(short, use_cache=False).logits)


def test_resize_token_embeddings_keeps_them_tied(make_pair, llama_config, bert_config, ids) -> None:
    for name, config in (
        ("LlamaForCausalLM", llama_config(tie_word_embeddings=True)),
        ("BertForMaskedLM", bert_config()),
    ):
        model, _ = make_pair(name, config)
        model.resize_token_embeddings(101)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert model(ids).logits.shape[-1] == 101


def test_weights_with_the_names_of_old_checkpoints(tmp_path, make_pair, bert_config, batch) -> None:
    from safetensors.torch import load_file, save_file

    ours, _ = make_pair("BertForSequenceClassification", bert_config())
    ours.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): w
        for n, w in weights.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(40)[None]
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, info = BertForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, ours(**batch).logits)
