"""The angles of rotary position embedding: inverse frequencies of every rope type of transformers, and cos and sin.

Computed in float32 in the order of transformers' `ROPE_INIT_FUNCTIONS`, whose bits they have. Sources: linear,
https://arxiv.org/abs/2306.15595; dynamic NTK, https://www.reddit.com/r/LocalLLaMA/comments/14mrgpr; yarn,
https://arxiv.org/abs/2309.00071; longrope, https://arxiv.org/abs/2402.13753; llama3, https://arxiv.org/abs/2407.21783;
multimodal sections (M-RoPE), https://arxiv.org/abs/2409.12191.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Rope = Mapping[str, Any]


class Frequencies(NamedTuple):
    inverse: Tensor  # (R / 2,) float32: the angle per position of each pair
    attention_factor: float  # of cos and sin


class _Setting(NamedTuple):
    rope: Rope
    head_dim: int
    max_positions: int
    length: int | Tensor | None
    device: torch.device | None

    @property
    def dim(self) -> int:
        return int(self.head_dim * self.rope.get("partial_rotary_factor", 1.0))

    @property
    def theta(self) -> float:
        return self.rope["rope_theta"]

    @property
    def factor(self) -> float:
        """The factor that the context is extended by: from the trained length to `max_positions`, unless given."""
        given = self.rope.get("factor")
        return self.max_positions / self.trained if given is None else given

    @property
    def trained(self) -> int:
        """The trained length: `max_positions` where the config has none."""
        return self.rope.get("original_max_position_embeddings") or self.max_positions

    def exponents(self, dim: int | None = None, of: int | None = None) -> Tensor:
        """2i / of for i below dim / 2."""
        dim = self.dim if dim is None else dim
        return torch.arange(0, dim, 2, dtype=torch.float32, device=self.device) / (dim if of is None else of)


def inverse_frequencies(
    rope: Rope,
    *,
    head_dim: int,
    max_position_embeddings: int,
    seq_len: int | Tensor | None = None,
    device: torch.device | None = None,
) -> Frequencies:
    """The frequencies of `rope`, a config's `rope_parameters`: {"rope_type": "yarn", "rope_theta": 1e4, ...}.

    seq_len: how many positions are in use, which dynamic and longrope depend on; may be a tensor, so that the result
    can be compiled. None: the trained length. Raises `ValueError` for an unknown type, a missing key or a
    trained length below 1.
    """
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise ValueError(f"no rope type is called {kind!r}; known: {', '.join(ROPE_TYPES)}")
    setting = _Setting(rope, head_dim, max_position_embeddings, seq_len, device)
    _check_pairs(kind, setting)
    if kind in ("yarn", "llama3", "longrope") and setting.trained < 1:
        raise ValueError(f"rope type {kind!r}: original_max_position_embeddings={setting.trained} must be 1 or more")
    try:
        return ROPE_TYPES[kind](setting)
    except KeyError as missing:
        raise ValueError(f"rope type {kind!r} needs {missing} in rope_parameters, got {dict(rope)}") from None


def _check_pairs(kind: str, s: _Setting) -> None:
    """`ValueError` unless the numbers of a head that turn are pairs, and longrope has two factors for each of them."""
    turning = s.head_dim if kind == "proportional" else s.dim
    given = f"rope type {kind!r} turns {turning} of the {s.head_dim} numbers of a head"
    if turning % 2 or turning < 0:
        raise ValueError(f"{given}, which must be pairs: change head_dim or partial_rotary_factor")
    if kind == "dynamic" and turning == 2:
        raise ValueError(f"{given}, and needs four at least: change head_dim or partial_rotary_factor")
    for name in ("short_factor", "long_factor") if kind == "longrope" else ():
        if name in s.rope and len(s.rope[name]) != turning // 2:
            raise ValueError(f"{given}: {name} must have {turning // 2} entries, got {len(s.rope[name])}")


def cos_sin(
    position_ids: Tensor,
    frequencies: Frequencies,
    dtype: torch.dtype = torch.float32,
    *,
    mrope_section: Sequence[int] | None = None,
    mrope_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """position_ids (..., T) -> cos and sin (..., T, R), the second half of R repeats the first; the angles are float32.

    mrope_section: how many of the R / 2 pairs rotate by each of three positions (time, height, width); position_ids is
    then (3, ..., T). The sections follow one another and add up to R / 2 (Qwen2-VL), or are interleaved: pair i takes
    axis i % 3 while that has pairs left, then time (Qwen3-VL).
    """
    inverse, factor = frequencies
    angles = position_ids[..., None].float() * inverse.to(position_ids.device, torch.float32)
    if mrope_section is not None:
        axes = _axes(mrope_section, angles.shape[-1], mrope_interleaved, angles.device)
        if angles.shape[0] != len(mrope_section):
            raise ValueError(f"position_ids must be ({len(mrope_section)}, ..., T), got {tuple(position_ids.shape)}")
        angles = torch.take_along_dim(angles, axes.reshape(1, *[1] * (angles.dim() - 2), -1), dim=0)[0]
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def _axes(section: Sequence[int], pairs: int, interleaved: bool, device: torch.device) -> Tensor:
    """(pairs,): the position axis of each pair."""
    if not interleaved:
        if sum(section) != pairs:
            raise ValueError(f"mrope_section {list(section)} must add up to the {pairs} pairs that turn")
        return torch.arange(len(section), device=device).repeat_interleave(torch.tensor(section, device=device))
    turns = len(section)
    axes = [i % turns if i < section[i % turns] * turns else 0 for i in range(pairs)]
    return torch.tensor(axes, device=device)


def _default(s: _Setting) -> Frequencies:
    return Frequencies(1.0 / s.theta ** s.exponents(), 1.0)


def _linear(s: _Setting) -> Frequencies:
    return Frequencies(_default(s).inverse / s.rope["factor"], 1.0)


def _proportional(s: _Setting) -> Frequencies:
    """Only the first part of the pairs rotates, with the frequencies of the whole head; the others have angle zero."""
    turning = int(s.rope.get("partial_rotary_factor", 1.0) * s.head_dim // 2)
    inverse = 1.0 / s.theta ** s.exponents(2 * turning, of=s.head_dim)
    still = torch.zeros(s.head_dim // 2 - turning, dtype=torch.float32, device=s.device)
    return Frequencies(torch.cat((inverse, still)) / s.rope.get("factor", 1.0), 1.0)


def _dynamic(s: _Setting) -> Frequencies:
    """The base grows with the length beyond `max_positions`."""
    length, longest, factor = s.length, s.max_positions, s.rope["factor"]
    if isinstance(length, Tensor):
        length = length.clamp(min=longest)
    else:
        length = longest if length is None else max(length, longest)
    stretched = s.theta * ((factor * length / longest) - (factor - 1)) ** (s.dim / (s.dim - 2))
    return Frequencies(1.0 / stretched ** s.exponents(), 1.0)


def _yarn(s: _Setting) -> Frequencies:
    """High frequencies are kept, low ones divided by the factor, those between interpolated."""
    rope, dim, factor, trained = s.rope, s.dim, s.factor, s.trained

    def pair_of(rotations: float) -> float:
        """The pair that makes this many rotations within the trained length."""
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(s.theta))

    low, high = pair_of(rope.get("beta_fast") or 32), pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32, device=s.device) - low) / span).clamp(0, 1)
    wavelengths = s.theta ** s.exponents()
    inverse = 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    return Frequencies(inverse, _yarn_attention_factor(rope, factor))


def _yarn_attention_factor(rope: Rope, factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given, numerator, denominator = (rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return given
    return scale(numerator) / scale(denominator) if numerator and denominator else scale(1)


def _longrope(s: _Setting) -> Frequencies:
    """Each pair has two factors: one for trained lengths, one for longer ones."""
    trained, given, factor = s.trained, s.rope.get("attention_factor"), s.factor
    short, long = (
        torch.tensor(s.rope[name], dtype=torch.float32, device=s.device) for name in ("short_factor", "long_factor")
    )
    if isinstance(s.length, Tensor):
        factors = torch.where(s.length > trained, long, short)
    else:
        factors = long if s.length is not None and s.length > trained else short
    if given is None:
        given = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return Frequencies(1.0 / (factors * s.theta ** s.exponents()), given)


def _llama3(s: _Setting) -> Frequencies:
    """Wavelengths within the trained length are kept, those far beyond it multiplied by the factor, those between
    interpolated."""
    rope, factor, inverse = s.rope, s.rope["factor"], _default(s).inverse
    low, high, trained = rope["low_freq_factor"], rope["high_freq_factor"], s.trained
    wavelength = 2 * math.pi / inverse
    kept = (trained / wavelength - low) / (high - low)
    mixed = (1 - kept) * inverse / factor + kept * inverse
    inverse = torch.where(wavelength > trained / low, inverse / factor, inverse)
    between = ~(wavelength < trained / high) & ~(wavelength > trained / low)
    return Frequencies(torch.where(between, mixed, inverse), 1.0)


ROPE_TYPES: dict[str, Callable[[_Setting], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
