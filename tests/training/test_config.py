from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from easytorch.training import TrainingConfig, train
from easytorch.training.arguments import parse, run
from easytorch.training.prepare import check_inputs


@pytest.mark.parametrize(
    "wrong",
    [
        {"text": ()},
        {"steps": 0},
        {"batch_size": -1},
        {"vocab_size": 256},
        {"block_size": 1},
        {"eval_fraction": 1.0},
        {"schedule": "sawtooth"},
        {"dtype": "float16"},
        {"device": "abacus"},
        {"micro_batch_size": 0},
        {"learning_rate": -1e-3},
        {"learning_rate": float("nan")},
        {"grad_clip": float("inf")},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"seed": -1},
        {"min_learning_rate": 0.1},
        {"on_nonfinite": "ignore"},
        {"decay_steps": 5},
        {"change": ("sead",)},
        {"change": ("model",)},
        {"steps": "10"},
        {"steps": 10.5},
        {"steps": True},
        {"learning_rate": "1e-3"},
        {"text": 5},
        {"output": None},
        {"resume": "no"},
        {"model": ["llama"]},
        {"model": {"hidden_size": 32}},
        {"model": ""},
        {"output": ""},
        {"output": "a\0b"},
        {"text": ("",)},
        {"text": ("a", None)},
        {"attn_implementation": ""},
        {"seed": 2**63},
        {"learning_rate": 10**400},
        *(
            {name: 2**31}
            for name in ("steps", "block_size", "batch_size", "vocab_size", "micro_batch_size", "save_every")
        ),
    ],
)
def test_a_setting_out_of_range_is_named(settings, wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=rf"{name} \(--{name.replace('_', '-')}\)"):
        settings(**wrong)


@pytest.mark.parametrize(
    ("processes", "micro", "expected"), [(1, None, (8, 8)), (2, None, (4, 4)), (2, 2, (4, 2)), (8, 1, (1, 1))]
)
def test_a_batch_is_shared_by_the_processes(settings, processes, micro, expected):
    assert settings(batch_size=8, micro_batch_size=micro).share(processes) == expected


@pytest.mark.parametrize(("processes", "micro"), [(3, None), (2, 3)])
def test_a_batch_that_does_not_divide_is_refused(settings, processes, micro):
    with pytest.raises(ValueError, match="does not divide"):
        settings(batch_size=8, micro_batch_size=micro).share(processes)


RECIPES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_trains(recipe, tmp_path, corpus, pretrained, datasets_of):
    """As its first lines say, made small by flags."""
    named = yaml.safe_load(recipe.read_text())
    task, model = named.get("task", "pretrain"), named.get("model", str(pretrained))
    source = ["--text", str(corpus)] if task == "pretrain" else ["--dataset", datasets_of[task]]
    if isinstance(model, dict):
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes |= {"num_key_value_heads": 1, "head_dim": 8, "moe_intermediate_size": 8, "num_experts": 4}
        model = json.dumps(model | {key: value for key, value in sizes.items() if key in model})
    small = [
        "--vocab-size",
        "257",
        "--block-size",
        "64",
        "--batch-size",
        "4",
        "--micro-batch-size",
        "2",
        "--steps",
        "2",
        "--warmup-steps",
        "1",
    ]
    small += ["--decay-steps", "1"] if "decay_steps" in named else []
    if "lora" in named:
        small += ["--lora", json.dumps(named["lora"] | {"rank": 4})]
    output = ["--output", str(tmp_path / "run"), "--device", "cpu"]
    mesh = ["--mesh", "dp=1"] if "mesh" in named else []
    assert run([str(recipe), *source, "--model", model, *small, *mesh, *output], "train") == 0
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
    config = parse([str(recipe), *source, "--model", model, "--output", "runs"], "train")
    for name in named.keys() - {"model"}:
        assert str(getattr(config, name)) == str(type(getattr(config, name))(named[name])), name


def test_a_recipe_trains(tmp_path):
    """As a user runs it, made small by flags: the same numbers as the settings by hand."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the class statement binds a name to an object. " * 60)
    small = ["--vocab-size", "260", "--block-size", "16", "--batch-size", "4", "--micro-batch-size", "2"]
    small += ["--steps", "4", "--warmup-steps", "1", "--decay-steps", "2", "--dtype", "float32", "--seed", "3"]
    tiny = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    tiny |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    common = ["--text", str(corpus), "--model", json.dumps(tiny), *small]
    recipe = str(next(one for one in RECIPES if one.stem == "pretrain"))
    assert run([recipe, *common, "--output", str(tmp_path / "recipe")], "train") == 0
    byhand = [
        "--learning-rate",
        "6e-4",
        "--schedule",
        "wsd",
        "--weight-decay",
        "0.1",
        "--output",
        str(tmp_path / "hand"),
    ]
    assert run([*common, *byhand], "train") == 0
    losses = [
        [json.loads(line).get("loss") for line in (tmp_path / one / "metrics.jsonl").read_text().splitlines()]
        for one in ("recipe", "hand")
    ]
    assert losses[0] == losses[1] and len(losses[0]) >= 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: [1", "is not YAML"),
        ("- steps", "must hold a mapping of training settings, got a list"),
        ("steps: 1\nsteps: 2", "recipe.yaml: steps is given twice: give it once"),
        ("model:\n  model_type: llama\n  model_type: qwen3", "model_type is given twice"),
        ("1: 2", "keys that are not strings"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
        ("hiden: 1", "unknown training settings hiden"),
        ("steps: many", r"steps \(--steps\) must be an integer, got 'many'"),
    ],
)
def test_a_yaml_file_that_is_none_is_refused(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        parse([str(path), "--text", "a", "--output", "b"], "train")
    with pytest.raises(ValueError, match="two files of settings"):
        parse([str(path), "--config", str(path)], "train")


def test_flags_go_over_the_config_file(tmp_path, settings):
    config = settings(steps=7, seed=3)
    config.save(tmp_path / "run.json")
    assert parse(["--config", str(tmp_path / "run.json")], "train") == config
    read = parse(
        ["--config", str(tmp_path / "run.json"), "--steps", "9", "--resume", "--micro-batch-size", "2"], "train"
    )
    assert (read.steps, read.seed, read.resume, read.micro_batch_size) == (9, 3, True, 2)


def test_the_model_flag_takes_json_or_a_folder():
    common = ["--text", "a.txt", "b.txt", "--output", "out", "--model"]
    config = parse([*common, '{"model_type": "llama", "hidden_size": 32}'], "train")
    assert config.model == {"model_type": "llama", "hidden_size": 32}
    assert config.text == ("a.txt", "b.txt")
    assert parse([*common, "some/folder"], "train").model == "some/folder"


def test_unknown_and_missing_settings_are_named(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"text": "a.txt", "output": "o", "stepz": 3}))
    with pytest.raises(ValueError, match=r"stepz \(nearest known name: 'steps'\); known: text, output"):
        parse(["--config", str(path)], "train")
    with pytest.raises(ValueError, match=r"needs output \(--output\)"):
        TrainingConfig.from_dict({"text": "a.txt"})
    path.write_text("[]")
    with pytest.raises(ValueError, match="JSON object"):
        parse(["--config", str(path)], "train")
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        parse(["--config", str(path)], "train")


def test_one_file_or_a_list_of_them_is_taken(settings):
    assert settings(text="a.txt").text == ("a.txt",)
    assert settings(text=["a.txt", "b.txt"], change=["seed"]).text == ("a.txt", "b.txt")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stepz", "3"], r"unknown flag --stepz 3 \(nearest known name: '--steps'\)"),
        (["--learning-rte=3"], r"unknown flag --learning-rte=3 \(nearest known name: '--learning-rate'\)"),
        (["extra"], "unknown flag extra"),
        (["--steps"], "--steps: expected one argument"),
        (["--steps", "three"], "--steps: invalid int value: 'three'"),
        (["--config", "absent.json"], r"config \(--config\): there is no file 'absent.json'"),
        (["--config", ""], r"config \(--config\): there is no file ''"),
    ],
)
def test_a_wrong_flag_is_one_line_without_the_usage(arguments, said, capsys):
    with pytest.raises((ValueError, OSError), match=said):
        parse(["--text", "a.txt", "--output", "o", *arguments], "train")
    assert capsys.readouterr().err == ""


def test_a_config_file_that_is_not_text_is_named(tmp_path):
    (tmp_path / "run.json").write_bytes(b"\xff{")
    with pytest.raises(ValueError, match=r"config \(--config\): .*run\.json is not JSON"):
        parse(["--config", str(tmp_path / "run.json")], "train")


def test_the_defaults_are_those_documented():
    """Each of them decides what a run without flags learns, or what it costs."""
    config = TrainingConfig(text=("a",), output="b")
    assert config.model["hidden_size"] == 256 and config.model["num_hidden_layers"] == 4
    assert (config.vocab_size, config.block_size, config.batch_size, config.micro_batch_size) == (4096, 256, 16, None)
    assert (config.learning_rate, config.min_learning_rate, config.schedule) == (1e-3, 0.0, "cosine")
    assert (config.warmup_steps, config.steps, config.weight_decay) == (50, 1000, 0.1)
    assert (config.beta1, config.beta2, config.grad_clip) == (0.9, 0.95, 1.0)
    assert (config.seed, config.dtype, config.eval_fraction) == (0, "float32", 0.05)
    assert (config.save_every, config.keep_checkpoints, config.on_nonfinite) == (500, 2, "stop")


def test_every_setting_is_described():
    assert [name for name in TrainingConfig.__dataclass_fields__ if name not in TrainingConfig.__doc__] == []


def test_settings_from_json_may_name_one_file(tmp_path):
    assert TrainingConfig.from_dict({"text": "a.txt", "output": "o", "change": ["steps"]}).change == ("steps",)
    with pytest.raises(ValueError, match=r"text \(--text\) must be a list of strings, got \[1\]"):
        TrainingConfig.from_dict({"text": [1], "output": "o"})


def test_a_model_flag_that_is_not_json_is_named():
    with pytest.raises(ValueError, match="--model: this is not JSON"):
        parse(["--text", "a", "--output", "b", "--model", '{"model_type": llama}'], "train")


def test_an_attention_that_there_is_not_is_refused_before_anything_is_written(settings):
    config = settings(attn_implementation="no such")
    with pytest.raises(ValueError, match=r"attn_implementation \(--attn-implementation\): .*no such"):
        train(config)
    assert not Path(config.output).exists()
    check_inputs(settings(attn_implementation="flash"), 1)
    with pytest.raises(ValueError, match=r"chat_template .* must be a name"):
        settings(chat_template="")


@pytest.mark.parametrize(
    ("changes", "processes", "message"),
    [
        ({"mesh": "tp=8", "batch_size": 8}, 8, r"mesh \(--mesh\) tp=8: num_.*_heads=\d does not divide over 8 ranks"),
        ({"mesh": "ep=2"}, 2, r"mesh \(--mesh\) ep=2: .* declares no expert parallel plan"),
        ({"mesh": "pp=64", "batch_size": 64}, 64, r"mesh \(--mesh\) pp=64: \d layers do not make pp=64 stages"),
        ({"model": {"model_type": "llama", "max_position_embeddings": 4}}, 1, "max_position_embeddings 4"),
    ],
)
def test_what_a_model_does_not_divide_over_is_refused_before_anything_is_written(settings, changes, processes, message):
    config = settings(**changes)
    with pytest.raises(ValueError, match=message):
        check_inputs(config, processes)
    assert not Path(config.output).exists()
