"""The results table, straight from the passports: for a terminal and for the README."""

from __future__ import annotations

from pathlib import Path

from generated.library import Library, Passport

BASE = "composer"  # the author whose kernels the table is about; others are compared with it
COLUMNS = (
    "task", "M x N x K", "µs", "finish µs", "tax µs", "of floor", "vs torch.compile", "vs expert", "LLM vs composer", "configuration",
)  # fmt: skip
LEGEND = (
    "Kernels of the composer; a ratio above 1 means they are faster (medians of paired ratios; intervals and receipts are in "
    "the passports). µs includes folding the partial reductions; finish µs is the difference of two medians, so its noise is "
    "about 1 % of µs. Tax: kernel minus the bare cuBLAS GEMM. \\*: the expert kernel computes only some of the outputs. "
    "*same code*: what the LLM wrote compiles to the same object file."
)
AUTHORSHIP = (
    "task", "attempts", "first try", "tokens", "object", "vs composer (3 sizes)", "vs expert (3 sizes)", "vs torch.compile (3 sizes)",
)  # fmt: skip
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def devices(library: Library) -> list[str]:
    """Devices that something was measured on."""
    return sorted({r["device"] for p in library.passports() for r in p.timings})


def rows(library: Library, device: str) -> list[tuple[str, ...]]:
    """One row per task and size measured on ``device``; ratios above 1 mean the kernel is faster."""
    found = list(library.passports())
    out = []
    for p in found:
        if p.author != BASE:
            continue
        for r in sorted((r for r in p.timings if r["device"] == device), key=lambda r: r["shape"][0]):
            ratios = {n: f"{v['median']:.2f}" for n, v in r["ratios"].items()}
            # an expert that computes some of the outputs only has less to do
            covers = r["ratios"].get("expert", {}).get("covers")
            note = "*" if covers is not None and len(covers) < _outputs(p) else ""
            out.append(
                (
                    p.task,
                    "x".join(map(str, r["shape"])),
                    f"{r['total_us']:.1f}",
                    f"{r['finish_us']:.1f}",
                    f"{r['tax_us']:+.1f}",
                    f"{r['share_of_floor']:.0%}",
                    ratios.get("torch.compile", "-"),
                    ratios.get("expert", "-") + note,
                    _llm(found, p, r),
                    r["config"],
                )
            )
    return out


def _llm(found: list[Passport], base: Passport, row: dict) -> str:
    """The LLM's kernel for the same task and size, in the same session, against the composer's."""
    for p in found:
        if p.task != base.task or not p.author.startswith("claude:"):
            continue
        for r in p.timings:
            if (r["device"], r["shape"], r["session"]) == (row["device"], row["shape"], row["session"]):
                return "same code" if r.get("same_object_as") else f"{row['total_us'] / r['total_us']:.2f}"
    return "-"


def _outputs(passport: Passport) -> int:
    for verdict in passport.measure:
        if verdict["stage"] == "numerics":
            return len(verdict["evidence"].get("worst", {}))
    return 0


def markdown(library: Library) -> str:
    """Every device's table with what it was measured with (README)."""
    parts = []
    for device in devices(library):
        passports = [p for p in library.passports() if any(r["device"] == device for r in p.timings)]
        facts, chain = passports[0].device, passports[0].toolchain
        sessions = sorted({r["session"] for p in passports for r in p.timings})
        rates = passports[0].ceilings
        parts.append(
            f"{device}, driver {facts.get('driver')}, torch {facts.get('torch')} on the GPU machine, "
            f"nvidia-cutlass-dsl {chain.get('nvidia-cutlass-dsl')}, quack-kernels {chain.get('quack-kernels')}; bf16; "
            f"session(s) {', '.join(sessions)}; `coda-agent bundle --all`, then `coda-agent measure DIR`. "
            f"Floor: {rates['matmul_flops'] / 1e12:.0f} TFLOP/s and {rates['copy_bytes'] / 1e12:.2f} TB/s, measured."
        )
        parts.append("")
        parts.append(LEGEND)
        parts.append("")
        parts.append("| " + " | ".join(COLUMNS) + " |")
        parts.append("|" + " --- |" * len(COLUMNS))
        parts += ["| " + " | ".join(row) + " |" for row in rows(library, device)]
        parts.append("")
    return "\n".join(parts).rstrip()


def authorship(library: Library) -> str:
    """LLM-written kernels: attempts, cost where known, and times against composer and expert."""
    found = list(library.passports())
    lines = ["| " + " | ".join(AUTHORSHIP) + " |", "|" + " --- |" * len(AUTHORSHIP)]
    for p in found:
        if not p.author.startswith("claude:"):
            continue
        ordered = sorted(p.timings, key=lambda r: r["shape"][0])
        base = {
            (r["device"], tuple(r["shape"]), r["session"]): r
            for q in found
            if q.task == p.task and q.author == BASE
            for r in q.timings
        }
        against = [base.get((r["device"], tuple(r["shape"]), r["session"])) for r in ordered]
        same = ordered and all(r.get("same_object_as") for r in ordered)

        def ratios(name: str, ordered=ordered) -> str:
            return ", ".join(f"{r['ratios'][name]['median']:.2f}" if name in r["ratios"] else "-" for r in ordered)

        lines.append(
            "| "
            + " | ".join(
                [
                    p.task,
                    str(p.attempts or "unknown"),
                    "yes" if p.attempts == 1 else "no",
                    str(p.cost.get("tokens") or "unknown"),
                    "the composer's" if same else "its own",
                    ", ".join(f"{b['total_us'] / r['total_us']:.2f}" if b else "-" for b, r in zip(against, ordered, strict=True)),
                    ratios("expert"),
                    ratios("torch.compile"),
                ]
            )
            + " |"
        )
    return "\n".join(lines)


def write_between(file: Path, text: str) -> None:
    """Put a generated table between a document's markers."""
    head, rest = file.read_text().split(BEGIN)
    file.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    write_between(root / "README.md", markdown(Library()))
    write_between(root / "docs/authorship.md", authorship(Library()))
