"""The table of scripts/bench_generation.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from generation.worker import GEMM, READ_BYTES

# dtype -> row -> for each round: seconds a token of "generate" and of "prefill"
Rounds = dict[str, list[dict[str, float]]]

RIVALS = ("llama.cpp", "transformers")
HEADER = (
    "dtype", "program", "generate, tokens/s", "read", *(f"of {name}" for name in RIVALS), "prefill, tokens/s", "GEMM",
    *(f"of {name}" for name in RIVALS),
)  # fmt: skip


@dataclass
class Figures:
    device: str
    threads: int
    tokens: int
    prefill: int
    weights: dict[str, int]  # read: that a token reads; layers: those in the layers
    versions: dict[str, str]
    load: tuple[float, float, float]  # of the machine before it began, over 1, 5 and 15 minutes
    rounds: dict[str, Rounds] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def rate(self, dtype: str, row: str, what: str) -> float:
        """Tokens per second, by the median."""
        return 1 / statistics.median(one[what] for one in self.rounds[dtype][row])

    def ratio(self, dtype: str, row: str, rival: str, what: str) -> float | None:
        """Of the speeds, the median over the rounds; None without that rival."""
        program, _, format_ = row.partition(" ")
        if f"{rival} {format_}".strip() in self.rounds[dtype]:  # of the same bits
            rival = f"{rival} {format_}".strip()
        pairs = zip(self.rounds[dtype][row], self.rounds[dtype].get(rival, []), strict=False)
        ratios = [theirs[what] / ours[what] for ours, theirs in pairs]
        return statistics.median(ratios) if ratios and program != rival.partition(" ")[0] else None

    def bandwidth(self, dtype: str) -> float:
        """Bytes per second of a plain read."""
        return READ_BYTES * self.rate(dtype, "machine", "generate")

    def arithmetic(self, dtype: str) -> float:
        """Floating-point operations per second of a large matrix product."""
        return 2 * GEMM**3 * self.rate(dtype, "machine", "prefill")

    def rows(self) -> Iterator[tuple[str, ...]]:
        for dtype, rounds in self.rounds.items():
            for row in rounds:
                if row == "machine":
                    continue
                format_ = row.partition(" ")[2] or dtype
                generate, prefill = (self.rate(dtype, row, what) for what in ("generate", "prefill"))
                read = self.weights["read"] * BYTES[format_] * generate / self.bandwidth(dtype)
                gemm = 2 * self.weights["layers"] * prefill / self.arithmetic(dtype)
                yield (
                    format_, row.partition(" ")[0], f"{generate:.1f}", f"{read:.0%}",
                    *self._ratios(dtype, row, "generate"),
                    f"{prefill:.0f}", f"{gemm:.0%}", *self._ratios(dtype, row, "prefill"),
                )  # fmt: skip

    def _ratios(self, dtype: str, row: str, what: str) -> Iterator[str]:
        for rival in RIVALS:
            ratio = self.ratio(dtype, row, rival, what)
            yield "" if ratio is None else f"{ratio:.2f}"

    def title(self) -> str:
        machine = ", ".join(
            f"{dtype}: a read {self.bandwidth(dtype) / 1e9:.1f} GB/s, GEMM {self.arithmetic(dtype) / 1e9:.0f} GFLOP/s"
            for dtype in self.rounds
        )
        rounds = max(len(found) for rows in self.rounds.values() for found in rows.values())
        return (
            f"Llama of {self.weights['read'] / 1e9:.2f} B weights, {self.tokens} tokens generated, {self.prefill} of "
            f"prefill; medians of {rounds} rounds. {self.device}, {self.threads} threads, load "
            f"{', '.join(f'{load:.1f}' for load in self.load)} before; {machine}. "
            f"{', '.join(f'{name} {number}' for name, number in self.versions.items())}."
        )

    def markdown(self) -> str:
        lines = [self.title(), "", "| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows()]
        return "\n".join(lines) + "\n"


# Bytes of a weight; Q8_0 and Q4_0 have a scale in 16 bits for each 32, Q4_K_M some layers in Q6_K.
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "q8_0": 1 + 2 / 32, "q4_0": 0.5 + 2 / 32, "q4_k_m": 0.6}
