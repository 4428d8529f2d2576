"""Numerics: is an output right? Runs on any device, knows no kernel.

Each output is compared with the fp64 truth and scaled by the error that the
same-precision PyTorch reference makes on the same inputs. The first two
rules hold for the whole tensor and for every tile:

* max error  <= max_ratio  * reference's max error  + 1e-6  (the rule of arXiv 2605.19269)
* mean error <= mean_ratio * reference's mean error
* errors of 16-bit outputs do not lean toward or away from zero

A tile can be so small that the reference happens to be exact on it, so the
reference error counts as at least the error of one correct rounding of the
tile's largest (mean) value, and for fp32 outputs as at least what fp32
accumulation in another order would change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ABSOLUTE_SLACK = 1e-6
TILE = 128
# rounding to nearest leaves errors without a side; a scale error below one ulp or truncation shows here
MAX_BIAS, MIN_FOR_BIAS = 0.3, 4096
# half a unit in the last place, relative; fp32 allows a few rounded additions
_ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-22}


@dataclass
class Finding:
    """How one output compares with the truth. Errors are absolute, in the output's unit."""

    output: str
    passed: bool
    reason: str
    max_error: float = float("nan")
    reference_max_error: float = float("nan")
    mean_error: float = float("nan")
    reference_mean_error: float = float("nan")
    relative_error: float = float("nan")  # Frobenius norm of the error over that of the truth
    bias: float = float("nan")  # mean error away from zero over mean absolute error, in [-1, 1]

    def as_dict(self) -> dict:
        return dict(vars(self))


def judge(
    name: str,
    got: Tensor,
    truth: Tensor,
    reference: Tensor,
    max_ratio: float = 2.0,
    mean_ratio: float = 1.5,
    exact: bool = False,
    noise: Tensor | float = 0.0,
    special: str = "propagate",
) -> Finding:
    """Compare one output with the fp64 ``truth``.

    Args:
        got: what the candidate wrote, in its declared dtype.
        truth: fp64, same shape.
        reference: the same-precision reference, already rounded to the declared dtype.
        exact: require bit equality with the rounded truth (integer inputs).
        noise: rms error that fp32 accumulation alone causes, per element or for all.
        special: ``TensorSpec.special``: where the truth is not finite, the same value ("propagate") or
            any that is not finite ("nonfinite").
    """
    if got.shape != truth.shape or got.dtype != reference.dtype:
        return Finding(
            name,
            False,
            f"{name}: has shape {tuple(got.shape)} and dtype {got.dtype}, "
            f"must be {tuple(truth.shape)} and {reference.dtype}",
        )
    g = got.double()
    # a value beyond the dtype's range must overflow the same way in every version
    t = torch.where(reference.isinf() & truth.isfinite(), reference.double(), truth)
    odd = ~t.isfinite()
    same_odd = torch.where(odd, (g == t) | (g.isnan() & t.isnan()), g.isfinite())
    if special == "nonfinite":
        same_odd |= ~truth.isfinite() & ~g.isfinite()
    if not bool(same_odd.all()):
        wrong = ~same_odd
        kind = "NaN" if bool(g[wrong].isnan().any()) else "Inf or a finite value in its place"
        return Finding(name, False, f"{name}: {int(wrong.sum())} elements are {kind}; {_where(wrong, g, t)}")
    zero = torch.zeros((), dtype=torch.float64, device=g.device)
    err = torch.where(odd, zero, (g - t).abs())
    if exact:
        want = t.to(got.dtype)
        differs = (got != want) & ~odd
        if bool(differs.any()):
            reason = f"{name}: not bit-exact on integer inputs; {_where(differs, g, t)}"
            return Finding(name, False, reason, max_error=float(err.max()))
        return Finding(name, True, f"{name}: bit-exact", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    base = torch.where(odd, zero, (reference.double() - t).abs())
    size = torch.where(odd, zero, t.abs())
    unit = _ROUNDING[got.dtype]
    noise = torch.as_tensor(noise, dtype=torch.float64, device=g.device).expand_as(t)
    outward = torch.where(odd, zero, (g - t) * t.sign())
    low_outward = torch.where(odd, zero, (reference.double() - t) * t.sign())
    mean_err = float(err.mean())
    finding = Finding(
        name,
        True,
        "",
        float(err.max()),
        float(base.max()),
        mean_err,
        float(base.mean()),
        float(err.norm() / size.norm().clamp_min(1e-300)),
        float(outward.mean()) / mean_err if mean_err > 0 else 0.0,
    )
    # a maximum over Gaussian errors reaches 3 to 4 rms, their mean is 0.8 rms
    # the mean of a few roundings can be as large as one of them
    few = 0.3 + 0.7 / size.numel() ** 0.5
    max_floor = max(unit * float(size.max()), 4 * float(noise.max()))
    mean_floor = max(few * unit * float(size.mean()), 2 * float(noise.mean()))
    max_bound = max_ratio * max(finding.reference_max_error, max_floor) + ABSOLUTE_SLACK
    mean_bound = mean_ratio * max(finding.reference_mean_error, mean_floor)
    tiles = _tile_bounds(err, base, size, unit, max_ratio, mean_ratio, noise)
    usual_bias = (
        abs(float(low_outward.mean())) / finding.reference_mean_error if finding.reference_mean_error > 0 else 1.0
    )
    biased = got.numel() >= MIN_FOR_BIAS and got.dtype != torch.float32 and abs(finding.bias) > usual_bias + MAX_BIAS
    problem = None
    if not finding.max_error <= max_bound:
        problem = f"max error {finding.max_error:.3g} exceeds {max_bound:.3g}"
    elif not finding.mean_error <= mean_bound:
        problem = f"mean error {finding.mean_error:.3g} exceeds {mean_bound:.3g}"
    elif bool(tiles.any()):
        problem = f"{int(tiles.sum())} of {tiles.numel()} tiles are wrong though the whole tensor's errors pass"
    elif biased:
        side = "away from" if finding.bias > 0 else "toward"
        problem = f"errors lean {side} zero ({finding.bias:+.2f} of their size): a wrong scale or rounding"
    if problem:
        finding.passed = False
        bad = err > max_ratio * (base + unit * size + 4 * noise) + ABSOLUTE_SLACK
        if not bool(bad.any()):
            bad = _expand(tiles, err) if bool(tiles.any()) else err >= err.max()
        finding.reason = (
            f"{name}: {problem} (same-precision PyTorch: max {finding.reference_max_error:.3g}, "
            f"mean {finding.reference_mean_error:.3g}); {_where(bad, g, t)}{_guess(g, t, odd)}"
        )
    else:
        finding.reason = f"{name}: max error {finding.max_error:.3g}, PyTorch's {finding.reference_max_error:.3g}"
    return finding


def judge_output(task, name: str, got: Tensor, truth, integers: bool) -> Finding:
    """``judge`` with the task's ratios and a ``reference_kernels.truth.Truth``.

    On whole-number inputs an output that fp32 computes without any rounding must be bit-exact.
    """
    exact = integers and torch.equal(truth.same[name].double(), truth.exact[name])
    return judge(
        name,
        got,
        truth.exact[name],
        truth.low[name],
        task.max_ratio,
        task.mean_ratio,
        exact,
        truth.noise.get(name, 0.0),
        task.outputs[name].special,
    )


def _as_tiles(x: Tensor) -> Tensor:
    """(rows of tiles, columns of tiles, elements), zero-padded; vectors become one row of tiles."""
    x = x[None] if x.ndim == 1 else x
    th = TILE if x.shape[0] > 1 else 1
    pad = (0, -x.shape[1] % TILE, 0, -x.shape[0] % th)
    x = torch.nn.functional.pad(x, pad)
    r, c = x.shape[0] // th, x.shape[1] // TILE
    return x.reshape(r, th, c, TILE).transpose(1, 2).reshape(r, c, -1)


def _tile_bounds(err, base, size, unit, max_ratio, mean_ratio, noise) -> Tensor:
    """Which tiles break a rule: bool (rows of tiles, columns of tiles)."""
    e, b, s, n = _as_tiles(err), _as_tiles(base), _as_tiles(size), _as_tiles(noise)
    max_floor = torch.maximum(unit * s.amax(-1), 4 * n.amax(-1))
    max_bound = max_ratio * torch.maximum(b.amax(-1), max_floor) + ABSOLUTE_SLACK
    # the mean of one tile scatters more than the whole tensor's
    count = _as_tiles(torch.ones_like(err)).sum(-1)
    few = 0.3 + 0.7 / count.sqrt()
    floor = torch.maximum(few * unit * s.mean(-1), 2 * n.mean(-1))
    mean_bound = 1.5 * mean_ratio * torch.maximum(b.mean(-1), floor) + ABSOLUTE_SLACK
    return ~(e.amax(-1) <= max_bound) | ~(e.mean(-1) <= mean_bound)


def _expand(tiles: Tensor, like: Tensor) -> Tensor:
    """Tile flags as element flags of ``like``'s shape."""
    rows = like.shape[0] if like.ndim == 2 else 1
    th = TILE if rows > 1 else 1
    full = tiles.repeat_interleave(th, 0).repeat_interleave(TILE, 1)
    return full[:rows, : like.shape[-1]].reshape(like.shape)


def _where(bad: Tensor, got: Tensor, want: Tensor) -> str:
    """Describe where ``bad`` elements lie, and show one."""
    share = float(bad.double().mean())
    index = bad.nonzero()[0].tolist()
    at = tuple(index)
    example = f"at {index} got {float(got[at]):.6g}, truth {float(want[at]):.6g}"
    return f"{share:.2%} of elements wrong{_pattern(bad)}, e.g. {example}"


def _pattern(bad: Tensor) -> str:
    """Name a regular pattern: columns of one parity, the ragged tail, whole rows or columns."""
    if bad.ndim == 1 or bad.shape[0] == 1:
        flat = bad.reshape(-1)
        tail = (flat.shape[0] // TILE) * TILE
        if tail and tail < flat.shape[0] and not bool(flat[:tail].any()):
            return ", only in the last partial tile"
        return ""
    rows, cols = bad.any(1), bad.any(0)
    if not bool(cols[0::2].any()):
        return ", only in odd columns"
    if not bool(cols[1::2].any()):
        return ", only in even columns"
    for flags, axis in ((cols, "column"), (rows, "row")):
        tail = (flags.shape[0] // TILE) * TILE
        if tail and tail < flags.shape[0] and not bool(flags[:tail].any()):
            return f", only in the last partial {axis} tile"
    row_tiles = _as_tiles(bad.double()).amax(-1) > 0
    if int(row_tiles.sum()) < row_tiles.numel():
        hit = row_tiles.nonzero()[:4].tolist()
        return f", in {int(row_tiles.sum())} of {row_tiles.numel()} {TILE}x{TILE} tiles (first: {hit})"
    return ", in every tile"


def _guess(got: Tensor, want: Tensor, odd: Tensor) -> str:
    """A constant factor between got and truth is worth telling."""
    big = ~odd & (want.abs() > want[~odd].abs().mean()) if bool((~odd).any()) else odd
    if int(big.sum()) < 8:
        return ""
    ratio = got[big] / want[big]
    middle = float(ratio.median())
    spread = float((ratio - middle).abs().median())
    if abs(middle - 1.0) > 0.01 and spread < 0.005 * abs(middle):
        return f"; everywhere about {middle:.4g} x the truth"
    return ""
