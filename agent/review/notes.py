"""What reviewers said, for those who write next: open requests for changes, and kernels that must not be shown."""

from __future__ import annotations

from dataclasses import dataclass

from agent.redact import redact
from generated.library import Library, LibraryError

DEAF = "composer"  # built in and deterministic: it reads no notes


@dataclass(frozen=True)
class ChangeRequest:
    """A kernel that a reviewer sent back, with the note."""

    kernel: str
    source: str
    note: str


def open_requests(library: Library, task: str, author: str | None = None) -> list[ChangeRequest]:
    """Open requests for changes to kernels of a task, oldest first.

    Args:
        author: only to kernels of this kind of author (``claude:MODEL``: any Claude). The
            composer's are never told: they are the answer that other authors must find.
    """
    found = []
    for p in library.scan()[0]:
        kind = p.author.partition(":")[0]
        wanted = kind != DEAF and (author is None or kind == author.partition(":")[0])
        if p.task == task and p.state == "changes requested" and wanted:
            try:
                found.append((p.standing[-1].at, ChangeRequest(p.kernel, library.source(p), redact(p.review))))
            except LibraryError:
                continue  # its text is not the one the note is about
    return [request for _, request in sorted(found, key=lambda pair: pair[0])]


def withdrawn(library: Library) -> frozenset[str]:
    """Source hashes of kernels that a reviewer does not stand behind: never an example for anybody."""
    held = {p.source_sha256 for p in library.scan()[0] if p.state in ("rejected", "retired", "changes requested")}
    return frozenset(held)
