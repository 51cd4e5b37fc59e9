from __future__ import annotations

import io
import shutil

import pytest
import torch
import transformers

from easytorch.cli.main import main
from easytorch.training.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random Llama with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["the class statement binds a name to an object"] * 5, 300)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.5, bos_token_id=0, eos_token_id=0,
        pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def generate(*arguments):
    with pytest.raises(SystemExit) as exit_:
        main(["generate", *map(str, arguments)])
    return exit_.value.code


def test_greedy_text_is_that_of_transformers(model, capsys):
    assert generate(model, "--prompt", "the class", "--max-new-tokens", 12) == 0
    captured = capsys.readouterr()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model)
    expected = reference.generate(**tokenizer("the class", return_tensors="pt"), max_new_tokens=12, do_sample=False)
    assert captured.out == tokenizer.decode(expected[0], skip_special_tokens=True) + "\n"
    assert captured.err.startswith("12 tokens in ") and "tokens/s on cpu" in captured.err


def test_a_seed_makes_sampling_repeatable(model, capsys):
    flags = ("--prompt", "the", "--max-new-tokens", 16, "--temperature", 1.0, "--top-k", 50, "--top-p", 0.95)
    texts = []
    for seed in (1, 1, 2):
        assert generate(model, *flags, "--seed", seed) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_the_prompt_may_come_from_standard_input(model, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("the name"))
    assert generate(model, "--prompt", "-", "--max-new-tokens", 2) == 0
    assert capsys.readouterr().out.startswith("the name")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "abacus"], "'abacus' is not a device"),
        (["--dtype", "int3"], "int3"),
        (["--attn-implementation", "no-such-attention"], "no-such-attention"),
        (["--top-p", "1.5"], "top_p"),
        (["--max-new-tokens", "0"], "Error"),
    ],
)
def test_a_wrong_setting_is_one_error_and_2(model, capsys, arguments, said):
    assert generate(model, "--prompt", "the", *arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err and "Traceback" not in captured.err


def test_a_folder_that_is_no_model_is_one_error_and_2(tmp_path, capsys):
    assert generate(tmp_path, "--prompt", "x") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and str(tmp_path) in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("cls", "config", "said"),
    [
        ("LlamaModel", {}, "holds LlamaModel, which cannot generate: it has no 'lm_head.weight'"),
        ("LlamaForSequenceClassification", {}, "it has no 'lm_head.weight'"),
        ("BertModel", {}, "holds BertModel, which cannot generate: it has no"),
        ("BertForMaskedLM", {}, "holds BertForMaskedLM, which cannot generate: it reads text in both directions"),
        ("LlamaForCausalLM", {"vocab_size": 20}, "the tokenizer is another model's"),
    ],
)
def test_a_checkpoint_that_does_not_continue_text_is_one_error_and_2(model, tmp_path, capsys, cls, config, said):
    model_class = getattr(transformers, cls)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    made = model_class.config_class(**{"vocab_size": len(tokenizer), **sizes, **config})
    model_class(made).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert generate(tmp_path, "--prompt", "the class") == 2
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err and captured.err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_missing_or_broken_tokenizer_is_one_error_and_2(model, tmp_path, capsys, content):
    folder = tmp_path / "model"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    assert generate(folder, "--prompt", "the class") == 2
    captured = capsys.readouterr()
    assert captured.out == "" and f"error: {folder}: no tokenizer can be loaded there" in captured.err
