"""Checkpoints by URL and by Hub name: what is fetched, what is written, and that nothing half-done stays."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from easytorch.bridge.convert import convert
from easytorch.bridge.diff import diff
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.inspect import inspect
from easytorch.bridge.jobs.locations import wanted
from easytorch.bridge.load_tree import load_tree

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def put(system: fsspec.AbstractFileSystem, folder: Path, root: str) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            system.pipe_file(f"{root}/{file.relative_to(folder).as_posix()}", file.read_bytes())


def test_from_url_to_url(memory, tiny_flax, tmp_path):
    put(memory, tiny_flax, "/bucket/flax")
    report = convert("memory://bucket/flax", "memory://bucket/torch", to="torch", verify=True)
    assert (report.source, report.destination) == ("memory://bucket/flax", "memory://bucket/torch")
    assert sorted(memory.find("/bucket/torch")) == ["/bucket/torch/config.json", "/bucket/torch/model.safetensors"]
    assert diff(tiny_flax, "memory://bucket/torch").same
    assert inspect("memory://bucket/torch").scheme == "torch"
    assert "bert" in load_tree("memory://bucket/flax")
    with pytest.raises(CheckpointError, match=r"memory://bucket/torch: exists already"):
        convert(tiny_flax, "memory://bucket/torch", to="torch")


def test_one_file_by_url(memory, tiny_flax):
    memory.pipe_file("/bucket/one.msgpack", (tiny_flax / "flax_model.msgpack").read_bytes())
    convert("memory://bucket/one.msgpack", "memory://bucket/out/w.safetensors", to="torch", config=tiny_flax)
    assert memory.find("/bucket/out") == ["/bucket/out/w.safetensors"]


def test_inspect_fetches_headers_alone(memory, tiny_torch, monkeypatch):
    put(memory, tiny_torch, "/bucket/torch")
    whole: list[str] = []
    get_file = type(memory).get_file

    def noted(self: object, remote: str, *rest: object, **options: object) -> None:
        whole.append(remote)
        get_file(self, remote, *rest, **options)

    monkeypatch.setattr(type(memory), "get_file", noted)
    info = inspect("memory://bucket/torch")
    assert info.tensors == inspect(tiny_torch).tensors
    assert [name for name in whole if name.endswith(".safetensors")] == []
    assert inspect("memory://bucket/torch/model.safetensors").tensors == info.tensors


def test_a_failed_upload_leaves_nothing(memory, tiny_flax, monkeypatch):
    put_file = memory.put_file

    def fail_at_config(local: str, remote: str, **options: object) -> None:
        if remote.endswith("config.json"):
            assert any(name.endswith(".safetensors") for name in memory.find("/bucket")), "config must come last"
            raise OSError(28, "No space left on device")
        put_file(local, remote, **options)

    monkeypatch.setattr(type(memory), "put_file", lambda self, *args, **kwargs: fail_at_config(*args, **kwargs))
    with pytest.raises(CheckpointError, match=r"memory://bucket/torch: cannot be written: No space left"):
        convert(tiny_flax, "memory://bucket/torch", to="torch")
    assert not memory.exists("/bucket/torch")


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("memory://nothing/here", "memory://nothing/here: does not exist or is empty"),
        ("nosuch://a/b", "nosuch://a/b: is no URL that can be opened"),
        ("./nothing/here", "nothing/here: does not exist"),
        ("hf://a/b/c", "a/b/c: is no name of a repository"),
    ],
)
def test_what_is_not_there(memory, tmp_path, location, message):
    with pytest.raises(CheckpointError, match=message):
        convert(location, tmp_path / "out", to="torch")
    assert not list(tmp_path.iterdir())


def test_a_listing_that_leaves_its_folder_is_refused():
    with pytest.raises(CheckpointError, match=r"x: lists the file '../../etc/passwd', which is not inside it"):
        wanted(["../../etc/passwd"], None, "x", Path)


def test_only_one_of_several_checkpoints_is_fetched():
    names = ["config.json", "model.safetensors", "flax_model.msgpack", "pytorch_model.bin", "tf_model.h5", ".git"]
    assert wanted(names, "tree", "x", Path) == ["config.json", "flax_model.msgpack"]
    assert wanted(names, "torch", "x", Path) == ["config.json", "model.safetensors"]


def test_of_shards_those_the_index_names(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    names = [index.name, "model-1.safetensors", "model-2.safetensors", "model-9.safetensors", "README.md"]
    assert wanted(names, None, "x", lambda name: tmp_path / name) == sorted({*names} - {"model-9.safetensors"})


def test_resume_is_for_folders_here(tiny_flax):
    with pytest.raises(ValueError, match="cannot be resumed"):
        convert(tiny_flax, "memory://bucket/x", to="torch", resume=True)


class _Hub(BaseHTTPRequestHandler):
    """The few answers of the Hub that a download needs: the listing of a repository, and its files."""

    folder: Path
    asked: list[str]
    sent: dict[str, int]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_POST(self) -> None:
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.asked.append(self.path)
        there = {file.name: file.stat().st_size for file in self.folder.iterdir()}
        found = [
            {"type": "file", "path": name, "size": there[name], "oid": "0"} for name in asked["paths"] if name in there
        ]
        self._send(json.dumps(found).encode(), True, {"Content-Type": "application/json"})

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        if path.startswith("/api/models/team/tiny"):
            files = [{"rfilename": file.name} for file in self.folder.iterdir()]
            listing = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0"} for f in self.folder.iterdir()
            ]
            content = listing if "/tree/" in path else {"id": "team/tiny", "sha": COMMIT, "siblings": files}
            self._send(json.dumps(content).encode(), body, {"Content-Type": "application/json"})
            return
        file = self.folder / path.rpartition("/")[2]
        if not path.startswith("/team/tiny/resolve/") or not file.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if path.startswith("/team/tiny/") else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = file.read_bytes()
        tag = hashlib.sha256(data).hexdigest()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if wanted is not None:
            data = data[int(wanted[1]) : int(wanted[2]) + 1]
        self.sent[file.name] = self.sent.get(file.name, 0) + len(data) * body
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        self._send(data, body, headers, 206 if wanted else 200)

    def _send(self, data: bytes, body: bool, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(tiny_flax, tiny_torch, tmp_path) -> Iterator[tuple[dict[str, str], type[_Hub]]]:
    """The environment of a process for which a server here is the Hub, and that server."""
    (tiny_flax / "model.safetensors").write_bytes((tiny_torch / "model.safetensors").read_bytes())
    handler = type("Hub", (_Hub,), {"folder": tiny_flax, "asked": [], "sent": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    # 10 seconds otherwise, which a busy machine may take to answer.
    environment |= {"HF_HUB_ETAG_TIMEOUT": "600", "HF_HUB_DOWNLOAD_TIMEOUT": "600"}
    yield {name: value for name, value in environment.items() if name != "HF_HUB_OFFLINE"}, handler
    server.shutdown()
    thread.join()
    server.server_close()


def easytorch(environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "easytorch", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_a_name_on_the_hub(hub, tmp_path, tiny_torch):
    environment, server = hub
    done = easytorch(environment, "convert", "team/tiny", tmp_path / "out", "--to", "torch", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["source_format"] == "Flax msgpack"
    assert diff(tmp_path / "out", tiny_torch).same
    assert not any(path.endswith("model.safetensors") for path in server.asked), "fetched weights it does not convert"
    # Cached: without a network the same name works.
    offline = easytorch({**environment, "HF_HUB_OFFLINE": "1"}, "inspect", "team/tiny@main", "--json")
    assert offline.returncode == 0, offline.stderr
    lost = easytorch(environment, "convert", "team/other", tmp_path / "new", "--to", "torch")
    assert (lost.returncode, lost.stderr.count("\n")) == (2, 1)
    assert lost.stderr.startswith("error: team/other: is no folder here, and the Hub says: ")
    lost = easytorch(environment, "inspect", "team/other")
    assert (lost.returncode, lost.stderr.count("\n")) == (2, 1)
    assert lost.stderr.startswith("error: hf://team/other: cannot be read: ")


def test_inspect_of_a_name_on_the_hub_fetches_headers_alone(hub, tiny_torch):
    environment, server = hub
    (server.folder / "flax_model.msgpack").unlink()
    whole = bytes(1 << 24)
    save_file({"big": torch.zeros(1 << 24, dtype=torch.uint8)}, server.folder / "model.safetensors")
    assert (server.folder / "model.safetensors").stat().st_size > len(whole)
    done = easytorch(environment, "inspect", "team/tiny", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tensors"] == [
        {"name": "big", "shape": [1 << 24], "dtype": "uint8", "bytes": 1 << 24}
    ]
    assert 0 < server.sent["model.safetensors"] < len(whole)
