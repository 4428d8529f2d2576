"""Device twins of ``primitives.maths``: the same names on ``Float32`` values in a trace.

``Float32`` pairs of SM100 (quack's F2) are handled by quack's own activations
where they exist; on SM90, the target we promise, every value is one ``Float32``.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack import activation

from ..maths import GELU_CUBIC, INV_SQRT_2, INV_SQRT_2PI, SQRT_2_OVER_PI

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
# Adding and subtracting 1.5 * 2^23 rounds |x| < 2^22 to the nearest integer on
# the FMA pipe; FRND would occupy the quarter-rate unit that sin and cos need.
ROUND_BIAS = 12582912.0

exp2 = lambda x: cute.math.exp2(x, fastmath=True)  # noqa: E731
sqrt = lambda x: cute.math.sqrt(x, fastmath=True)  # noqa: E731
rsqrt = lambda x: cute.math.rsqrt(x, fastmath=True)  # noqa: E731
tanh = activation.tanh
sigmoid = activation.sigmoid
sigmoid_approx = activation.sigmoid_tanh
silu_approx = activation.silu_tanh
gelu = activation.gelu_erf
gelu_tanh = activation.gelu_tanh_approx


def exp(x):
    return cute.math.exp(x, fastmath=True)


def log(x):
    return cute.math.log2(x, fastmath=True) * LN_2


def rcp(x):
    return cute.arch.rcp_approx(x)


def fabs(x):
    return cute.math.absf(x)


def erf(x):
    return cute.math.erf(x, fastmath=True)


def silu(x):
    return x * sigmoid(x)


def relu(x):
    return maximum(x, 0.0)


def relu_sq(x):
    return relu(x) * relu(x)


def softplus(x):
    # max(x, 0) + log(1 + e^-|x|): no overflow, so no threshold is needed
    return relu(x) + log(exp(-fabs(x)) + 1.0)


def dtanh(x):
    t = tanh(x)
    return t * (-t) + 1.0


def dsigmoid(x):
    s = sigmoid(x)
    return s - s * s


def dsilu(x):
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


def dgelu(x):
    cdf = erf(x * INV_SQRT_2) * 0.5 + 0.5
    return x * (exp2(x * x * (-0.5 * LOG2_E)) * INV_SQRT_2PI) + cdf


def dgelu_tanh(x):
    x2 = x * x
    t = tanh(x * (x2 * (SQRT_2_OVER_PI * GELU_CUBIC) + SQRT_2_OVER_PI))
    dz = x2 * (3.0 * SQRT_2_OVER_PI * GELU_CUBIC) + SQRT_2_OVER_PI
    return (t * 0.5 + 0.5) + (x * 0.5) * (t * (-t) + 1.0) * dz


def drelu(x):
    return where(x > 0.0, 1.0, 0.0)


def drelu_sq(x):
    return relu(x) * 2.0


def dsoftplus(x):
    return sigmoid(x)


# NaN goes through (FMNMX.NAN), as on tensors: the quiet forms, quack's relu among them, would
# turn it into the other operand and hide it from the next layer.


def minimum(a, b):
    return Float32(cute.arch.fmin(Float32(a), Float32(b), nan=True))


def maximum(a, b):
    return Float32(cute.arch.fmax(Float32(a), Float32(b), nan=True))


def fma(a, b, c):
    return cute.math.fma(Float32(a), Float32(b), Float32(c))


def where(condition, a, b):
    return Float32(cutlass.select_(condition, Float32(a), Float32(b)))


def cos_sin_turns(turns, rest):
    """(cos, sin) of ``turns + rest``, an angle in units of 2*pi."""
    whole = fma(turns, 1.0, ROUND_BIAS) - ROUND_BIAS
    radians = ((turns - whole) + rest) * (2.0 * math.pi)
    return cute.math.cos(radians, fastmath=True), cute.math.sin(radians, fastmath=True)
