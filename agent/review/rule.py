"""Declared rules for accepting kernels without a person."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from generated.passport import Passport
from verifier.resources import COUNTED
from verifier.verdict import HarnessError

from .compare import used
from .recheck import Recheck
from .session import Card

RULES = Path(__file__).with_name("rules.yaml")


class Rule(BaseModel):
    """Conditions that must all hold; ``rules.yaml`` says what each means."""

    model_config = ConfigDict(extra="forbid")
    about: str = Field(min_length=1)
    status: Literal["measured"] | None = None
    verdicts: Literal["passed"] | None = None
    isolation: Literal["sandboxed"] | None = None
    evidence: Literal["reproduces"] | None = None
    at_least: dict[str, float] = {}
    at_most: dict[str, float] = {}

    @model_validator(mode="after")
    def _says_something(self) -> Rule:
        if not self.model_dump(exclude={"about"}, exclude_defaults=True):
            raise ValueError("a rule without conditions would accept everything")
        known = {"registers", "spills", "stack bytes", "shared bytes", "instructions", *COUNTED} - {"STL", "LDL"}
        if unknown := set(self.at_most) - known:
            raise ValueError(f"at_most knows no {sorted(unknown)}; it knows {sorted(known)}")
        return self


class _Rules(BaseModel):
    model_config = ConfigDict(extra="forbid")
    rules: dict[str, Rule]


@dataclass
class Condition:
    """One condition of a rule, with the numbers that decided it."""

    holds: bool
    says: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_rule(name: str, path: Path | None = None) -> Rule:
    """A rule by name.

    Raises:
        HarnessError: no such file or rule, or not a valid one.
    """
    path = path or RULES
    try:
        rules = _Rules.model_validate(yaml.safe_load(path.read_text())).rules
    except OSError as e:
        raise HarnessError(f"cannot read the rules {path}: {e.strerror}") from e
    except (yaml.YAMLError, ValidationError, UnicodeDecodeError) as e:
        first = "; ".join(str(e).splitlines()[:3])
        raise HarnessError(f"{path} holds no valid rules: {first}; {RULES} shows the form") from e
    if name not in rules:
        raise HarnessError(f"no rule {name!r} in {path}; it has: {', '.join(rules)}")
    return rules[name]


def judge(
    rule: Rule, card: Card, passport: Passport, recheck: Callable[[], Recheck]
) -> tuple[list[Condition], Recheck | None]:
    """Every condition of a rule; the recheck, which takes seconds, only where the others hold."""
    found: list[Condition] = [Condition(False, p) for p in card.problems]
    if rule.status:
        found.append(Condition(passport.status == "measured", passport.status_text))
    if rule.verdicts:
        stages = {v["stage"] for v in card.verdicts}
        failed = [f"{v['stage']}: {v['reason']}" for v in card.verdicts if not v["passed"]]
        complete = {"policy", "interpret", "compile", "resources"} <= stages
        said = "all verdicts passed" if complete else "the check is not complete in its passport"
        found.append(Condition(complete and not failed, "; ".join(failed) or said))
    if rule.isolation:
        found.append(Condition(card.isolation.startswith("bubblewrap"), f"isolation: {card.isolation or 'unknown'}"))
    found += [_at_least(rival, least, card) for rival, least in rule.at_least.items()]
    found += [_at_most(name, most, used(passport)) for name, most in rule.at_most.items()]
    done = None
    if rule.evidence and all(c.holds for c in found):
        done = recheck()
        found.append(
            Condition(done.reproduces, f"evidence reproduces (seed {done.seed})" if done.reproduces else done.says)
        )
    return found, done


def _at_least(rival: str, least: float, card: Card) -> Condition:
    if rival == "incumbent" and card.base["what"] != "incumbent":
        return Condition(True, "no incumbent")
    if not card.timings:
        return Condition(False, f"vs {rival}: nothing was timed")
    without = ["x".join(map(str, r["shape"])) for r in card.timings if rival not in r["versus"]]
    if without:
        return Condition(False, f"vs {rival}: not timed against it at {', '.join(without)}")
    worst = min((r["versus"][rival] for r in card.timings), key=lambda r: r["low"])
    text = f"vs {rival} at worst {worst['median']:.3f} [{worst['low']:.3f}, {worst['high']:.3f}]"
    return Condition(worst["low"] >= least, f"{text} (needs {least:g})")


def _at_most(name: str, most: float, resources: dict[str, int]) -> Condition:
    if not resources:
        return Condition(False, f"{name}: not recorded")
    return Condition(resources.get(name, 0) <= most, f"{name} {resources.get(name, 0)} (at most {most:g})")
