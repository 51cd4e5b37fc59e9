"""`import easytorch` is light, and the rooms and the PyPI package `kernels` are found from wherever one stands."""

from __future__ import annotations

import ast
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("jax", "jaxlib", "triton", "torch_xla", "transformers", "flax", "matplotlib", "torch")


def run(code: str, *, cwd: Path, path: tuple[Path, ...] = ()) -> str:
    """The output of `code` in a new interpreter standing in `cwd`, `path` in front of sys.path."""
    prefix = "".join(f"import sys; sys.path.insert(0, {str(entry)!r})\n" for entry in reversed(path))
    done = subprocess.run([sys.executable, "-c", prefix + code], cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_nothing_heavy(tmp_path: Path) -> None:
    code = f"import sys, easytorch\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    assert run(code, cwd=tmp_path, path=(ROOT,)) == "[]"


def test_a_training_run_starts_without_what_only_some_runs_need(tmp_path: Path) -> None:
    """transformers' loader, LoRA's and pipelines' modules take 3 s, also of a run that refuses its settings."""
    needed_by_some = ("transformers.modeling_utils", "torch.distributed.pipelining", "peft", "datasets")
    code = f"import sys, easytorch.training.loop\nprint([n for n in {needed_by_some!r} if n in sys.modules])"
    assert run(code, cwd=tmp_path, path=(ROOT,)) == "[]"


def test_modules_of_operations_import_by_their_former_paths(tmp_path: Path) -> None:
    """As they did before the folder had `dispatch/` and `attention/`; a pickle names its class by such a path."""
    former = {
        "base": "BaseOperation", "impl": "OperationImpl", "metadata": "OperationMetadata", "output": "AttentionOutput",
        "registry": "OperationRegistry", "check": "relative_rms_error", "attention": "Attention",
        "attention_impl": "AttentionFeatures", "attention_cpu": "preferences", "flash": "FlashAttention",
    }  # fmt: skip
    code = f"""
import importlib, pickle
for former, name in {former!r}.items():
    path = "easytorch.operations." + former
    exec("import " + path + "; found = " + path + "." + name)
    assert pickle.loads(f"c{{path}}\\n{{name}}\\n.".encode()) is found
    print(found.__module__.removeprefix("easytorch.operations."))
"""
    modules = run(code, cwd=tmp_path, path=(ROOT,)).split("\n")
    assert [module.partition(".")[0] for module in modules] == ["dispatch"] * 6 + ["attention"] * 4


def newer_names() -> set[str]:
    """Auto classes that came after the lowest transformers we take, where that one is installed."""
    import transformers

    return {name for name in ("AutoModelForDecision",) if not hasattr(transformers, name)}


def test_every_public_name_loads() -> None:
    import easytorch

    for name in easytorch.__all__:
        assert getattr(easytorch, name) is not None
        assert name in dir(easytorch)


def test_star_gives_what_the_installed_transformers_has(tmp_path: Path) -> None:
    """An auto class that came later is named by nobody, here AutoModelForMaskedLM."""
    code = """
import transformers
from transformers.utils.import_utils import _LazyModule
names = _LazyModule.__dir__
_LazyModule.__dir__ = lambda self: [name for name in names(self) if name != "AutoModelForMaskedLM"]
import easytorch, easytorch.auto
from easytorch import *
assert AutoModelForCausalLM is easytorch.AutoModelForCausalLM and OperationRegistry
print("AutoModelForMaskedLM" in globals(), "AutoModelForMaskedLM" in easytorch.__all__ + easytorch.auto.__all__)
"""
    assert run(code, cwd=tmp_path, path=(ROOT,)) == "False False"


def checked_names(file: Path) -> list[str]:
    """What type checkers see: the names that the TYPE_CHECKING block of `file` declares or imports."""
    blocks = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.If))
    block = next(node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING")
    classes = [node.name for node in block.body if isinstance(node, ast.ClassDef)]
    imported = [alias for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    return [*classes, *(alias.asname or alias.name for alias in imported)]


def test_type_checkers_see_the_same_names() -> None:
    import easytorch
    from easytorch import auto

    declared = checked_names(Path(auto.__file__).with_name("declared.py"))
    assert {*declared} - {"hf", "EasyTorchAuto", "EasyTorchBackbone"} == {*auto.MODELS, *auto.PASSED_ON}
    assert checked_names(Path(auto.__file__)) == ["*", "Report"]
    own = [name for name in easytorch.__all__ if name not in auto.__all__]
    assert checked_names(Path(easytorch.__file__)) == ["*", *own]


def test_every_auto_class_of_transformers_is_there() -> None:
    import transformers

    from easytorch import auto

    theirs = {name for name in dir(transformers) if re.fullmatch(r"AutoModel(For\w+)?|AutoBackbone", name)}
    assert set(auto.MODELS) - newer_names() == theirs
    for name in newer_names():
        with pytest.raises(AttributeError, match=f"transformers .* has no {name!r}"):
            getattr(auto, name)
    assert all(getattr(auto, name) is getattr(transformers, name) for name in auto.PASSED_ON)


def test_auto_classes_are_classes_like_others() -> None:
    """Made on first use: one object under every name, with its own name and place, and picklable."""
    import easytorch
    import easytorch.auto.classes as classes

    for name in set(easytorch.auto.MODELS) - newer_names():
        made = getattr(easytorch, name)
        assert made is getattr(easytorch.auto, name) is getattr(classes, name)
        assert pickle.loads(pickle.dumps(made)) is made
        assert made.__qualname__ == name and made.__module__ == classes.__name__ and made.__doc__


def test_an_unknown_public_name_says_what_there_is() -> None:
    import easytorch

    with pytest.raises(AttributeError, match=r"no attribute 'AutoModle'.*AutoModel"):
        _ = easytorch.AutoModle


@pytest.mark.parametrize("cwd", ["root", "away"])
def test_rooms_are_found(cwd: str, tmp_path: Path) -> None:
    code = "import easytorch.kernels.attention.native as n, easytorch.bridge.rules as r; print(n.__name__, r.__name__)"
    found = run(code, cwd=ROOT if cwd == "root" else tmp_path, path=(ROOT,))
    assert found == "easytorch.kernels.attention.native easytorch.bridge.rules"


@pytest.mark.parametrize("cwd", ["root", "away"])
def test_the_pypi_kernels_is_not_hidden(cwd: str, tmp_path: Path) -> None:
    """transformers imports Hugging Face's `kernels`; our folder of that name stands earlier on sys.path at the root."""
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text("get_kernel = 'Hugging Face'\n")
    code = f"import sys; sys.path.append({str(site)!r})\n"
    code += "import easytorch.kernels.attention, kernels; print(kernels.get_kernel)"
    assert run(code, cwd=ROOT if cwd == "root" else tmp_path, path=(ROOT,)) == "Hugging Face"


def test_our_folder_is_not_taken_for_the_pypi_kernels() -> None:
    code = """
import importlib.metadata
from transformers.utils import is_kernels_available
installed = any(d.metadata["Name"] == "kernels" for d in importlib.metadata.distributions())
print(is_kernels_available() == installed)
"""
    assert run(code, cwd=ROOT) == "True"
