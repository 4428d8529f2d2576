"""Authors: whoever turns a task into the text of a kernel file."""

from __future__ import annotations

from typing import Protocol

from reference_kernels.tasks import Task

from .composer import compose


class Author(Protocol):
    """Writes candidates for one task, one attempt at a time."""

    name: str

    def write(self, task: Task, attempt: int, feedback: str | None) -> str | None:
        """Source of the next candidate, or None to give up.

        ``feedback`` is the reason the last candidate failed.
        """
        ...


class Composer:
    """The built-in author; deterministic, so it has one attempt."""

    name = "composer"

    def write(self, task: Task, attempt: int, feedback: str | None) -> str | None:
        """Compose the op list; raises CannotCompose when an op has no rule."""
        return compose(task) if attempt == 1 else None


AUTHORS = {"composer": Composer}
