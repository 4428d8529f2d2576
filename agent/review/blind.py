"""Blind review: names that give nothing away, and a mask over every text that may name an author."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any

from generated.library import Library
from generated.passport import Passport

HIDDEN = "[hidden]"
# written into docstrings by whoever they are; with what follows, such as a version
_FAMILIES = "claude|anthropic|composer|openai|chatgpt|gpt|gemini|llama|deepseek|qwen|mistral|copilot"


def alias(task: str, kernel: str) -> str:
    """``gemm_rope#3f9a1c``: the same in every call, and says nothing about the author or the text."""
    return f"{task}#{hashlib.sha256(f'{task}/{kernel}'.encode()).hexdigest()[:6]}"


class Mask:
    """Replaces kernel ids by aliases and authors by ``[hidden]``, in any text or JSON value."""

    def __init__(self, library: Library, passports: list[Passport]):
        files = {(p.parent.name, p.stem) for p in library.root.glob("*/*.json")}  # corrupt passports have names, too
        known = {(p.task, p.kernel) for p in passports} | files
        self._aliases = {kernel: alias(task, kernel) for task, kernel in known}
        self._aliases |= {f"{task}/{kernel}": alias(task, kernel) for task, kernel in known}
        names = set()
        for p in passports:
            kind, _, name = p.author.partition(":")
            if kind != "expert":  # a baseline that everybody is compared with
                names |= {p.author, name, p.model or "", p.run or "", kind if kind != "human" else ""}
        self._ids = _any_of(self._aliases)
        self._names = _any_of(names, re.I)
        self._families = re.compile(rf"(?<![^\W_])(?:{_FAMILIES})[\w.:-]*", re.I)

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str):
            value = self._ids.sub(lambda m: self._aliases[m.group(0)], value)
            return self._families.sub(HIDDEN, self._names.sub(HIDDEN, value))
        if isinstance(value, dict):
            return {self(k): self(v) for k, v in value.items()}
        return [self(v) for v in value] if isinstance(value, (list, tuple)) else value


def _any_of(terms: Iterable[str], flags: int = 0) -> re.Pattern:
    """Any of the terms as whole words, where an underscore parts words; the longest wins."""
    words = "|".join(re.escape(t) for t in sorted(terms, key=len, reverse=True) if t) or "(?!)"
    return re.compile(rf"(?<![^\W_])(?:{words})(?![^\W_])", flags)
