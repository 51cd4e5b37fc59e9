"""README.md and docs/training.md as a newcomer takes them: every sample runs as it stands, every page is linked.

The Python of the other pages is run beside what it is about (`RUN_BY`), and what commands name is held by
test_commands.py. docs/training.md's torchrun is started by tests/training/test_torchrun.py.
"""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest

from easytorch.cli.main import main
from easytorch.kernels.cpu import library
from easytorch.training import arguments

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("README.md", "docs/training.md", "docs/backends.md")
RUN_BY = {
    "docs/add-an-operation.md": "tests/operations/test_page.py",
    "docs/bridge.md": "tests/bridge/test_page.py",
    "docs/engine.md": "tests/generation/engine/test_engine.py",
    "docs/frontend.md": "tests/frontend/test_docs.py",
    "docs/protocol.md": "tests/protocol/test_page.py",
}


def samples(page: str, language: str) -> list[tuple[str, str]]:
    """(page and line, sample) of every fenced block of a language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(f"{page}:{text[: match.start()].count(chr(10)) + 1}", match[1]) for match in found]


PYTHON = [sample for page in PAGES for sample in samples(page, "python")]
COMMANDS = {page: [line for _, block in samples(page, "bash") for line in block.splitlines()] for page in PAGES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the samples name: two models, tiny, and a text."""
    import torch
    from transformers import BertConfig, BertModel, LlamaConfig

    import easytorch
    from easytorch import bridge

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("newcomer")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    llama = easytorch.AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=300))
    llama.save_pretrained(folder / "llama")
    bridge.convert(folder / "llama", folder / "path" / "to" / "flax-llama", to="flax")
    BertModel(BertConfig(**sizes, vocab_size=300)).save_pretrained(
        folder / "sentence-transformers" / "all-MiniLM-L6-v2"
    )
    lines = [f"the name {n % 7} binds an object to the class {n % 5}." for n in range(1500)]
    (folder / "corpus.txt").write_text("\n".join(lines))
    return folder


def run_here(words: list[str]) -> int:
    """`easytorch` with these words, in this process; training without the torchrun that starts it."""
    if words[0] == "train":
        return arguments.run(words[1:], "easytorch train")
    with pytest.raises(SystemExit) as exit_:
        main(words)
    return exit_.value.code


@pytest.mark.parametrize(("where", "sample"), PYTHON, ids=[where for where, _ in PYTHON])
def test_a_python_sample_runs_by_itself(where, sample, folder, monkeypatch):
    monkeypatch.chdir(folder)
    exec(compile(sample, where, "exec"), {"__name__": "sample"})


def test_the_commands_run_in_their_order(folder, monkeypatch):
    """Those of `easytorch`; training is cut to a few steps, and names of checkpoints with it."""
    monkeypatch.chdir(folder)
    shutil.rmtree("llama-torch", ignore_errors=True)
    ran = []
    for page in ("README.md", "docs/training.md"):
        shutil.rmtree("runs", ignore_errors=True)
        for line in COMMANDS[page]:
            words = shlex.split(line, comments=True)
            if not words or words[0] != "easytorch":
                continue
            shorter = {"500": "2", "510": "3", "runs/first/checkpoint-500": "runs/first/checkpoint-2", "40": "2"}
            words = [shorter.get(word, word) for word in words]
            if words[1] == "train" and "--model" not in words:
                tiny = '{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}'
                words += ["--block-size", "32", "--batch-size", "2", "--model", tiny]
            elif words[1] == "train":
                words[words.index("--block-size") + 1] = "32"
            assert run_here(words[1:]) == 0, line
            ran.append(words[1])
    assert {"convert", "inspect", "diff", "train", "generate"} <= set(ran)


def test_the_commands_of_the_cpu_page_run(capsys):
    (_, block), *others = samples("docs/kernels/cpu.md", "bash")
    build, env = (shlex.split(line, comments=True) for line in block.splitlines())
    assert not others and build[:2] == ["python", "-m"] and env[0] == "easytorch"
    if library.missing() is None:
        runpy.run_module(build[2], run_name="__main__")
        assert ".so (" in capsys.readouterr().out
    assert run_here(env[1:]) == 0


def test_the_python_of_every_page_is_run_by_a_test():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    names = [str(page.relative_to(ROOT)) for page in pages]
    assert {name for name in names if samples(name, "python")} == {*PAGES, *RUN_BY}
    for page, test in RUN_BY.items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8"), f"{test} does not read {page}"


def test_files_that_are_named_are_there():
    """In text too, not in commands alone."""
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        if page.name == "CHANGELOG.md":
            continue
        for name in re.findall(r"\b(?:scripts|tests|examples)/[\w./-]+\.(?:sh|py|md)\b", page.read_text("utf-8")):
            assert (ROOT / name).is_file(), (page, name)


def test_every_page_is_linked_and_every_link_leads_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    linked = set()
    for page in pages:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", text):
            if "://" in target:
                continue
            path = (page.parent / target).resolve()
            assert path.exists(), f"{page.relative_to(ROOT)} links to {target}"
            linked.add(path)
    assert {page for page in pages[1:] if page not in linked} == set()


def test_every_attention_is_listed_by_all_its_names():
    from easytorch.layers.attention import FLASH_FOR_TRANSFORMERS, NATIVE_INTERFACES
    from easytorch.operations import OperationRegistry

    names = {name for name in OperationRegistry.names() if "attention" in OperationRegistry.get(name).__module__}
    listed = README.split("The attentions by name", 1)[1].split("\n\n", 1)[0]
    every = {
        name
        for primary in ("attention", "vanilla", "sdpa", "flash", "blocksparse", "ring", "decode", "mla")
        for name in OperationRegistry.create(primary).all_names()
    }
    forced = README.split("The names are", 1)[1].split("\n\n", 1)[0]
    assert [name for name in NATIVE_INTERFACES if f"`{name}`" not in forced and name != FLASH_FOR_TRANSFORMERS] == []
    for name in every | {name for name in names if "attention" in name}:
        assert f"`{name}`" in listed, name


def test_every_extra_is_in_the_table_and_the_tests_have_what_they_import():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = README.split("| Extra | Adds |", 1)[1].split("\n\n", 1)[0]
    assert [name for name in extras if f"`{name}`" not in table] == []
    inner = re.search(r"easytorch\[([\w,]+)\]", " ".join(extras["test"]))
    every = " ".join([*extras["test"], *(need for name in inner[1].split(",") for need in extras[name])])
    for package in ("pytest", "gguf", "flax", "orbax-checkpoint", "tensorstore", "jax", "matplotlib", "hypothesis"):
        assert package in every
