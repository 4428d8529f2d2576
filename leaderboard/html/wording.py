"""How numbers, verdicts and receipts are written in the report."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable

from markupsafe import Markup, escape
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from verifier.measure import MIN_EFFECT

from ..records import Interval, Record

# NVML's clock event reasons (nvml.h)
THROTTLE = {
    0x1: "idle", 0x2: "application clocks", 0x4: "power cap (software)", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "thermal (software)", 0x40: "thermal (hardware)", 0x80: "power brake (hardware)", 0x100: "display clocks",
}  # fmt: skip
VERDICTS = ("faster", "level", "slower", "unclear", "same code")
GLYPHS = {"faster": "▲", "level": "●", "slower": "▼", "unclear": "◇", "same code": "="}


def verdict(ratio: Interval) -> str:
    """Faster or slower only beyond the minimum effect; level only when the whole interval is within it."""
    if ratio.low > MIN_EFFECT:
        return "faster"
    if ratio.high < 1 / MIN_EFFECT:
        return "slower"
    return "level" if 1 / MIN_EFFECT <= ratio.low and ratio.high <= MIN_EFFECT else "unclear"


def number(value: float, digits: int = 1, sign: bool = False) -> str:
    """``-3.25`` as ``−3.2``, with thin spaces between thousands; never a negative zero."""
    value = round(value, digits) + 0.0
    plain = f"{value:{'+' if sign and value else ''},.{digits}f}"
    return plain.replace("-", "−").replace(",", "\N{NARROW NO-BREAK SPACE}")


def percent(value: float, digits: int = 0, sign: bool = False) -> str:
    return f"{number(100 * value, digits, sign)}\N{NARROW NO-BREAK SPACE}%"


def times(value: float) -> str:
    return number(value, 3)


def interval(ratio: Interval) -> str:
    """The 95 % interval of a ratio."""
    return f"{times(ratio.low)} – {times(ratio.high)}"


def size(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape))


def throttle(reading: str | None) -> str:
    """``0x4`` as what NVML means by it."""
    if reading is None:
        return "not read"
    try:
        bits = int(reading, 16)
    except ValueError:
        return reading
    named = [text for bit, text in THROTTLE.items() if bits & bit]
    rest = bits & ~sum(THROTTLE)
    return ", ".join([*named, *([hex(rest)] if rest else [])]) or "none"


def slug(text: str) -> str:
    """A name for files and anchors; texts that would change get a piece of their hash, so that no two share one."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")
    return plain if plain == text != "" else f"{plain[:60] or 'x'}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def anchor(record: Record) -> str:
    """The record's id on its session's evidence page."""
    return slug("_".join((record.task, record.kernel, "x".join(map(str, record.shape)))))


def evidence_page(session: str) -> str:
    return f"evidence/{slug(session)}.html"


def lines_of(data: dict) -> Markup:
    """JSON with one field per line: complete, and still readable."""
    fields = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in data.items())
    # quotes stay as they are: this is text between tags, and escaped ones would be a third of it
    return Markup(f"{{\n{fields}\n}}".replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def breakable(text: str) -> Markup:
    """A name that may be broken after underscores, signs of multiplication and colons."""
    return Markup(re.sub("([_×:])", r"\1<wbr>", str(escape(text))))


def source(text: str) -> Markup:
    return Markup(highlight(text, PythonLexer(), HtmlFormatter(cssclass="source", wrapcode=True)))
