"""Red-team attacks on the library: kernels, passports and the index changed behind its back."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from generated.library import Library, LibraryError, Passport, kernel_id
from verifier.pool import Pool
from verifier.redteam.attacks import Attack, honest_source

AUTHOR, TASK = "scripted", "gemm_rmsnorm"


def _attack(change: Callable[[Path], None]) -> Callable[[Pool], str]:
    """Store a kernel, change its files, ask for it again; the unchanged one must be handed out."""

    def run(pool: Pool) -> str:
        source = honest_source()
        with tempfile.TemporaryDirectory() as tmp:
            library = Library(Path(tmp))
            digest = hashlib.sha256(source.encode()).hexdigest()
            passport = Passport(kernel=kernel_id(AUTHOR, source), task=TASK, author=AUTHOR, source_sha256=digest)
            path = library.add(source, passport)
            if library.source(library.find(passport.kernel)) != source:
                return ""
            change(path)
            try:
                for found in library.passports():
                    library.source(found)
            except LibraryError as e:
                return str(e)
        return ""

    return run


def _edit_passport(**fields: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        passport = path.with_suffix(".json")
        passport.write_text(json.dumps({**json.loads(passport.read_text()), **fields}))

    return change


def _other_source(path: Path) -> None:
    path.write_text(path.read_text().replace("acc * rstd", "acc"))


def _no_source(path: Path) -> None:
    path.unlink()


def _half_a_passport(path: Path) -> None:
    text = path.with_suffix(".json").read_text()
    path.with_suffix(".json").write_text(text[: len(text) // 2])


def _moved(path: Path) -> None:
    """The passport of one task beside the kernels of another."""
    folder = path.parent.parent / "gemm_rope"
    folder.mkdir()
    (folder / path.with_suffix(".json").name).write_text(path.with_suffix(".json").read_text())


def _outside(path: Path) -> None:
    """A passport whose kernel lies outside the library."""
    planted = path.parent.parent / "planted.py"
    planted.write_text("planted")
    digest = hashlib.sha256(b"planted").hexdigest()
    _edit_passport(kernel="../planted", source_sha256=digest)(path)


ATTACKS = [
    Attack("library_other_source", ["H03", "G05"], "change a kernel after it was checked", "library",
           "was changed after it was checked", _attack(_other_source)),
    Attack("library_hash_only", ["H03", "K05"], "a passport that vouches for another source", "library",
           "was changed after it was checked", _attack(_edit_passport(source_sha256="0" * 64))),
    Attack("library_no_source", ["H05"], "a passport without its kernel", "library", "cannot read", _attack(_no_source)),
    Attack("library_half_a_passport", ["D19"], "a passport cut in half", "library", "not a valid passport", _attack(_half_a_passport)),
    Attack("library_unknown_field", ["K04"], "a passport that claims more than the harness writes", "library",
           "not a valid passport", _attack(_edit_passport(approved=True))),
    Attack("library_unknown_status", ["K04"], "a status nobody gives", "library",
           "not a valid passport", _attack(_edit_passport(status="record"))),
    Attack("library_moved_passport", ["H03", "K05"], "a passport beside another task's kernels", "library",
           "does not belong|not a valid passport", _attack(_moved)),
    Attack("library_outside", ["H03", "K03"], "a passport whose kernel lies elsewhere", "library",
           "does not belong|not a valid passport", _attack(_outside)),
]  # fmt: skip
