"""Keep secrets out of everything that is written: journals, passports, messages on the terminal."""

from __future__ import annotations

import os

_ENDINGS = ("_API_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
_SHORTEST = 8  # shorter values are switches such as "1", and would blank out ordinary text
MASK = "[secret]"


def secrets_here() -> list[str]:
    """Values of this process's environment that look like credentials, longest first."""
    found = {v for k, v in os.environ.items() if k.upper().endswith(_ENDINGS) and len(v) >= _SHORTEST}
    return sorted(found, key=len, reverse=True)


def redact(text: str) -> str:
    """``text`` with every credential of the environment masked.

    A second line of defence: nothing puts a key into these texts, but a provider's
    error message may quote it back.
    """
    for secret in secrets_here():
        text = text.replace(secret, MASK)
    return text
