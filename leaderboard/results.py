"""Rows of the results table, straight from the passports."""

from __future__ import annotations

from generated.library import Library

COLUMNS = ("task", "M x N x K", "author", "µs", "finish µs", "tax µs", "of floor", "vs torch.compile", "vs expert", "configuration")


def rows(library: Library, device: str) -> list[tuple[str, ...]]:
    """One row per kernel and shape measured on ``device``; ratios above 1 mean the kernel is faster."""
    out = []
    for p in library.passports():
        for r in sorted((r for r in p.timings if r["device"] == device), key=lambda r: r["shape"][0]):
            ratio = {n: f"{v['median']:.2f}" for n, v in r["ratios"].items()}
            partly = r["ratios"].get("expert", {}).get("covers")
            note = "*" if partly and len(partly) < _outputs(p) else ""
            out.append(
                (
                    p.task,
                    "x".join(map(str, r["shape"])),
                    p.author,
                    f"{r['total_us']:.1f}",
                    f"{r['finish_us']:.1f}",
                    f"{r['tax_us']:+.1f}",
                    f"{r['share_of_floor']:.0%}",
                    ratio.get("torch.compile", "-"),
                    ratio.get("expert", "-") + note,
                    r["config"],
                )
            )
    return out


def _outputs(passport) -> int:
    for verdict in passport.measure:
        if verdict["stage"] == "numerics":
            return len(verdict["evidence"].get("worst", {}))
    return 0


def markdown(library: Library, device: str) -> str:
    """The table as Markdown (README)."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in rows(library, device)]
    return "\n".join(lines)
