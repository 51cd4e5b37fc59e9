"""The loss curve of a run as a PNG."""

from __future__ import annotations

from pathlib import Path

from easytorch.training.metrics import read_metrics, series


def plot_loss(metrics: str | Path, image: str | Path, *, title: str = "Training loss") -> Path:
    """Draw training and held-out loss (nats per token) over the optimizer steps of a `metrics.jsonl`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(metrics)
    train, held_out = series(lines, "loss"), series(lines, "eval_loss")
    if not train:
        raise ValueError(f"{metrics} has no training step to draw")
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*zip(*train, strict=True), color="#9bb8d3", linewidth=1.0, label="training batch")
    if len(train) >= 20:
        axes.plot(*zip(*_smoothed(train), strict=True), color="#1f5a92", linewidth=1.8, label="training, smoothed")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color="#c8553d", marker="o", markersize=4, label="held-out text")
    axes.set(title=title, xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    image = Path(image)
    figure.savefig(image)
    return image


def _smoothed(points: list[tuple[int, float]], decay: float = 0.9) -> list[tuple[int, float]]:
    """Exponential moving average with bias correction."""
    mean, weight, result = 0.0, 0.0, []
    for step, value in points:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        result.append((step, mean / weight))
    return result
