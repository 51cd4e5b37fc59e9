from __future__ import annotations

import json

import pytest

from easytorch.training import TrainingConfig
from easytorch.training.arguments import parse


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
        {"model": {"hidden_size": 32}},
    ],
)
def test_a_setting_out_of_range_is_named(settings, wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
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
    with pytest.raises(ValueError, match=r"stepz.*known: text, output"):
        parse(["--config", str(path)], "train")
    with pytest.raises(ValueError, match="needs output"):
        TrainingConfig.from_dict({"text": "a.txt"})
    path.write_text("[]")
    with pytest.raises(ValueError, match="JSON object"):
        parse(["--config", str(path)], "train")
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        parse(["--config", str(path)], "train")
