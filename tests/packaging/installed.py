"""What an installed EasyTorch must do; run by scripts/check_install.sh, standing outside the checkout.

usage: installed.py TREE wheel|editable      TREE: the folder it was installed from
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main(tree: Path, kind: str) -> None:
    import easytorch
    import easytorch.bridge.rules.table
    import easytorch.kernels.attention.native

    homes = [easytorch.__file__, easytorch.bridge.rules.table.__file__, easytorch.kernels.attention.native.__file__]
    for home in homes:
        inside = Path(home).resolve().is_relative_to(tree.resolve())
        assert inside == (kind == "editable"), f"{kind}: {home} was imported"
    assert importlib.metadata.version("easytorch") == easytorch.__version__
    assert (Path(easytorch.__file__).parent / "py.typed").is_file()
    from easytorch.kernels.cpu import build

    there = {path.relative_to(tree / "kernels") for path in tree.glob("kernels/*/*") if path.suffix in (".cpp", ".h")}
    installed = {path.relative_to(build.SOURCES) for path in build.SOURCES.glob("*/*") if path.suffix in (".cpp", ".h")}
    assert installed == there, f"the sources of the C++ kernels: {sorted(there ^ installed)}"

    with tempfile.TemporaryDirectory() as site:
        (Path(site) / "kernels").mkdir()
        (Path(site) / "kernels" / "__init__.py").write_text("whose = 'Hugging Face'\n")
        sys.path.append(site)
        import kernels

        assert kernels.whose == "Hugging Face", f"our kernels/ hides the PyPI package: {kernels!r}"

    for command in (["easytorch", "--version"], ["easytorch", "--help"], [sys.executable, "-m", "easytorch", "--help"]):
        subprocess.run(command, check=True, capture_output=True, timeout=600)
    env = subprocess.run(["easytorch", "env", "--json"], check=True, capture_output=True, text=True, timeout=600)
    assert json.loads(env.stdout), env.stdout
    # A file a rank: both ranks write to the one standard output, where their lines can run together.
    script = (
        "import os, pathlib, sys, easytorch.bridge.rules.table, easytorch.kernels.attention.native\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).touch()\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rank.py").write_text(script)
        (Path(folder) / "ranks").mkdir()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*torchrun, f"{folder}/rank.py", f"{folder}/ranks"]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        ranks = sorted(path.name for path in Path(folder, "ranks").iterdir())
    assert ranks == ["0", "1"], ranks
    print(f"{kind}: {homes[0]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
