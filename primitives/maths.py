"""Elementwise maths that means the same on CPU tensors and in a CuTeDSL trace.

Every function takes fp32 values (tensors in the interpreter, ``Float32`` on the
device) or :class:`~primitives.pairs.Pair` s, acts lane by lane, and returns fp32.
``d<name>(x)`` is the derivative of ``<name>`` at ``x``.

Device versions use the hardware's approximate units (``ex2.approx``,
``rcp.approx``, ``tanh.approx``) where ``_approx`` is in the name or the exact
form costs many instructions; each function's page in ``primitives/docs`` says which.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any, Callable

import torch

from .pairs import Pair

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715  # Hendrycks & Gimpel 2016, arXiv 1606.08415
INV_SQRT_2 = 1.0 / math.sqrt(2.0)
INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)


def _device():
    """Device twins; imported on the first trace so that CPU use never needs CuTeDSL."""
    from .device import maths

    return maths


def _tensor(*values: Any) -> bool:
    """True when the maths runs on CPU tensors."""
    return any(isinstance(v, torch.Tensor) for v in values)


def _tensors(*values: Any) -> list[torch.Tensor]:
    """All values as tensors; constants take the dtype of the computation."""
    dtype = next((v.dtype for v in values if isinstance(v, torch.Tensor)), torch.float32)
    return [v if isinstance(v, torch.Tensor) else torch.tensor(float(v), dtype=dtype) for v in values]


def _lanewise(cpu: Callable) -> Callable:
    """Make ``cpu`` the CPU meaning of a function whose device twin has the same name."""
    name = cpu.__name__

    @functools.wraps(cpu)
    def call(*args: Any) -> Any:
        if any(isinstance(a, Pair) for a in args):
            lanes = [Pair.lanes(a) for a in args]
            return Pair(call(*(a for a, _ in lanes)), call(*(b for _, b in lanes)))
        if all(isinstance(a, (int, float)) for a in args):
            return cpu(*(torch.tensor(float(a), dtype=torch.float64) for a in args)).item()  # a constant stays one in both worlds
        if _tensor(*args):
            return cpu(*_tensors(*args))
        return getattr(_device(), name)(*args)

    return call


# --- one argument -------------------------------------------------------------


@_lanewise
def exp(x):
    """e^x."""
    return torch.exp(x)


@_lanewise
def exp2(x):
    """2^x, the form the hardware computes."""
    return torch.exp2(x)


@_lanewise
def log(x):
    """Natural logarithm."""
    return torch.log(x)


@_lanewise
def sqrt(x):
    """Square root."""
    return torch.sqrt(x)


@_lanewise
def rsqrt(x):
    """1 / sqrt(x)."""
    return torch.rsqrt(x)


@_lanewise
def rcp(x):
    """1 / x, by the approximate reciprocal unit on the device."""
    return torch.reciprocal(x)


@_lanewise
def fabs(x):
    """|x|."""
    return torch.abs(x)


@_lanewise
def tanh(x):
    """Hyperbolic tangent (one tanh.approx on the device)."""
    return torch.tanh(x)


@_lanewise
def erf(x):
    """Gauss error function."""
    return torch.erf(x)


@_lanewise
def sigmoid(x):
    """1 / (1 + e^-x); two MUFU (ex2 and rcp) on the device."""
    return torch.sigmoid(x)


@_lanewise
def sigmoid_approx(x):
    """sigmoid as 0.5 * tanh(x/2) + 0.5: one MUFU, absolute error about 2.4e-4."""
    return torch.sigmoid(x)


@_lanewise
def silu(x):
    """x * sigmoid(x)."""
    return torch.nn.functional.silu(x)


@_lanewise
def silu_approx(x):
    """x * sigmoid_approx(x): one MUFU instead of two."""
    return torch.nn.functional.silu(x)


@_lanewise
def gelu(x):
    """Exact GELU: x * (1 + erf(x / sqrt 2)) / 2."""
    # as the device computes it; PyTorch's own, vectorised in fp32, turns +inf into NaN
    return 0.5 * (x * torch.erf(x * INV_SQRT_2) + x)


@_lanewise
def gelu_tanh(x):
    """Tanh GELU: x/2 * (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    return torch.nn.functional.gelu(x, approximate="tanh")


@_lanewise
def relu(x):
    """max(x, 0); NaN stays NaN."""
    return torch.relu(x)


@_lanewise
def relu_sq(x):
    """relu(x)^2 (Primer)."""
    return torch.relu(x).square()


@_lanewise
def softplus(x):
    """log(1 + e^x)."""
    return torch.nn.functional.softplus(x, threshold=40.0)


# --- derivatives ----------------------------------------------------------------


@_lanewise
def dtanh(x):
    """1 - tanh(x)^2."""
    return 1.0 - torch.tanh(x).square()


@_lanewise
def dsigmoid(x):
    """s (1 - s)."""
    s = torch.sigmoid(x)
    return s * (1.0 - s)


@_lanewise
def dsilu(x):
    """s (1 + x (1 - s)) with s = sigmoid(x)."""
    s = torch.sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


@_lanewise
def dgelu(x):
    """Phi(x) + x phi(x) (exact GELU)."""
    return 0.5 * (1.0 + torch.erf(x * INV_SQRT_2)) + x * INV_SQRT_2PI * torch.exp(-0.5 * x * x)


@_lanewise
def dgelu_tanh(x):
    """Derivative of the tanh GELU."""
    t = torch.tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x))
    dz = SQRT_2_OVER_PI * (1.0 + 3.0 * GELU_CUBIC * x * x)
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * dz


@_lanewise
def drelu(x):
    """1 where x > 0, else 0."""
    return (x > 0).to(x.dtype)


@_lanewise
def drelu_sq(x):
    """2 relu(x)."""
    return 2.0 * torch.relu(x)


@_lanewise
def dsoftplus(x):
    """sigmoid(x)."""
    return torch.sigmoid(x)


# --- several arguments ------------------------------------------------------------


@_lanewise
def minimum(a, b):
    """Smaller of two values."""
    return torch.minimum(a, b)


@_lanewise
def maximum(a, b):
    """Larger of two values."""
    return torch.maximum(a, b)


@_lanewise
def fma(a, b, c):
    """a * b + c with one rounding."""
    product, c64 = a.double() * b.double(), c.double()  # the product of two fp32 is exact in fp64
    total = product + c64
    # rounding to fp64 and then to fp32 can round twice; round the fp64 sum to odd instead
    moved = total - product
    rest = (product - (total - moved)) + (c64 - moved)
    even = (total.view(torch.int64) & 1) == 0
    odd = torch.nextafter(total, torch.where(rest > 0, torch.inf, -torch.inf).to(total.dtype))
    return torch.where((rest != 0) & even & total.isfinite(), odd, total).to(a.dtype)


def where(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where ``condition`` holds, else ``b``; the condition is a comparison such as ``x > 0``."""
    if any(isinstance(v, Pair) for v in (condition, a, b)):
        c, x, y = Pair.lanes(condition), Pair.lanes(a), Pair.lanes(b)
        return Pair(where(c[0], x[0], y[0]), where(c[1], x[1], y[1]))
    if isinstance(condition, bool):
        return a if condition else b
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, *_tensors(a, b))
    return _device().where(condition, a, b)


def rotary_cos_sin(position: Any, freq: Pair) -> tuple:
    """(cos, sin) of the rotary angle, computed in the epilogue instead of read from a table.

    Args:
        position: fp32 token position, exact up to 2^24 (a ``ColVecLoad``).
        freq: pair ``(hi, lo)`` of the inverse frequency divided by 2*pi, split into
            two fp32 so that ``hi + lo`` carries about 48 bits (a ``RowVecLoad``).

    The angle is kept in turns: the product ``position * hi`` is rounded to fp32,
    its rounding error recovered exactly with one fma, and the whole part removed
    by rounding, which is exact. Only then is the small rest turned into radians.
    """
    hi, lo = freq
    turns = position * hi
    rest = fma(position, lo, fma(position, hi, -turns))
    if isinstance(turns, torch.Tensor):
        radians = ((turns - torch.round(turns)) + rest) * (2.0 * math.pi)
        return torch.cos(radians), torch.sin(radians)
    return _device().cos_sin_turns(turns, rest)


# --- escape hatch ---------------------------------------------------------------------


def primitive(*, cpu: Callable) -> Callable[[Callable], Callable]:
    """Define a new elementwise primitive in CuTeDSL inside a kernel file.

    The decorated function is device code on ``Float32`` values (use ``cute.math``
    and ``cute.arch``); ``cpu`` is its meaning on fp32 tensors, which the
    interpreter runs. Both act per element, so the worker that measures needs
    nothing beyond the compiled object.
    """

    def wrap(device: Callable) -> Callable:
        @functools.wraps(device)
        def call(*args: Any) -> Any:
            if any(isinstance(a, Pair) for a in args):
                lanes = [Pair.lanes(a) for a in args]
                return Pair(call(*(a for a, _ in lanes)), call(*(b for _, b in lanes)))
            if _tensor(*args):
                return cpu(*_tensors(*args))
            return device(*args)

        return call

    return wrap


def __getattr__(name: str) -> Any:
    """``from primitives import cute`` inside a kernel file, without a cost for CPU users."""
    if name == "cute":
        if "cutlass" not in sys.modules:
            from .device import arch  # noqa: F401  (pins sm_90a before CuTeDSL is imported)
        import cutlass.cute as cute

        return cute
    raise AttributeError(name)
