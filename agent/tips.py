"""The tips log: what authors of this stack should know, with evidence, a state and sometimes a probe.

``tips_log.md`` is Markdown for people; each tip is a ``##`` section with fields, and may
end in a Python block, the probe: it runs in another process and fails when the claim
does not hold. Only active tips reach a prompt. A tip that a model proposes stays
proposed until a person accepts it, and never carries code.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock

from verifier.sandbox import ROOT
from verifier.verdict import HarnessError

LOG = Path(__file__).parent / "tips_log.md"
STATES = ("proposed", "active", "retired")
PROBE_SECONDS = 60  # per probe, on average
LONGEST = 400  # characters of a claim or of evidence
_SECTION = re.compile(r"^## (T\d+)\s*$", re.M)
_FIELD = re.compile(r"^\* (\w+): (.*(?:\n  .*)*)", re.M)
_PROBE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


@dataclass(frozen=True)
class Tip:
    """One claim; ``toolchain`` names the versions it was seen to hold for."""

    id: str
    state: str
    claim: str
    evidence: str
    toolchain: str
    probe: str | None = None

    def text(self) -> str:
        """The tip as a section of the log."""
        lines = [f"## {self.id}", "", f"* state: {self.state}", f"* claim: {self.claim}",
                 f"* evidence: {self.evidence}", f"* toolchain: {self.toolchain}"]  # fmt: skip
        if self.probe:
            lines += ["", "```python", self.probe.rstrip(), "```"]
        return "\n".join(lines) + "\n"


def read_tips(path: Path = LOG) -> list[Tip]:
    """Every tip of the log, in its order.

    Raises:
        HarnessError: a section lacks a field, an id stands twice, or a state is unknown.
    """
    parts = _SECTION.split(_text(path))[1:]
    tips = []
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        fields = {k: " ".join(v.split()) for k, v in _FIELD.findall(body)}
        missing = {"state", "claim", "evidence", "toolchain"} - set(fields)
        if missing or fields["state"] not in STATES or name in {t.id for t in tips}:
            what = f"lacks {sorted(missing)}" if missing else "has an unknown state or stands twice"
            raise HarnessError(f"{path}: tip {name} {what}")
        probe = _PROBE.search(body)
        tips.append(
            Tip(
                name,
                fields["state"],
                fields["claim"],
                fields["evidence"],
                fields["toolchain"],
                probe and probe.group(1),
            )
        )
    return tips


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as e:
        raise HarnessError(f"cannot read the tips log {path}: {e.strerror}") from e


def active_tips(path: Path = LOG) -> list[Tip]:
    """The tips that go into prompts."""
    return [t for t in read_tips(path) if t.state == "active"]


def find_tip(name: str, path: Path = LOG) -> Tip:
    """A tip by id.

    Raises:
        HarnessError: there is none.
    """
    tips = read_tips(path)
    found = next((t for t in tips if t.id == name.upper()), None)
    if found is None:
        raise HarnessError(
            f"no tip {name!r} in {path}; it has {tips[0].id} to {tips[-1].id}" if tips else f"{path} has no tips"
        )
    return found


def add_tip(claim: str, evidence: str, toolchain: str, path: Path = LOG, state: str = "proposed") -> Tip:
    """Append a tip.

    Raises:
        HarnessError: empty or overlong text, or the log cannot be written.
    """
    claim, evidence = " ".join(claim.split()), " ".join(evidence.split())
    for what, text in (("claim", claim), ("evidence", evidence)):
        if not text or len(text) > LONGEST:
            raise HarnessError(f"the {what} of a tip has 1 to {LONGEST} characters, this one {len(text)}")
    with _locked(path):
        number = max((int(t.id[1:]) for t in read_tips(path)), default=0) + 1
        tip = Tip(f"T{number:02d}", state, claim, evidence, toolchain)
        _write(path, f"{_text(path).rstrip()}\n\n{tip.text()}")
    return tip


def set_state(name: str, state: str, path: Path = LOG) -> Tip:
    """Move a tip to another state; its text is otherwise untouched."""
    with _locked(path):
        tip, text = find_tip(name, path), _text(path)
        at = re.search(rf"^## {tip.id}\s*$", text, re.M).end()
        body = re.sub(r"^\* state: .*$", f"* state: {state}", text[at:], count=1, flags=re.M)
        _write(path, text[:at] + body)
    return replace(tip, state=state)


def _locked(path: Path) -> FileLock:
    return FileLock(path.with_suffix(".lock"), timeout=30)


def _write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    try:
        new.write_text(text)
        os.replace(new, path)
    except OSError as e:
        raise HarnessError(f"cannot write the tips log {path}: {e.strerror}") from e


def probe_tips(tips: list[Tip]) -> dict[str, str | None]:
    """Run the probes of ``tips`` in a fresh process without the caller's environment.

    Returns:
        id -> None when the probe passes, else what it said; a probe that ends the
        process takes the rest with it, and they say so.
    """
    chosen = [t for t in tips if t.probe is not None]
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(ROOT), "HOME": os.environ.get("HOME", "/")}
    with tempfile.TemporaryDirectory(prefix="coda-agent-probe-") as folder:
        files = {t.id: Path(folder) / f"{t.id}.py" for t in chosen}
        for tip in chosen:
            files[tip.id].write_text(tip.probe)
        command = [sys.executable, "-W", "ignore", "-m", "agent.probe", *map(str, files.values())]
        with (Path(folder) / "errors").open("w+") as errors:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=folder
            )
            try:
                said, _ = process.communicate(timeout=PROBE_SECONDS * max(1, len(chosen)))
                end = f"the probing process ended with status {process.returncode}"
            except subprocess.TimeoutExpired:
                process.kill()
                said, _ = process.communicate()
                end = "no end in time"
    answers = {Path(a["file"]).stem: a["failed"] for a in map(json.loads, said.splitlines())}
    return {t.id: answers.get(t.id, end) for t in chosen}
