"""primitives.MATHS on CPU fp32 against fp64 formulas, and the arithmetic of pairs."""

import math
import operator
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import primitives
from primitives import Pair, fma, maximum, minimum, pack, primitive, relu, relu_sq, rotary_cos_sin, unpack, where

TINY = 1e-30  # below this fp32 loses relative accuracy on its way to the subnormals


def gelu_tanh64(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


# name: fp64 formula, range of x, relative and absolute error allowed in fp32
UNARY = {
    "exp": (lambda x: math.e**x, (-80, 80), 3e-7, 0),
    "exp2": (lambda x: 2.0**x, (-120, 120), 3e-7, 0),
    "log": (lambda x: torch.log2(x) * math.log(2.0), (2.0**-90, 2.0**90), 3e-7, TINY),
    "sqrt": (lambda x: x**0.5, (0, 2.0**100), 3e-7, TINY),
    "rsqrt": (lambda x: x**-0.5, (2.0**-90, 2.0**90), 3e-7, 0),
    "rcp": (lambda x: x**-1.0, (2.0**-90, 2.0**90), 3e-7, 0),
    "fabs": (lambda x: torch.where(x < 0, -x, x), (-1e6, 1e6), 0, 0),
    "tanh": (lambda x: torch.expm1(2 * x) / (torch.exp(2 * x) + 1), (-40, 40), 5e-7, TINY),
    "erf": (lambda x: 1.0 - torch.erfc(x), (-6, 6), 5e-7, 1e-15),
    "sigmoid": (lambda x: 1.0 / (1.0 + torch.exp(-x)), (-80, 80), 5e-7, TINY),
    "sigmoid_approx": (lambda x: 1.0 / (1.0 + torch.exp(-x)), (-80, 80), 5e-7, TINY),
    "silu": (lambda x: x / (1.0 + torch.exp(-x)), (-80, 80), 5e-7, TINY),
    "silu_approx": (lambda x: x / (1.0 + torch.exp(-x)), (-80, 80), 5e-7, TINY),
    "gelu": (lambda x: 0.5 * x * torch.erfc(-x / math.sqrt(2.0)), (-40, 40), 5e-7, 5e-7),
    "gelu_tanh": (gelu_tanh64, (-40, 40), 5e-7, 5e-7),
    "relu": (lambda x: torch.where(x > 0, x, 0.0), (-1e6, 1e6), 0, 0),
    "relu_sq": (lambda x: torch.where(x > 0, x * x, 0.0), (-1e6, 1e6), 3e-7, TINY),
    "softplus": (lambda x: torch.logaddexp(x, torch.zeros_like(x)), (-80, 200), 5e-7, TINY),
}
DERIVATIVES = [n for n in primitives.MATHS if n.startswith("d")]
SEVERAL = {"minimum", "maximum", "fma", "where", "rotary_cos_sin"}


def f32(lo, hi):
    return st.floats(float(np.float32(lo)), float(np.float32(hi)), width=32)


def f32_tensors(lo, hi):
    edges = [lo, hi] + ([0.0, 1.0, -1.0] if lo < 0 else [1.0])
    return st.lists(f32(lo, hi), min_size=1, max_size=64).map(lambda v: torch.tensor(v + edges))


def assert_close(got, want, rtol, atol):
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


def test_every_function_has_a_truth_here():
    assert set(UNARY) | set(DERIVATIVES) | SEVERAL == set(primitives.MATHS)
    assert {n[1:] for n in DERIVATIVES} <= set(UNARY)


@pytest.mark.parametrize("name", UNARY)
def test_unary_matches_fp64(name):
    formula, (lo, hi), rtol, atol = UNARY[name]

    @given(f32_tensors(lo, hi))
    def check(x):
        assert_close(getattr(primitives, name)(x), formula(x.double()), rtol, atol)

    check()


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivative_matches_autograd(name):
    formula = UNARY[name[1:]][0]

    @given(f32_tensors(-40, 40))
    def check(x):
        x64 = x.double().requires_grad_()
        (slope,) = torch.autograd.grad(formula(x64).sum(), x64)
        assert_close(getattr(primitives, name)(x), slope, 5e-7, 1e-6)

    check()


@pytest.mark.parametrize(
    "name, below, above",
    [("dtanh", 0, 0), ("dsigmoid", 0, 0), ("dsilu", 0, 1), ("dgelu", 0, 1), ("dgelu_tanh", 0, 1),
     ("drelu", 0, 1), ("drelu_sq", 0, 2e4), ("dsoftplus", 0, 1), ("softplus", 0, 1e4), ("gelu", 0, 1e4),
     ("gelu_tanh", 0, 1e4), ("silu", 0, 1e4), ("sigmoid", 0, 1), ("tanh", -1, 1)],
)  # fmt: skip
def test_saturates_without_nan(name, below, above):
    got = getattr(primitives, name)(torch.tensor([-1e4, 1e4]))
    assert got.tolist() == [below, above]


def test_relu_on_specials():
    x = torch.tensor([-math.inf, math.nan, math.inf, -1.0])
    want = torch.tensor([0.0, math.nan, math.inf, 0.0])  # NaN must not hide, here or on the device
    torch.testing.assert_close(relu(x), want, equal_nan=True)
    torch.testing.assert_close(relu_sq(x), want, equal_nan=True)


def test_gelu_forms_differ_most_near_2_7():
    x = torch.linspace(-6, 6, 120001, dtype=torch.float64)
    gap = (primitives.gelu(x) - primitives.gelu_tanh(x)).abs()
    assert 4.6e-4 < gap.max() <= 4.8e-4
    assert abs(x[gap.argmax()].abs() - 2.70) < 0.03


@given(f32_tensors(-1e6, 1e6), f32(-1e6, 1e6))
def test_minimum_maximum(a, b):
    b_all = torch.full_like(a, b)
    low, high = torch.where(a < b_all, a, b_all), torch.where(a < b_all, b_all, a)
    assert torch.equal(minimum(a, b_all), low) and torch.equal(maximum(a, b_all), high)
    assert torch.equal(minimum(b, a), low) and torch.equal(maximum(a, b), high)


def nearest_f32(exact: Fraction) -> float:
    guess = np.float32(float(exact))
    near = [guess, np.nextafter(guess, np.float32(-np.inf)), np.nextafter(guess, np.float32(np.inf))]
    return float(min(near, key=lambda c: (abs(Fraction(float(c)) - exact), int(c.view(np.uint32)) & 1)))


@given(f32(-1e6, 1e6), f32(-1e6, 1e6), f32(-1e6, 1e6))
def test_fma_rounds_once(a, b, c):
    got = fma(torch.tensor(a), torch.tensor(b), torch.tensor(c)).item()
    assert got == nearest_f32(Fraction(a) * Fraction(b) + Fraction(c))


@pytest.mark.parametrize(
    "c, want",
    [
        (-(1 + 2.0**-11), 2.0**-24),  # the rounding error of a * b, lost by a separate add
        (2.0**-80, 1 + 2.0**-11 + 2.0**-23),  # just above a tie: rounding to fp64 first loses the 2^-80
        (-(2.0**-80), 1 + 2.0**-11),
    ],
    ids=["cancel", "above", "below"],
)
def test_fma_near_a_tie(c, want):
    a = torch.tensor(1 + 2.0**-12)
    assert nearest_f32(Fraction(1 + 2.0**-12) ** 2 + Fraction(c)) == want
    assert fma(a, a, torch.tensor(c)).item() == want


def test_where_selects_per_element():
    x = torch.tensor([-2.0, -0.0, 0.5, 3.0])
    assert where(x > 0, x, 0.1 * x).tolist() == pytest.approx([-0.2, 0.0, 0.5, 3.0])
    assert where(x > 0, 1.0, -1.0).tolist() == [-1, -1, 1, 1]
    assert where(True, 2.0, x) == 2.0 and where(False, 2.0, x) is x
    lanes = where(x > 0, Pair(x, -x), Pair(0.0 * x, x))
    assert lanes[0].tolist() == [0, 0, 0.5, 3] and lanes[1].tolist() == [-2, 0, -0.5, -3]


def test_where_takes_a_comparison_of_pairs():
    x, y = torch.tensor([-2.0, 3.0]), torch.tensor([5.0, -7.0])
    got = where(Pair(x, y) > 0.0, Pair(x, y), 0.0)
    assert got[0].tolist() == [0, 3] and got[1].tolist() == [5, 0]


CONSTANTS = {
    "fma-first": (lambda x: fma(0.1, x, x), [-1.1 / 3, 1.1 / 3, 2.2 / 3]),
    "fma-rest": (lambda x: fma(x, 0.1, 0.3), [0.8 / 3, 1 / 3, 1.1 / 3]),
    "maximum": (lambda x: maximum(x, 0.1), [0.1, 1 / 3, 2 / 3]),
    "minimum": (lambda x: minimum(0.1, x), [-1 / 3, 0.1, 0.1]),
    "where-one": (lambda x: where(x > 0, x, 0.1), [0.1, 1 / 3, 2 / 3]),
}


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1.5e-7), (torch.float64, 1e-15)], ids=["fp32", "fp64"])
@pytest.mark.parametrize("call, want", CONSTANTS.values(), ids=CONSTANTS)
def test_constants_take_the_dtype_of_the_computation(call, want, dtype, rtol):
    """fp32 stays fp32 as on the device; interpret(compute=float64) rounds nothing to fp32."""
    got = call(torch.tensor([-1 / 3, 1 / 3, 2 / 3], dtype=torch.float64).to(dtype))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), rtol=rtol, atol=0)


def test_where_of_two_constants_is_fp32():
    assert where(torch.tensor([-1.0, 1.0]) > 0, 0.1, -0.3).dtype == torch.float32


# --- rotary -------------------------------------------------------------------


def turns_hi_lo(inv_freq):
    turns = inv_freq / (2.0 * math.pi)
    hi = turns.float()
    return Pair(hi, (turns - hi.double()).float())


INV_FREQ = 500000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)


@given(st.lists(st.integers(0, 2**24 - 1), min_size=1, max_size=50))
def test_rotary_matches_fp64_angles(drawn):
    position = torch.tensor(drawn + [0, 1, 131071, 2**23 + 1, 2**24 - 2, 2**24 - 1]).float()[:, None]
    cos, sin = rotary_cos_sin(position, turns_hi_lo(INV_FREQ[None]))
    angle = position.double() * INV_FREQ
    assert cos.dtype == sin.dtype == torch.float32
    assert (cos.double() - angle.cos()).abs().max() < 2e-6
    assert (sin.double() - angle.sin()).abs().max() < 2e-6


def test_rotary_is_hard_without_the_split():
    position = torch.arange(2**24 - 4096, 2**24).float()[:, None]
    naive = (position * INV_FREQ.float()).cos().double()
    assert (naive - (position.double() * INV_FREQ).cos()).abs().max() > 0.1


def test_rotary_known_angles():
    quarter = Pair(torch.tensor([0.25]), torch.tensor([0.0]))
    cos, sin = rotary_cos_sin(torch.tensor([[0.0], [1.0], [2.0], [3.0], [16777213.0]]), quarter)
    torch.testing.assert_close(cos[:, 0], torch.tensor([1.0, 0, -1, 0, 0]), rtol=0, atol=3e-7)
    torch.testing.assert_close(sin[:, 0], torch.tensor([0.0, 1, 0, -1, 1]), rtol=0, atol=3e-7)


# --- pairs --------------------------------------------------------------------


@pytest.mark.parametrize("name", [*UNARY, *DERIVATIVES])
def test_unary_acts_on_each_lane(name):
    f = getattr(primitives, name)
    a, b = torch.tensor([0.5, 2.0, 9.0]), torch.tensor([1.5, 0.25, 30.0])
    a = -a if name == "drelu" else a
    got = f(Pair(a, b))
    assert isinstance(got, Pair)
    assert torch.equal(got[0], f(a)) and torch.equal(got[1], f(b)) and not torch.equal(got[0], got[1])


def test_several_arguments_mix_pairs_and_singles():
    p, x = Pair(torch.tensor([1.0, 8.0]), torch.tensor([4.0, 2.0])), torch.tensor([3.0, 3.0])
    low, high, mad = minimum(p, x), maximum(3.0, p), fma(p, x, 0.5)
    assert [t.tolist() for t in low] == [[1, 3], [3, 2]]
    assert [t.tolist() for t in high] == [[3, 8], [4, 3]]
    assert [t.tolist() for t in mad] == [[3.5, 24.5], [12.5, 6.5]]
    assert all(isinstance(v, Pair) for v in (low, high, mad))


OPERATORS = [getattr(operator, name) for name in "add sub mul truediv lt le gt ge".split()]


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
@pytest.mark.parametrize(
    "other", [Pair(torch.tensor([[4.0, 5.0]]), torch.tensor([[0.5, 8.0]])), 3.0, torch.tensor([[2.0], [4.0]])],
    ids=["pair", "number", "column"],
)  # fmt: skip
def test_pair_arithmetic(op, other):
    p = Pair(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[-6.0, 7.0], [0.25, 1.0]]))
    o = other if isinstance(other, Pair) else (other, other)
    for got, lanes in ((op(p, other), zip(p, o)), (op(other, p), zip(o, p))):
        assert isinstance(got, Pair)
        for value, (left, right) in zip(got, lanes):
            want = op(torch.as_tensor(left).double(), torch.as_tensor(right).double())
            torch.testing.assert_close(value.double(), want.double(), rtol=1e-6, atol=0)


def test_pack_negate_unpack():
    a, b = unpack(-pack(1.0, -2.0))
    assert (a, b) == (-1.0, 2.0)
    with pytest.raises(TypeError, match="pairs='acc'"):
        unpack(torch.ones(2))
    with pytest.raises(TypeError, match="pairs='tile'"):
        unpack((1.0, 2.0))


def test_numbers_outside_a_trace():
    assert primitives.sigmoid(0) == 0.5
    assert primitives.silu(1.0) == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-15)
    assert fma(2, 3.0, 1) == 7 and maximum(0.1, 0.2) == 0.2


def test_own_primitive_has_its_cpu_meaning():
    @primitive(cpu=lambda x, y: x * x - y)
    def square_minus(x, y):
        raise AssertionError("device code ran on CPU tensors")

    assert square_minus(torch.tensor([3.0]), 1.0).tolist() == [8.0]
    assert [t.item() for t in square_minus(Pair(torch.tensor(2.0), torch.tensor(5.0)), 1.0)] == [3.0, 24.0]


def test_vocabulary_is_importable_and_closed():
    for name in primitives.VOCABULARY - {"cute"}:
        assert callable(getattr(primitives, name))
    with pytest.raises(AttributeError, match="softmax"):
        primitives.softmax
