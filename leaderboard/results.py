"""The results table, straight from the passports: for a terminal and for the README."""

from __future__ import annotations

from pathlib import Path

from generated.library import Library, Passport

BASE = "composer"  # the author whose kernels the table is about; others are compared with it
COLUMNS = (
    "task", "M x N x K", "µs", "finish µs", "tax µs", "of floor", "vs torch.compile", "vs expert", "LLM vs composer", "configuration",
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
        parts.append("| " + " | ".join(COLUMNS) + " |")
        parts.append("|" + " --- |" * len(COLUMNS))
        parts += ["| " + " | ".join(row) + " |" for row in rows(library, device)]
        parts.append("")
    return "\n".join(parts).rstrip()


def write_readme(library: Library, readme: Path) -> None:
    """Put the current table between the README's markers."""
    text = readme.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    readme.write_text(f"{head}{BEGIN}\n{markdown(library)}\n{END}{tail}")


if __name__ == "__main__":
    write_readme(Library(), Path(__file__).resolve().parent.parent / "README.md")
