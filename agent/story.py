"""The story of a run, read from its journal: attempts, what failed, what changed, what it cost."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from .run import read_events


def summary(directory: Path) -> dict[str, Any]:
    """One line's worth about a run: who, what, how far, cost."""
    events = read_events(directory)
    start = next((e for e in events if e["event"] == "start"), {})
    ends = {e["task"]: e["outcome"]["ending"] for e in events if e["event"] == "task_end"}
    calls = [e for e in events if e["event"] == "call"]
    finished = bool(events) and events[-1]["event"] == "end"
    return {
        "run": directory.name,
        "author": start.get("author", "?"),
        "model": start.get("model"),
        "tasks": len(start.get("tasks", [])),
        "kept": sum(e == "kept" for e in ends.values()),
        "state": "finished" if finished else "unfinished",
        "tokens": sum(sum(e["usage"].values()) for e in calls),
        "dollars": _dollars(calls),
        "last": events[-1]["time"] if events else None,
    }


def _dollars(calls: list[dict]) -> float | None:
    return None if any(c["dollars"] is None for c in calls) else sum(c["dollars"] for c in calls)


def story(directory: Path) -> dict[str, Any]:
    """The whole run, conversation by conversation, ready to print or to dump."""
    events = read_events(directory)
    conversations: dict[tuple[str, int], list[dict]] = {}
    for e in events:
        if "sample" in e:
            conversations.setdefault((e["task"], e["sample"]), []).append(e)
    told = [_conversation(task, sample, found) for (task, sample), found in conversations.items()]
    outcomes = {e["task"]: e["outcome"] for e in events if e["event"] == "task_end"}
    return {**summary(directory), "conversations": told, "outcomes": outcomes}


def _conversation(task: str, sample: int, events: list[dict]) -> dict[str, Any]:
    attempts, source, before = [], "", ""
    for e in events:
        if e["event"] == "candidate":
            source = e["source"]
        elif e["event"] == "check":
            failed = next((v for v in e["verdicts"] if not v["passed"]), None)
            attempts.append(
                {
                    "attempt": e["attempt"],
                    "passed": e["passed"],
                    "reason": f"{failed['stage']}: {failed['reason']}" if failed else e["verdicts"][-1]["reason"],
                    "seconds": e["seconds"],
                    "source": source,
                    "diff": _diff(before, source) if before else None,
                }
            )
            before = source
        elif e["event"] == "measure" and attempts:
            attempts[-1]["measured"] = {"passed": e["passed"], "rows": e["rows"]}
    calls = [e for e in events if e["event"] == "call"]
    end = next((e for e in reversed(events) if e["event"] == "conversation_end"), None)
    prompt = next((e for e in events if e["event"] == "prompt"), {})
    return {
        "task": task,
        "sample": sample,
        "prompt_sha256": prompt.get("sha256"),
        "attempts": attempts,
        "calls": len(calls),
        "failed_calls": [c["failed"] for c in calls if c["failed"]],
        "tokens": sum(sum(c["usage"].values()) for c in calls),
        "dollars": _dollars(calls),
        "ending": end["ending"] if end else None,
        "reason": end["reason"] if end else "not ended",
    }


def _diff(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="", n=1)
    return "\n".join(list(lines)[2:])


def as_text(told: dict[str, Any]) -> str:
    """A story for a terminal or a file."""
    who = told["model"] or told["author"]
    lines = [f"run {told['run']} by {who}: {told['kept']} of {told['tasks']} tasks kept, {told['state']}{_cost(told)}"]
    for c in told["conversations"]:
        lines += [
            "",
            f"{c['task']}, conversation {c['sample']}: {c['ending'] or 'unfinished'} - {c['reason']}{_cost(c)}",
        ]
        lines += [f"  call failed and was repeated: {reason}" for reason in c["failed_calls"]]
        for a in c["attempts"]:
            lines.append(
                f"  attempt {a['attempt']} {'passed' if a['passed'] else 'FAILED'} ({a['seconds']:.1f} s): {a['reason']}"
            )
            text = a["source"] if a["diff"] is None else a["diff"]
            lines += [f"    {line}" for line in text.splitlines()]
            for row in a.get("measured", {}).get("rows", ()):
                lines.append(
                    f"    measured {'x'.join(map(str, row['shape']))}: {row['total_us']:.1f} us, tax {row['tax_us']:+.1f} us"
                )
    return "\n".join(lines)


def _cost(part: dict[str, Any]) -> str:
    if not part["tokens"]:
        return ""
    dollars = f", ${part['dollars']:.3f}" if part["dollars"] is not None else ""
    return f" ({part['tokens']} tokens{dollars})"
