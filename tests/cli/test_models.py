"""`easytorch models`: classes, layers, operations and replaced attention of a type or a folder."""

from __future__ import annotations

import json

import pytest
import transformers

from easytorch.cli.main import main


def output(capsys, *arguments, code=0):
    with pytest.raises(SystemExit) as exit_:
        main(["models", *arguments])
    captured = capsys.readouterr()
    assert exit_.value.code == code, captured.err
    return captured.out if code == 0 else captured.err


def test_a_native_type(capsys) -> None:
    found = json.loads(output(capsys, "vit", "--json"))
    classes = {one["name"]: one for one in found["classes"]}
    assert {"ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling"} <= set(classes)
    assert all(one["native"] for one in classes.values())
    assert classes["ViTForImageClassification"]["autos"] == ["AutoModelForImageClassification"]
    run = found["run"]
    assert run["model_class"] == "ViTForImageClassification" and run["reason"] is None
    assert {"attention", "layer_norm"} <= set(run["operations"]) and "TowerAttention" in run["blocks"]
    assert run["attention_layers"] == run["replaced"] and len(run["replaced"]) == 2
    text = output(capsys, "vit")
    assert text.startswith("vit: native\n") and "2 of 2 layers call EasyTorch's" in text


def test_the_folder_of_transformers_own_class(capsys, tmp_path) -> None:
    config = transformers.GPTNeoConfig(
        hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4, vocab_size=97
    )
    config.architectures = ["GPTNeoForCausalLM"]
    config.save_pretrained(tmp_path)  # no weights: they are not read
    found = json.loads(output(capsys, str(tmp_path), "--json"))
    assert found["model_type"] == "gpt_neo" and not any(one["native"] for one in found["classes"])
    run = found["run"]
    assert run["model_class"] == "GPTNeoForCausalLM" and run["blocks"] == [
        "SpecialisedAttention",
        "SpecialisedMLP",
    ]
    assert set(run["replaced"]) <= set(run["attention_layers"])
    assert len(run["replaced"]) == len(run["attention_layers"]) or run["reason"]
    text = output(capsys, str(tmp_path))
    assert "transformers' own classes" in text and "layers of EasyTorch  SpecialisedAttention, SpecialisedMLP" in text
    assert (
        "other modules        2 x GPTNeoSelfAttention (projections) by linear (k_proj, out_proj, q_proj, v_proj)"
        in text
    )
    assert "2 x GPTNeoMLP (MLP) by linear" in text
    assert [(one["name"], one["kind"], one["count"]) for one in run["modules"]] == [
        ("GPTNeoSelfAttention", "projections", 2),
        ("GPTNeoMLP", "MLP", 2),
    ]


def test_a_name_that_is_nothing(capsys, tmp_path) -> None:
    assert "is neither a folder nor a model type of transformers" in output(capsys, "lama", code=2)
    assert "config.json" in output(capsys, str(tmp_path), code=2)
