"""The results of a run: a table of ratios, JSON, a plot."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.measure import Result

LIMIT = 1.05  # of torch's own time, what the automatic choice may take
CALL_MS = 0.005  # what choosing costs a call, in Python: not counted against the limit (scripts/bench_dispatch.py)
TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
PACKAGES = ("torch", "jax", "jaxlib", "triton", "transformers", "torch_xla", "libtpu")


@dataclass(kw_only=True)
class Report:
    device: str
    threads: int
    copy_gbps: float
    versions: dict[str, str]
    results: list[Result] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        data = json.loads(text)
        return cls(**{**data, "results": [Result(**row) for row in data["results"]]})

    def slow(self) -> list[Result]:
        """The cases in which the automatic choice takes more than 1.05 of torch's own time, and 5 us, longer."""
        return [result for result in self.results if is_slow(result)]


def is_slow(result: Result) -> bool:
    return result.ratio > LIMIT and result.ours_ms - LIMIT * result.baseline_ms > CALL_MS


def empty_report(device: torch.device, copy_gbps: float) -> Report:
    return Report(
        device=device_name(device), threads=torch.get_num_threads(), copy_gbps=copy_gbps,
        versions={"python": platform.python_version(), **installed()},
    )  # fmt: skip


def installed() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = named[0] if named else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def merge(reports: list[Report]) -> Report:
    """One report of several runs of one machine; the last figure of a case counts."""
    first = reports[0]
    for other in reports[1:]:
        if (other.device, other.threads, other.versions) != (first.device, first.threads, first.versions):
            raise ValueError("these runs differ in device, threads or versions: they cannot stand in one table")
    rows = {result.label: result for report in reports for result in report.results}
    return Report(**{**vars(first), "results": list(rows.values())})


def milliseconds(value: float) -> str:
    return f"{value:.3g} ms" if value >= 1 else f"{value * 1000:.3g} us"


def notes(result: Result) -> str:
    """Bandwidth or arithmetic, and the ratio to reach."""
    parts = []
    if result.copy_share is not None and not result.tiny:
        parts.append(f"{result.bandwidth_gbps:.3g} GB/s, {result.copy_share:.0%} of a copy")
    if result.tflops is not None and not result.tiny:
        parts.append(f"{result.tflops:.3g} TFLOP/s")
    return "; ".join(parts)


def reach(result: Result) -> str:
    if result.reach is None or result.reach_ratio is None:
        return ""
    of = f" of {result.reach_of}" if result.reach_of else ""
    return f"{result.reach_ratio:.2f} / {result.reach:.2f}{of}"


def row(result: Result) -> tuple[str, ...]:
    name = f"{result.operation}: {result.name}" if result.name else result.operation
    return (
        name, result.shape, result.dtype, result.passes, f"{result.implementation} ({result.backend})",
        milliseconds(result.ours_ms), f"{milliseconds(result.baseline_ms)} {result.baseline}", f"{result.ratio:.2f}",
        reach(result), notes(result),
    )  # fmt: skip


HEADER = ("case", "shape", "dtype", "passes", "runs", "time", "best of torch", "ratio", "got / reach", "")


def print_table(report: Report, console: Console) -> None:
    table = Table(*HEADER, title=title(report), title_justify="left")
    for result in report.results:
        style = "red" if is_slow(result) else "green" if result.ratio < 0.95 else None
        cells = list(row(result))
        if style is not None:
            cells[7] = f"[{style}]{cells[7]}[/{style}]"
        table.add_row(*cells)
    console.print(table)


def title(report: Report) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    return (
        f"time / best of torch's own, {report.device}, {report.threads} threads, copy {report.copy_gbps:.3g} GB/s\n"
        f"{versions}"
    )


def markdown(report: Report) -> str:
    lines = [title(report).replace("\n", ". ") + ".", "", "| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    lines += ["| " + " | ".join(row(result)) + " |" for result in report.results]
    return "\n".join(lines) + "\n"


def write_section(report: Report, path: Path, device: str) -> None:
    """Puts the table between the page's marks for `device`."""
    put_section(path, "bench_ops", markdown(report), device)


def put_section(path: Path, script: str, text: str, part: str = "") -> None:
    """Puts the text between the page's marks of a script, and leaves the rest of the page as it is."""
    begin, end = f"<!-- {script}{part and f': {part}'} -->\n", f"<!-- {script}: end -->"
    page = path.read_text() if path.exists() else f"{begin}{end}\n"
    before, mark, rest = page.partition(begin)
    _, closing, after = rest.partition(end)
    if not mark or not closing:
        raise ValueError(f"{path} has no section between {begin.strip()!r} and {end!r}")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def plot(report: Report, path: Path) -> None:
    """Bars of the ratios on a logarithmic axis, the quartiles of the rounds, and what was to be reached."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    results = report.results
    figure, axes = plt.subplots(figsize=(11, 1.6 + 0.24 * len(results)), layout="constrained")
    places = range(len(results))
    ratios = [result.ratio for result in results]
    colors = ["#c0392b" if is_slow(r) else "#27825a" if r.ratio < 0.95 else "#8a8f98" for r in results]
    errors: Any = [
        [max(0.0, r.ratio - r.ratio_low) for r in results],
        [max(0.0, r.ratio_high - r.ratio) for r in results],
    ]
    axes.barh(places, [r - 1.0 for r in ratios], left=1.0, color=colors, height=0.7, xerr=errors, ecolor="#444444")
    goals = [(place, r.reach) for place, r in zip(places, results, strict=True) if r.reach and not r.reach_of]
    axes.scatter([g for _, g in goals], [p for p, _ in goals], marker="|", s=120, color="black", label="to reach")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    lowest, highest = 0.8 * min(ratios), 1.3 * max(1.0, *ratios)
    ticks = [t for t in TICKS if lowest <= t <= highest]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_yticks(places, [result.label for result in results], fontsize=8)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel("time / best of torch's own (less is better)")
    axes.set_title(title(report), fontsize=8, loc="left")
    if goals:
        axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
