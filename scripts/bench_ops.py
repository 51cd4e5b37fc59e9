"""The operations against the best of torch's own, as ratios of time.

    python scripts/bench_ops.py [--only PATTERN] [--quick] [--json FILE] [--plot FILE.png] [--check]
    python scripts/bench_ops.py --memory           peak memory of flash at several lengths
    python scripts/bench_ops.py --from a.json b.json --markdown page.md      earlier runs, as one

What runs is the automatic choice; EASYTORCH_OPS="attention=flash" times another one. The registry of cases is
scripts/bench/.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - a script of the checkout
from bench import CASES, measure, memory, report, select  # noqa: E402
from rich.console import Console  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", help="the cases whose label this regular expression finds")
    parser.add_argument("--quick", action="store_true", help="only the tiny shapes, briefly")
    parser.add_argument("--list", action="store_true", help="print the labels of the cases and stop")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=2, help="of the CPU (2)")
    parser.add_argument("--seconds", type=float, help="of measuring a case, at least three rounds (2; quick 0.2)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a PNG; needs matplotlib")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the table, between a page's marks")
    parser.add_argument("--from", dest="earlier", nargs="+", type=Path, metavar="FILE", help="report earlier --json")
    parser.add_argument("--memory", action="store_true", help="peak memory of flash by length, instead of times")
    parser.add_argument(
        "--check", action="store_true", help="exit 1 where the choice takes over 1.05 of torch and 5 us"
    )
    return parser.parse_args()


def run(options: argparse.Namespace, console: Console) -> report.Report:
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    seconds = options.seconds if options.seconds is not None else (0.2 if options.quick else 2.0)
    found = report.empty_report(device, measure.copy_bandwidth(device))
    cases = list(select(options.only, options.device, options.quick))
    for number, case in enumerate(cases, 1):
        console.print(f"[{number}/{len(cases)}] {case.label}", style="dim", markup=False, highlight=False)
        found.results.append(measure.run_case(case, device, seconds, found.copy_gbps))
        gc.collect()
        if options.json is not None:  # as far as it got: a long run may be cut off
            options.json.write_text(found.to_json() + "\n")
    return found


def main() -> int:
    options = arguments()
    console, progress = Console(width=None if sys.stdout.isatty() else 200), Console(stderr=True)
    if options.list:
        for case in select(options.only, None, options.quick):
            print(f"{case.label}  [{', '.join(case.devices)}]")
        return 0
    if options.memory:
        memory.show(torch.device(options.device), console, options.json)
        return 0
    if options.earlier:
        found = report.merge([report.Report.from_json(path.read_text()) for path in options.earlier])
    else:
        found = run(options, progress)
    if not found.results:
        known = ", ".join(dict.fromkeys(case.operation for case in CASES))
        print(f"no case of {options.device} matches {options.only!r}; operations: {known}", file=sys.stderr)
        return 2
    report.print_table(found, console)
    if options.json is not None:
        options.json.write_text(found.to_json() + "\n")
    if options.plot is not None:
        report.plot(found, options.plot)
    if options.markdown is not None:
        report.write_section(found, options.markdown, options.device)
    slow = found.slow()
    if options.check and slow:
        print(f"{len(slow)} of {len(found.results)} cases take more than {report.LIMIT} of torch's own time and 5 us:")
        for result in slow:
            print(f"  {result.ratio:.2f}  {result.label}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
