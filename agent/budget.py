"""What a run may spend and what it has spent: dollars, tokens, minutes; attempts per conversation.

Limits are read before every call to a model, from the run's ``limits.json``, so they
can be raised while the run goes on (``coda-agent runs extend``).
"""

from __future__ import annotations

import functools
import json
import threading
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import yaml

from verifier.verdict import HarnessError

PRICES = Path(__file__).parent / "prices.yaml"
LEAST_OUTPUT = 1024  # tokens; with room for less, a call cannot end in a kernel
CHARS_PER_TOKEN = 3.5  # for estimates before the provider has counted


@dataclass(frozen=True)
class Usage:
    """Tokens of one or more calls, by what they cost."""

    input: int = 0  # read at full price
    output: int = 0  # includes thinking
    cache_write: int = 0
    cache_read: int = 0

    @property
    def total(self) -> int:
        return self.input + self.output + self.cache_write + self.cache_read

    @property
    def prompt(self) -> int:
        """Everything the model read."""
        return self.input + self.cache_write + self.cache_read

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Usage)))


@dataclass(frozen=True)
class Price:
    """US dollars per million tokens; ``long`` holds for prompts above ``over`` tokens."""

    input: float
    output: float
    cache_write: float
    cache_read: float
    over: int | None = None
    long: Price | None = None

    def dollars(self, usage: Usage) -> float:
        """Cost of one call."""
        if self.long and usage.prompt > (self.over or 0):
            return self.long.dollars(usage)
        rates = (
            ("input", self.input),
            ("output", self.output),
            ("cache_write", self.cache_write),
            ("cache_read", self.cache_read),
        )
        return sum(getattr(usage, name) * rate for name, rate in rates) / 1e6


@functools.lru_cache(maxsize=1)
def price_list() -> tuple[str, dict[str, Price]]:
    """``(date, model -> price)`` of the price file."""
    data = yaml.safe_load(PRICES.read_text())
    prices = {}
    for model, rates in data["models"].items():
        long = rates.pop("long", None)
        prices[model] = Price(**rates, long=Price(**long) if long else None)
    return str(data["as_of"]), prices


def price_of(model: str, given: str | None = None) -> Price | None:
    """Price of a model: ``given`` as ``IN,OUT`` in dollars per million tokens, else from the price file.

    Raises:
        HarnessError: ``given`` is not two numbers.
    """
    if given is None:
        return price_list()[1].get(model)
    try:
        read, write = (float(x) for x in given.split(","))
    except ValueError:
        raise HarnessError(f"--price {given!r}: give dollars per million tokens as IN,OUT, for example 4,20") from None
    return Price(read, write, read, read)  # no discount assumed for caching: never too low


@dataclass(frozen=True)
class Limits:
    """None: no limit. ``attempts`` counts check_kernel calls of one conversation, the others the whole run."""

    dollars: float | None = None
    tokens: int | None = None
    minutes: float | None = None
    attempts: int | None = None

    def raised(self, **given: float | int | None) -> Limits:
        """These limits with those that are given replaced."""
        return replace(self, **{k: v for k, v in given.items() if v is not None})


class Ledger:
    """The account of a run. Thread safe: conversations share it.

    Args:
        path: ``limits.json`` of the run; None keeps the limits in memory.
        earlier_seconds: active time of the run before it was resumed.
    """

    def __init__(self, limits: Limits, price: Price | None, path: Path | None = None, earlier_seconds: float = 0.0):
        self.price, self.path = price, path
        self._limits = limits
        self.used = Usage()
        self.dollars: float | None = 0.0 if price else None
        self._since = time.monotonic() - earlier_seconds
        self._lock = threading.Lock()
        self.stopped = threading.Event()  # Ctrl-C: conversations end before their next step
        if limits.dollars is not None and price is None:
            raise HarnessError("this model has no price in agent/prices.yaml, so a dollar budget cannot be kept; "
                               "give --price IN,OUT, or --tokens N with --dollars 0")  # fmt: skip
        if path and not path.exists():
            write_limits(path, limits)

    @property
    def limits(self) -> Limits:
        return read_limits(self.path) if self.path else self._limits

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    def charge(self, usage: Usage) -> float | None:
        """Enter one call; returns its dollars, None when the price is unknown."""
        with self._lock:
            self.used += usage
            if self.price is None:
                return None
            cost = self.price.dollars(usage)
            self.dollars += cost
            return cost

    def enter_earlier(self, usage: dict, dollars: float | None) -> None:
        """Enter a call from before a resume, at what it cost then."""
        with self._lock:
            self.used += Usage(**usage)
            if self.dollars is not None:
                self.dollars += self.price.dollars(Usage(**usage)) if dollars is None else dollars

    def exhausted(self, prompt_tokens: int) -> str | None:
        """Why the next call, which reads about ``prompt_tokens``, may not be made; None when it may."""
        limits = self.limits
        if limits.minutes is not None and self.seconds >= 60 * limits.minutes:
            return f"{self.seconds / 60:.1f} of {limits.minutes:g} minutes used"
        if self.room(prompt_tokens) >= LEAST_OUTPUT:
            return None
        if limits.tokens is not None and limits.tokens - self.used.total - prompt_tokens < LEAST_OUTPUT:
            return f"{self.used.total} of {limits.tokens} tokens used, the next call would pass the limit"
        return f"${self.dollars:.3f} of ${limits.dollars:g} used, the next call would pass the limit"

    def room(self, prompt_tokens: int) -> int:
        """Output tokens that the limits leave to a call that reads about ``prompt_tokens``."""
        limits, room = self.limits, 1 << 30
        if limits.tokens is not None:
            room = min(room, limits.tokens - self.used.total - prompt_tokens)
        if limits.dollars is not None and self.price:
            reading = self.price.dollars(Usage(cache_write=prompt_tokens))
            left = limits.dollars - self.dollars - reading
            room = min(room, int(left * 1e6 / (self.price.long or self.price).output))
        return room


def read_limits(path: Path) -> Limits:
    """Limits of a run from its ``limits.json``.

    Raises:
        HarnessError: the file is gone or not ours.
    """
    try:
        return Limits(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as e:
        raise HarnessError(f"cannot read the limits {path}: {e}") from e


def write_limits(path: Path, limits: Limits) -> None:
    """Replace ``limits.json`` in one step: a running conversation reads the old or the new one."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(asdict(limits)) + "\n")
    new.replace(path)
