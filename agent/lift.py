"""Does a tip help? The same tasks, the same author, once with the tip in the prompt and once without."""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from reference_kernels.tasks import Suite
from verifier.pool import Pool

from . import tips
from .authors import Author
from .budget import Ledger, Limits, price_of
from .conversation import Conversation, Ending
from .generate import Progress
from .prompt import render
from .run import Run
from .tools import Desk

# One task of each kind of epilogue: pairs, tile pairs, reductions along N and along M, stateful.
FROZEN = (
    "gemm_rmsnorm_swiglu",
    "gemm_swiglu_bwd",
    "gemm_residual_rmsnorm",
    "gemm_residual_rmsnorm_bwd",
    "gemm_cross_entropy",
)
ATTEMPTS = 4


def lift(
    name: str, author: Author, suite: Suite, pool: Pool, runs: Path, progress: Progress, tasks: list[str] | None = None,
    samples: int = 1, dollars: float | None = None, tokens: int | None = None, price: str | None = None, path: Path = tips.LOG,
) -> dict[str, Any]:  # fmt: skip
    """Replay the tasks on both sides; nothing enters the library.

    Returns:
        For each side: conversations, accepted, first_try, mean attempts, mean tokens.
    """
    tip = tips.find_tip(name, path)
    others = [t for t in tips.active_tips(path) if t.id != tip.id]
    chosen = [suite[t] for t in tasks or FROZEN]
    run = Run.start(runs, tasks=[t.name for t in chosen], author=author.name, model=author.model, lift=tip.id)
    ledger = Ledger(
        Limits(dollars, tokens, None, ATTEMPTS), price_of(author.model, price) if author.model else None, run.limits
    )
    sides: dict[str, list[Ending]] = {"without": [], "with": []}
    try:
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder) / "tips_log.md"  # what is proposed during the comparison is in the journal only
            scratch.write_text(path.read_text())
            for task in chosen:
                for side, shown in (("without", others), ("with", [*others, tip])):
                    prompt = render(task, suite, tools=True, attempts=ATTEMPTS, tips=shown) if author.model else None
                    for sample in range(1, samples + 1):
                        log = partial(run.log, task=task.name, sample=sample if side == "with" else -sample, side=side)
                        say = partial(progress, f"{task.name} {side}")
                        desk = Desk(
                            task, suite, pool, author.name, log, say, lambda: ledger.limits.attempts, tips_log=scratch
                        )
                        sides[side].append(Conversation(author, prompt, desk, ledger, log).run())
                        run.log("lift", task=task.name, side=side, **sides[side][-1].as_dict())
    finally:
        run.close()
    return {"tip": tip.id, "author": author.name, "run": run.id, **{side: _figures(e) for side, e in sides.items()}}


def _figures(endings: list[Ending]) -> dict[str, float]:
    return {
        "conversations": len(endings),
        "accepted": sum(e.name == "accepted" for e in endings),
        "first_try": sum(e.candidate is not None and e.candidate.attempt == 1 for e in endings),
        "attempts": statistics.mean(e.attempts for e in endings),
        "tokens": statistics.mean(e.usage.total for e in endings),
    }
