"""What a save in the background copies while training waits."""

from __future__ import annotations

import threading

import torch

from easytorch.distributed import shards


def assert_saved(folder, tensors):
    loaded = {name: torch.full_like(one, torch.nan) for name, one in tensors.items()}
    shards.load_shards(loaded, folder)
    for name, one in tensors.items():
        assert torch.equal(loaded[name], one), name


def test_a_tied_weight_is_copied_once_while_training_waits(tmp_path, monkeypatch):
    copied, copy = list[str](), shards._copy_state_dict

    def counted(tensors, into):
        copied.extend(tensors)
        return copy(tensors, into)

    monkeypatch.setattr(shards, "_copy_state_dict", counted)
    weight, other, stager = torch.randn(6, 4), torch.randn(5), shards.Stager()
    tensors = {"embedding": weight, "norm": other, "head": weight.detach(), "row": weight[0], "none": torch.empty(0)}
    for number in range(2):  # into the same memory
        saved = {name: one.clone() for name, one in tensors.items()}
        folder = tmp_path / str(number)
        folder.mkdir()
        future = shards.save_shards(tensors, folder, lambda: None, in_background=True, stager=stager)
        weight.add_(1.0)
        other.zero_()
        shards.result_of(future)
        assert_saved(folder, saved)
    assert copied == ["embedding", "norm", "row", "none"] * 2


def test_what_stays_constant_for_now_is_copied_in_a_thread(tmp_path, monkeypatch):
    begin, copy = threading.Event(), shards._copy_state_dict

    def late(tensors, into):
        if threading.current_thread() is not threading.main_thread():
            assert begin.wait(60)
        return copy(tensors, into)

    monkeypatch.setattr(shards, "_copy_state_dict", late)
    weight, buffer, stager = torch.randn(6, 4), torch.randn(5), shards.Stager()
    tensors = {"weight": weight, "head": weight.detach(), "buffer": buffer}
    stager.constant = {"weight", "head"}
    saved = {name: one.clone() for name, one in tensors.items()}
    future = shards.save_shards(tensors, tmp_path, lambda: None, in_background=True, stager=stager)
    buffer.zero_()
    assert not future.done()
    begin.set()
    stager.wait_for_copies()
    weight.zero_()
    shards.result_of(future)
    assert_saved(tmp_path, saved)
