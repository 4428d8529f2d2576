"""Authors: whoever answers a conversation about one task with calls of the harness's tools.

One protocol serves everybody: the built-in composer, models behind an API, and the
scripted author of the tests. The loop that drives them is ``conversation.converse``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from reference_kernels.tasks import Task
from verifier.verdict import HarnessError

from .budget import Usage
from .composer import compose
from .prompt import Prompt

TELL_EVERY = 2000  # characters of a reply between two messages of progress
Stop = Literal["done", "length", "refused"]


@dataclass(frozen=True)
class Call:
    """A tool call. ``problem`` says why it cannot be carried out (malformed or cut-off arguments)."""

    id: str
    name: str
    arguments: dict[str, Any]
    problem: str | None = None


@dataclass(frozen=True)
class Turn:
    """One answer of an author.

    ``raw`` is the provider's own form of it: it goes back unchanged with the next
    request (thinking blocks are signed), and stands in the journal.
    """

    raw: Any
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    stop: Stop = "done"
    usage: Usage = Usage()

    def entry(self) -> dict:
        """The turn as an entry of the history."""
        calls = [asdict(c) for c in self.calls]
        return {"role": "assistant", "raw": self.raw, "text": self.text, "calls": calls, "stop": self.stop}


@dataclass(frozen=True)
class Tool:
    """A tool as it is described to an author: a JSON schema of its arguments."""

    name: str
    description: str
    schema: dict[str, Any]


class Transient(Exception):
    """A call failed in a way that may pass: overload, rate limit, broken connection.

    Args:
        wait: seconds the provider asked to wait, if it did.
        usage: what the failed call cost all the same.
    """

    def __init__(self, reason: str, wait: float | None = None, usage: Usage = Usage()):
        self.reason, self.wait, self.usage = reason, wait, usage
        super().__init__(reason)


class Fatal(Exception):
    """A call failed and will fail again: bad key, unknown model, bad request."""


def retry_after(response: Any) -> float | None:
    """Seconds that a provider's response asks to wait."""
    try:
        return float(response.headers.get("retry-after"))
    except (TypeError, ValueError):
        return None


class Author(Protocol):
    """Answers the conversation of one task.

    ``model`` is None for an author that reads no prompt; it gets ``prompt=None``.
    The history is a list of entries: ``{"role": "user", "text"}``, ``{"role":
    "assistant", ...}`` as :meth:`Turn.entry` makes them, and ``{"role": "results",
    "results": [{"id", "text", "error"}]}``.
    """

    name: str
    model: str | None

    def reply(
        self,
        task: Task,
        prompt: Prompt | None,
        tools: list[Tool],
        history: list[dict],
        max_tokens: int,
        progress: Callable[[str], None],
    ) -> Turn:
        """The next turn.

        Raises:
            Transient: try again later.
            Fatal: trying again is useless.
        """
        ...


class Composer:
    """The built-in author: deterministic, no network, one kernel per task."""

    name = "composer"
    model = None

    def reply(self, task, prompt, tools, history, max_tokens, progress) -> Turn:
        """Check the composed kernel, then hand it in; raises CannotCompose when an op has no rule."""
        results = [e for e in history if e["role"] == "results"]
        if not results:
            call = Call("1", "check_kernel", {"source": compose(task)})
        else:
            call = Call(
                "2", "finish", {"give_up": results[-1]["results"][0]["error"], "note": "composed from the op list"}
            )
        return Turn(raw=None, calls=[call])


AUTHORS = ("composer", "claude", "openai")


def make_author(kind: str, model: str | None = None, thinking: str = "adaptive", effort: str | None = None) -> Author:
    """An author by its kind; models behind an API load their SDK here and not before.

    Raises:
        HarnessError: unknown kind, missing package or missing key; says what to do.
    """
    if kind == "composer":
        return Composer()
    if kind == "claude":
        from .claude import Claude

        return Claude(model, thinking=thinking, effort=effort)
    if kind == "openai":
        from .openai_compatible import OpenAICompatible

        return OpenAICompatible(model)
    raise HarnessError(f"no author {kind!r}; there is: {', '.join(AUTHORS)}")
