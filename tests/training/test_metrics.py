from __future__ import annotations

import struct

import pytest

from easytorch.training.metrics import MetricsFile, read_metrics
from easytorch.training.plot import plot_loss


def write(path, steps):
    metrics = MetricsFile(path)
    for step in steps:
        metrics.write(step=step, loss=5.0 / step)
    metrics.write(step=steps[-1], eval_loss=1.5)
    metrics.close()


def test_a_resumed_run_keeps_only_the_lines_before_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 9))
    MetricsFile(path, 5).close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4, 5]
    MetricsFile(path).close()
    assert read_metrics(path) == []


def test_half_a_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1, "loss": 2.0}]


@pytest.mark.parametrize("count", [1, 40])
def test_the_curve_is_a_png_with_ink_on_it(tmp_path, count):
    from matplotlib.image import imread

    write(tmp_path / "metrics.jsonl", range(1, count + 1))
    image = plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    data = image.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (960, 540)
    pixels = imread(image)[..., :3]
    assert len({tuple(pixel) for pixel in pixels.reshape(-1, 3)}) > 50


def test_nothing_to_draw_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval_loss": 2.0}\n')
    with pytest.raises(ValueError, match="no training step"):
        plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
