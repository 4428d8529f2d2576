"""The red team's GPU cases as far as they go without one: what is compiled, and what the tampering leaves."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from verifier.redteam.case import load_cases
from verifier.redteam.gpu import TAMPERS, compile_cases, read_cases
from verifier.resources import _dump, cubin_of

NAMES = ("gpu_hang", "gpu_reductions_exchanged", "gpu_operand_overwritten")


@pytest.fixture(scope="module")
def compiled(pool, tmp_path_factory):
    cases = {c.name: c for c in load_cases("gpu") if c.name in NAMES}
    directory = tmp_path_factory.mktemp("cases")
    compile_cases(pool, directory, list(cases.values()))
    return cases, read_cases(directory, list(cases.values()))


def objects(compiled, name):
    _, bundle = compiled
    return [(Path(path), a) for path, a in bundle.artefacts if a.author == name]


def test_the_hang_is_still_there_after_the_compiler(compiled):
    """Named barrier 15 must wait for 1024 threads; the block has fewer, so nobody ever passes."""
    for path, artefact in objects(compiled, "gpu_hang"):
        with tempfile.TemporaryDirectory() as tmp:
            cubin = Path(tmp) / "k.cubin"
            cubin.write_bytes(cubin_of(path.parent / artefact.object))
            sass = _dump("-sass", cubin)
        assert re.search(r"BAR\.SYNC\S* 0xf, 0x400", sass)


def test_exchanged_reductions_reach_the_launch(compiled):
    """The tampered manifest hands the buffer of one row of column sums to the store of one sum per row."""
    cases, bundle = compiled
    [(path, before)] = objects(compiled, "gpu_reductions_exchanged")
    TAMPERS[cases["gpu_reductions_exchanged"].tamper](bundle, cases["gpu_reductions_exchanged"])
    after = type(before).model_validate_json(path.read_text())
    exchanged = {"rows": "columns", "columns": "rows"}
    assert after.fields == [exchanged.get(f, f) for f in before.fields] != before.fields
    assert after.object_sha256 == before.object_sha256


def test_an_output_can_be_made_to_land_on_an_operand(compiled):
    cases, bundle = compiled
    TAMPERS["output_on_operand"](bundle, cases["gpu_operand_overwritten"])
    for path, before in objects(compiled, "gpu_operand_overwritten"):
        after = type(before).model_validate_json(path.read_text())
        assert after.fields.count("rstd") == 2 and "logit" in before.fields and "logit" not in after.fields
