"""Conversations and preferences: which tokens count, packing, the loss of DPO, streams, all resumed bit for bit."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.testing import assert_close

import easytorch
from easytorch.training import train
from easytorch.training.chat import IGNORED, answer_tokens, preference_tokens
from easytorch.training.examples import Examples
from easytorch.training.launch import child_environment
from easytorch.training.metrics import read_metrics, series
from easytorch.training.preferences import dpo_loss
from easytorch.training.prepare import check_inputs, read_task
from easytorch.training.rows import Rows
from easytorch.training.sources import StreamedRows

GENERATION = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
TALK = [
    {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"}, {"role": "assistant", "content": "four"},
]  # fmt: skip


@pytest.fixture
def tokenizer(pretrained):
    return transformers.AutoTokenizer.from_pretrained(pretrained)


def learned(tokens, tokenizer) -> list[str]:
    """The runs of tokens that have a label, as text; those labels are the tokens themselves."""
    ids, labels = tokens
    assert len(ids) == len(labels) and all(label in (IGNORED, one) for one, label in zip(ids, labels, strict=True))
    runs, before = [], IGNORED
    for label in labels:
        if label != IGNORED:
            runs = [*runs, [label]] if before == IGNORED else [*runs[:-1], [*runs[-1], label]]
        before = label
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("template", [None, GENERATION], ids=["prefixes", "generation"])
def test_the_answers_alone_are_learned(tokenizer, template):
    end = tokenizer.eos_token
    tokenizer.chat_template = template or tokenizer.chat_template
    found = answer_tokens({"messages": TALK}, tokenizer, "d")
    assert learned(found, tokenizer) == [f"two{end}", f"four{end}"]
    assert tokenizer.decode(found[0]) == f"<user>one{end}<assistant>two{end}<user>three{end}<assistant>four{end}"
    last = answer_tokens({"prompt": TALK[:3], "completion": TALK[3:]}, tokenizer, "d")
    assert learned(last, tokenizer) == [f"four{end}"] and last[0] == found[0]


def test_prompts_and_preferences_of_text_and_of_messages(tokenizer):
    end = tokenizer.eos_token
    found = answer_tokens({"prompt": "ab ", "completion": "cd"}, tokenizer, "d")
    assert learned(found, tokenizer) == [f"cd{end}"] and tokenizer.decode(found[0]) == f"ab cd{end}"
    other = [*TALK[:3], {"role": "assistant", "content": "five"}]
    for example in (
        {"chosen": TALK, "rejected": other},
        {"prompt": TALK[:3], "chosen": TALK[3:], "rejected": other[3:]},
    ):
        chosen, rejected = preference_tokens(example, tokenizer, "d")
        assert learned(chosen, tokenizer) == [f"four{end}"] and learned(rejected, tokenizer) == [f"five{end}"]


def test_examples_that_cannot_be_used_are_refused(tokenizer, finetuning, tmp_path):
    for example, said in (
        ({"message": TALK}, r"no 'prompt'.*it has message"),
        ({"messages": "hello"}, "messages must be a list"),
        ({"prompt": "a", "completion": TALK}, "must both be text, or both messages"),
    ):
        with pytest.raises(ValueError, match=said):
            answer_tokens(example, tokenizer, "d")
    with pytest.raises(ValueError, match=r"no 'rejected'"):
        preference_tokens({"chosen": "a"}, tokenizer, "d")
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="changes earlier messages when later ones are added"):
        answer_tokens({"messages": TALK}, tokenizer, "d")
    for wrong, said in (("{% for %}", "Expected an expression"), ("{{ raise_exception('no system') }}", "no system")):
        tokenizer.chat_template = wrong
        with pytest.raises(ValueError, match=rf"the chat template .* does not take it: {said}.*; correct"):
            answer_tokens({"messages": TALK}, tokenizer, "d")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"has no chat template: give one by chat_template"):
        answer_tokens({"messages": TALK}, tokenizer, "d")
    (path := tmp_path / "d.jsonl").write_text('{"a": 1}\n{"a"')
    with pytest.raises(ValueError, match=r"d\.jsonl, line 2 is not JSON"):
        check_inputs(finetuning("sft", dataset=str(path)), 1)
    path.write_text('{"messages": []}')
    with pytest.raises(ValueError, match="makes no row to train on"):
        train(finetuning("sft", dataset=str(path)))
    path.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}')
    with pytest.raises(ValueError, match=r"d\.jsonl, example 2: no 'completion'"):
        train(finetuning("sft", dataset=str(path)))
    with pytest.raises(FileNotFoundError, match=r"dataset \(--dataset\): there is no file"):
        check_inputs(finetuning("sft", dataset="no.jsonl"), 1)


SAID = [{"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("answer", ["b", "", [], SAID], ids=["same", "empty", "no_turns", "same_turns"])
def test_preferences_without_a_difference_are_left_out_and_counted(tokenizer, finetuning, answer):
    prompt = "a" if isinstance(answer, str) else [{"role": "user", "content": "a"}]
    good, tie = (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": prompt, "chosen": answer, "rejected": answer},
    )
    rows = Rows(finetuning("dpo"), tokenizer)
    found = [place for _, place in rows.of([tie, good, tie, good])]
    assert found == [(2, 0), (4, 0)]
    assert rows.counts.note() == "of 4 preferences 2 are left out: chosen and rejected are the same"


def test_preferences_without_any_difference_are_refused(finetuning, tmp_path):
    """And nothing is left of the run, whose rows were being written."""
    (path := tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "b"}) + "\n")
    config = finetuning("dpo", dataset=str(path))
    with pytest.raises(ValueError, match=r"d\.jsonl makes no row to train on"):
        train(config)
    assert not Path(config.output).exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text": ("a.txt",)}, "two sources"),
        ({"dataset": None, "text": ("a.txt",)}, "needs a dataset"),
        ({"task": "rlhf"}, "must be one of pretrain, sft, dpo"),
        ({"streaming": True}, "holds nothing out: give eval_fraction"),
        ({"streaming": True, "eval_fraction": 0.0, "model": {"model_type": "llama"}}, "trains no tokenizer"),
        ({"tokenizer": "folder"}, "is for a new model"),
        ({"label_smoothing": 0.5}, "at least 0 and below 0.5"),
        ({"beta": -0.1}, "0 or more"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(finetuning, changes, said):
    with pytest.raises(ValueError, match=said):
        finetuning("sft", **changes)


def losses(config) -> list[float]:
    return [value for _, value in series(read_metrics(Path(config.output) / "metrics.jsonl"), "loss")]


def test_packed_conversations_have_the_loss_of_each_by_itself(finetuning, pretrained):
    """The mean over the answers' tokens of a batch, whatever row and piece of it they are in."""
    config = finetuning("sft", steps=1, learning_rate=0.0, min_learning_rate=0.0)
    train(config)
    _, task = read_task(config)
    batch = task.rows(task.indices(0, config.batch_size, config.seed))
    assert int(batch["segment_ids"].max()) >= 1, "no row holds two conversations"
    model = transformers.AutoModelForCausalLM.from_pretrained(pretrained).double()
    total, count = 0.0, 0
    for ids, labels, segments in zip(batch["input_ids"], batch["labels"], batch["segment_ids"], strict=True):
        for segment in range(int(segments.max()) + 1):
            own = segments == segment
            chances = model(input_ids=ids[own][None]).logits[0].log_softmax(-1)
            wanted = labels[own][1:]
            places = (wanted != IGNORED).nonzero()[:, 0]
            total -= float(chances[places, wanted[places]].detach().sum())
            count += len(places)
    assert losses(config) == pytest.approx([total / count], rel=1e-5)
    # in pieces of unlike numbers of targets, and each conversation in its own row
    long = dataclasses.replace(config, steps=3, learning_rate=5e-3)
    runs = [
        dataclasses.replace(long, output=config.output + name, **changes)
        for name, changes in (("a", {}), ("b", {"micro_batch_size": 1}))
    ]
    for one in runs:
        train(one)
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-5)
    apart = dataclasses.replace(config, output=config.output + "c", packing=False)
    train(apart)
    assert read_task(apart)[1].train_count > task.train_count
    found = [read_metrics(Path(one.output) / "metrics.jsonl")[-1]["eval_loss"] for one in (config, apart)]
    assert all(map(math.isfinite, found))


def test_the_loss_of_preferences_is_the_definition_and_trls():
    generator = torch.Generator().manual_seed(1)
    model, reference = (torch.randn(6, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    loss, logged = dpo_loss(model, reference, 0.3, 0.1)
    expected, rewards = [], []
    for pair in range(3):
        chosen, rejected = (float(model[row] - reference[row]) for row in (pair, pair + 3))
        logits = chosen - rejected  # TRL's `logits`
        good, bad = (math.log(1 / (1 + math.exp(-sign * 0.3 * logits))) for sign in (1, -1))
        expected.append(-0.9 * good - 0.1 * bad)
        rewards.append((0.3 * chosen, 0.3 * rejected))
    assert float(loss) == pytest.approx(sum(expected) / 3, rel=1e-12)
    assert float(logged["rewards/chosen"]) == pytest.approx(sum(one for one, _ in rewards) / 3)
    assert float(logged["rewards/margins"]) == pytest.approx(sum(one - other for one, other in rewards) / 3)
    assert float(logged["rewards/accuracies"]) == pytest.approx(sum(one > other for one, other in rewards) / 3)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "dropout": 0.1}], ids=["reference", "adapter off"])
def test_preferences_begin_at_the_reference_and_widen(finetuning, lora):
    config = finetuning("dpo", steps=12, eval_fraction=0.0, lora=lora, learning_rate=2e-2, save_every=0, batch_size=12)
    train(config)
    lines = [line for line in read_metrics(Path(config.output) / "metrics.jsonl") if "loss" in line]
    if lora is None:  # with an adapter the dropout acts from the first step on, where B is 0: nothing changes either
        assert lines[0]["rewards/chosen"] == lines[0]["rewards/margins"] == 0
    assert lines[0]["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert lines[-1]["rewards/margins"] > 0.05 and lines[-1]["loss"] < 0.68
    assert lines[-1]["rewards/margins"] == pytest.approx(
        lines[-1]["rewards/chosen"] - lines[-1]["rewards/rejected"], abs=1e-5
    )


STREAM = {"streaming": True, "eval_fraction": 0.0, "shuffle_buffer": 7}
RUNS = {
    "packed": ("sft", {}),
    "dpo": ("dpo", {}),
    "lora": ("sft", {"lora": {"rank": 4, "pattern": "q_proj|v_proj", "alpha": 8, "dropout": 0.1}}),
    "qlora": ("sft", {"lora": {"rank": 4}, "quantize": "nf4", "dtype": "bfloat16"}),
    "stream": ("sft", {**STREAM, "steps": 8, "save_every": 3}),
    "sharded stream": ("dpo", {**STREAM, "checkpoint_format": "sharded"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_resumed_to_the_bit(finetuning, name):
    task, changes = RUNS[name]
    config = finetuning(task, **changes)
    last = train(config).checkpoint
    expected, curve = {path.name: load_file(path) for path in last.glob("*.safetensors")}, losses(config)
    assert expected and ("lora" in changes) == ("adapter_model.safetensors" in expected)
    shutil.rmtree(last)
    assert train(dataclasses.replace(config, resume=True)).checkpoint == last
    for file, tensors in expected.items():
        assert_close(load_file(last / file), tensors, rtol=0, atol=0)
    assert losses(config) == curve


OVER_MESHES = """
import json, pathlib, sys, torch
from easytorch.training import TrainingConfig
from easytorch.training.loop import train_among
from easytorch.training.processes import joined
with joined(torch.device("cpu")) as processes:
    for path in sys.argv[1:]:
        train_among(processes, TrainingConfig.from_dict(json.loads(pathlib.Path(path).read_text())))
    processes.barrier()
"""


def test_packed_conversations_are_learned_over_sequences_and_stages(finetuning, pretrained, tmp_path):
    """As by one process: with sp, with pp, whose checkpoint is full too, gathered from the stages, and with tp, over
    which the one head of keys does not divide, and attention is each process's."""
    model = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    alone = finetuning("sft", "alone", model=model, tokenizer=str(pretrained), micro_batch_size=2)
    train(alone)
    runs = {
        name: dataclasses.replace(alone, output=str(tmp_path / name), mesh=mesh, checkpoint_format=kind, uneven=uneven)
        for name, mesh, kind, uneven in (
            ("sp", "sp=2", "auto", "error"), ("pp", "pp=2", "full", "error"), ("tp", "tp=2", "auto", "replicate"),
        )
    }  # fmt: skip
    with pytest.raises(ValueError, match="num_key_value_heads=1 does not divide over 2 ranks"):
        check_inputs(dataclasses.replace(runs["tp"], uneven="error"), 2)
    for name, config in runs.items():
        config.save(tmp_path / f"{name}.json")
    (tmp_path / "rank.py").write_text(OVER_MESHES)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(tmp_path / "rank.py"), *(str(tmp_path / f"{name}.json") for name in runs)],
        env={**os.environ, **child_environment(), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    expected = read_metrics(Path(alone.output) / "metrics.jsonl")
    for name, config in runs.items():
        lines = read_metrics(Path(config.output) / "metrics.jsonl")
        for key in ("loss", "eval_loss"):
            found, wanted = ([value for _, value in series(one, key)] for one in (lines, expected))
            assert wanted and found == pytest.approx(wanted, rel=1e-5), (name, key)
    full, own = (Path(one.output) / "checkpoint-4" for one in (runs["pp"], alone))
    assert {path.name for path in full.iterdir()} == {path.name for path in own.iterdir()}
    weights, wanted_weights = load_file(full / "model.safetensors"), load_file(own / "model.safetensors")
    assert weights.keys() == wanted_weights.keys()
    for name, tensor in wanted_weights.items():
        assert float((weights[name] - tensor).norm()) <= 1e-4 * float(tensor.norm()), name
    # the moments too: one process goes on from them as from its own
    for config in (runs["pp"], alone):
        further = dataclasses.replace(config, mesh=None, resume=True, steps=5, change=("steps", "mesh", "processes"))
        train(further)
    last = [series(read_metrics(Path(one.output) / "metrics.jsonl"), "loss")[-1] for one in (runs["pp"], alone)]
    assert last[0][0] == last[1][0] == 5 and last[0][1] == pytest.approx(last[1][1], rel=1e-5)


def test_conversations_and_preferences_are_learned_over_experts(finetuning, pretrained, tmp_path):
    """Rows of unlike lengths, of which each process has its own, and a reference whose experts are divided too."""
    model = {
        "model_type": "qwen3_moe", "hidden_size": 16, "moe_intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    more = {"model": model, "tokenizer": str(pretrained), "micro_batch_size": 1}
    alone = [finetuning(task, f"{task}-alone", packing=False, **more) for task in ("sft", "dpo")]
    runs = [dataclasses.replace(one, output=f"{one.output}-ep", mesh="ep=2") for one in alone]
    for number, config in enumerate(runs):
        train(alone[number])
        config.save(tmp_path / f"{number}.json")
    (tmp_path / "rank.py").write_text(OVER_MESHES)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(tmp_path / "rank.py"), *(str(tmp_path / f"{number}.json") for number in range(len(runs)))],
        env={**os.environ, **child_environment(), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for config, own in zip(runs, alone, strict=True):
        lines = [read_metrics(Path(one.output) / "metrics.jsonl") for one in (config, own)]
        for key in ("loss", "eval_loss", *(["rewards/margins"] if config.task == "dpo" else [])):
            found, wanted = ([value for _, value in series(one, key)] for one in lines)
            assert wanted and found == pytest.approx(wanted, rel=1e-5, abs=1e-7), (config.task, key)


def test_preferences_over_sequences_and_stages_are_refused_by_name(finetuning):
    for name in ("sp", "pp"):
        with pytest.raises(ValueError, match=f"dpo compares the logits .* over {name} no process has all of them"):
            finetuning("dpo", mesh=f"{name}=2").axes(2)
        with pytest.raises(ValueError, match=f"{name} takes rows of one length"):
            finetuning("sft", mesh=f"{name}=2", packing=False).axes(2)


def test_a_stream_goes_on_at_any_row_through_epochs(finetuning, tokenizer):
    config = finetuning("sft", **STREAM)
    pytest.importorskip("datasets")
    stream = StreamedRows(config, tokenizer, Examples(config))
    rows, places = [], [stream.state()]
    for step in range(40):
        rows.append(stream.rows(stream.indices(step, 1, 0))["input_ids"][0])
        places.append(stream.state())
    assert places[-1]["place"][0] >= 2, "one epoch"
    first = [row.tolist() for row in rows]
    per_epoch = next(number for number, place in enumerate(places) if place["place"][0] == 1)
    assert first[:per_epoch] != first[per_epoch : 2 * per_epoch], "another order in each epoch"
    for number in (1, 5, per_epoch, 13):
        again = StreamedRows(config, tokenizer, Examples(config))
        again.restore(json.loads(json.dumps(places[number])))
        found = [again.rows(again.indices(step, 1, 0))["input_ids"][0].tolist() for step in range(number, 40)]
        assert found == first[number:]
    with pytest.raises(ValueError, match="where the stream was"):
        stream.restore({"row": 3})


def test_running_text_is_streamed_without_a_gap(finetuning, tokenizer, tmp_path):
    pytest.importorskip("datasets")
    (path := tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": f"number {n}"}) for n in range(30)))
    config = finetuning(
        "sft", task="pretrain", dataset=str(path), block_size=16, streaming=True, eval_fraction=0.0, shuffle_buffer=0
    )
    stream = StreamedRows(config, tokenizer, Examples(config))
    found = np.concatenate([stream.rows(stream.indices(step, 1, 0))["input_ids"][0] for step in range(12)])
    wanted = tokenizer.eos_token.join(f"number {n}" for n in range(30))
    assert wanted.startswith(tokenizer.decode(found)) and len(found) == 12 * 16
    again = StreamedRows(config, tokenizer, Examples(config))
    stream = StreamedRows(config, tokenizer, Examples(config))
    stream.indices(0, 5, 0)
    again.restore(stream.state())
    assert again.rows(again.indices(1, 5, 0))["input_ids"].flatten().tolist() == found[5 * 16 : 10 * 16].tolist()


def test_a_folder_of_datasets_is_read_by_its_split(finetuning, datasets_of, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [json.loads(line) for line in Path(datasets_of["dpo"]).read_text().splitlines()]
    datasets.DatasetDict({"some": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "saved"))
    config = finetuning("dpo", dataset=str(tmp_path / "saved"), dataset_split="some")
    assert list(Examples(config)) == rows
    streamed = dataclasses.replace(config, streaming=True, eval_fraction=0.0, shuffle_buffer=0)
    assert list(Examples(streamed).read(0, 3)) == rows[3:]
    with pytest.raises(ValueError, match=r"saved: it has no split 'train'; it has some"):
        Examples(finetuning("dpo", dataset=str(tmp_path / "saved")))


def test_examples_that_are_too_long_are_cut_and_counted(finetuning, capsys):
    config = finetuning("sft", steps=1, block_size=30, eval_fraction=0.0)
    train(config)
    assert "examples" in (said := capsys.readouterr().out) and "are cut at block_size" in said
    _, task = read_task(config)
    assert all(task.targets([row]) >= 1 for row in range(task.train_count))


def test_other_examples_are_refused_on_resuming(finetuning, tmp_path, datasets_of):
    (path := tmp_path / "c.jsonl").write_bytes(Path(datasets_of["sft"]).read_bytes())
    config = finetuning("sft", dataset=str(path), steps=2)
    train(config)
    check_inputs(dataclasses.replace(config, resume=True, dataset=datasets_of["sft"]), 1)
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    with pytest.raises(ValueError, match=r"--text has other content \(.*c\.jsonl"):
        check_inputs(dataclasses.replace(config, resume=True), 1)


def test_an_adapter_is_pefts_files_and_is_merged_at_the_end(finetuning, pretrained):
    config = finetuning("sft", lora={"rank": 4, "pattern": "q_proj|v_proj", "merge": True})
    last = train(config).checkpoint
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {path.name for path in last.iterdir()}
    assert not (last / "model.safetensors").exists()
    ids = torch.arange(1, 30)[None]
    with torch.no_grad():
        merged = easytorch.AutoModelForCausalLM.from_pretrained(Path(config.output) / "model")(ids).logits
        adapted = transformers.AutoModelForCausalLM.from_pretrained(last)(ids).logits
        before = transformers.AutoModelForCausalLM.from_pretrained(pretrained)(ids).logits
    assert_close(merged, adapted, rtol=1e-4, atol=1e-4)
    assert float((adapted - before).abs().max()) > 1e-3


def test_adapters_are_learned_over_meshes(finetuning, pretrained, tmp_path):
    """As by one process, LoRA and QLoRA, preferences too, from mesh to mesh; checkpoints are PEFT's files."""
    model, folder = {
        "model_type": "qwen3_moe", "hidden_size": 16, "moe_intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
    }, tmp_path / "experts"  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(**model, vocab_size=len(tokenizer))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    lora = {"rank": 4, "pattern": "q_proj|o_proj", "merge": True}
    given = {"model": str(folder), "lora": lora, "micro_batch_size": 2, "schedule": "constant"}
    few_bits = {"quantize": "nf4", "lora": lora | {"merge": False}}
    alone = {
        "sft": finetuning("sft", "sft", **given), "few": finetuning("sft", "few", **given | few_bits),
        "dpo": finetuning("dpo", "dpo", **given | few_bits),
    }  # fmt: skip
    meshes = (
        ("sft", "fsdp=2"), ("sft", "pp=2"), ("sft", "sp=2"), ("few", "fsdp=2"), ("few", "ep=2"), ("few", "pp=2"),
        ("dpo", "fsdp=2"),
    )  # fmt: skip
    runs = [
        (kind, dataclasses.replace(alone[kind], output=str(tmp_path / f"{kind} {mesh}"), mesh=mesh))
        for kind, mesh in meshes
    ]
    change = {"resume": True, "change": ("steps", "mesh", "processes")}
    further = [  # of what the runs above have left
        ("few", dataclasses.replace(runs[3][1], steps=5, mesh="pp=2", **change)),
        ("few", dataclasses.replace(runs[5][1], steps=5, mesh="fsdp=2", **change)),
    ]
    files = []
    for _, one in (*runs, *further):
        files.append(tmp_path / f"{len(files)}.json")
        one.save(files[-1])
    (tmp_path / "rank.py").write_text(OVER_MESHES)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(tmp_path / "rank.py"), *map(str, files)],
        env={**os.environ, **child_environment(), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for config in alone.values():
        train(config)
    train(dataclasses.replace(alone["few"], steps=5, **change))
    for kind, config in runs:
        own, found = (Path(one.output) / "checkpoint-4" for one in (alone[kind], config))
        assert {path.name for path in found.iterdir()} == {path.name for path in own.iterdir()}, config.mesh
        settings = [json.loads((one / "adapter_config.json").read_text()) for one in (found, own)]
        for one in settings:
            one["target_modules"] = sorted(one["target_modules"])
        assert settings[0] == settings[1], config.mesh
        values = [load_file(one / "adapter_model.safetensors") for one in (found, own)]
        assert values[0].keys() == values[1].keys(), config.mesh
        for name, tensor in values[1].items():
            assert float((values[0][name] - tensor).norm()) <= 1e-3 * float(tensor.norm()), (kind, config.mesh, name)
        if config.lora["merge"]:
            merged = [load_file(Path(one.output) / "model" / "model.safetensors") for one in (config, alone[kind])]
            assert merged[0].keys() == merged[1].keys()
            for name, tensor in merged[1].items():
                assert float((merged[0][name] - tensor).norm()) <= 1e-4 * float(tensor.norm()), (config.mesh, name)
    for kind, config in (*runs, *further):
        lines = [read_metrics(Path(one.output) / "metrics.jsonl") for one in (config, alone[kind])]
        for key in ("loss", "eval_loss"):
            found, wanted = ([pair for pair in series(one, key) if pair[0] <= config.steps] for one in lines)
            wanted = wanted[: len(found)]  # the last run of `few` evaluates in other places
            assert len(found) >= 2, (kind, config.mesh, key)
            assert [value for _, value in found] == pytest.approx([value for _, value in wanted], rel=1e-5), (
                kind, config.mesh, key,
            )  # fmt: skip
    assert read_metrics(Path(further[0][1].output) / "metrics.jsonl")[-1]["step"] == 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora": {}}, "needs a rank of at least 1"),
        ({"lora": {"rank": 4, "ranks": 1}}, "no setting 'ranks' .nearest known name: 'rank'"),
        ({"lora": {"rank": True}}, "rank must be an integer"),
        ({"lora": {"rank": 4}, "model": {"model_type": "llama"}}, "adapts a pretrained model"),
        ({"quantize": "nf4"}, "give lora .* too, which trains"),
        ({"lora": {"rank": 4}, "quantize": "int3"}, "must be one of nf4, int8, int4"),
        ({"lora": {"rank": 4, "merge": True}, "quantize": "nf4"}, "is not merged into weights that are quantized"),
        ({"lora": {"rank": 4}, "checkpoint_format": "sharded"}, "writes PEFT's files"),
    ],
)
def test_adapters_that_cannot_be_are_refused(finetuning, changes, said):
    with pytest.raises(ValueError, match=said):
        finetuning("sft", **changes)


def test_an_adapter_is_refused_where_it_does_not_fit(finetuning):
    with pytest.raises(ValueError, match=r"mesh .* tp=2: lora .*'s matrices are not divided over tp"):
        finetuning("sft", lora={"rank": 4}, mesh="tp=2").axes(2)
    with pytest.raises(ValueError, match=r"lora \(--lora\): no linear layer"):
        train(finetuning("sft", lora={"rank": 4, "pattern": "nothing"}))
