"""Hand-off: kernels written elsewhere go through the same gates, and their passports claim only what is known."""

import json

import pytest
from agent_loopback import GOOD, SUITE, WRONG

from agent.handoff import Known, kernel_text, submit
from agent.prompt import render
from generated.library import Library
from reference_kernels.tasks import load_suite
from verifier.verdict import HarnessError


@pytest.fixture
def place(tmp_path):
    (tmp_path / "tasks.yaml").write_text(SUITE)
    return load_suite(tmp_path / "tasks.yaml"), Library(tmp_path / "lib")


def send(place, pool, text, **known):
    suite, library = place
    return submit(text, suite["gemm_rmsnorm"], suite, library, pool, Known(**known), lambda stage: None)


def test_passing_kernel_is_kept_with_what_is_known(place, pool):
    suite, library = place
    sha = render(suite["gemm_rmsnorm"], suite).sha256
    done = send(
        place,
        pool,
        f"Here it is:\n```python\n{GOOD}```\n",
        author="claude:some-model",
        attempts=2,
        prompt_sha256=sha,
        tokens=900,
    )
    kept = library.find("gemm_rmsnorm")
    assert done.passport == kept and library.source(kept) == GOOD
    assert (kept.author, kept.model, kept.attempts, kept.prompt_sha256) == ("claude:some-model", "some-model", 2, sha)
    assert (
        kept.cost == {"tokens": 900}
        and kept.tips == list(render(suite["gemm_rmsnorm"], suite).tips)
        and kept.run is None
    )

    # the same file again, with a measurement in between: what was measured stays
    kept.status, kept.timings = (
        "measured",
        [{"device": "D", "shape": [1, 1, 1], "config": "c", "total_us": 1.0, "ratios": {"gemm": {"median": 1.0}}}],
    )
    library.add(GOOD, kept)
    send(place, pool, GOOD, author="claude:some-model")
    again = library.find("gemm_rmsnorm")
    assert again.status == "measured" and again.timings == kept.timings and again.attempts is None and again.cost == {}


def test_unknown_stays_unknown(place, pool):
    done = send(place, pool, GOOD, author="human:ada", prompt_sha256="0" * 64)
    assert (
        done.passport.model is None
        and done.passport.attempts is None
        and done.passport.cost == {}
        and done.passport.tips == []
    )


def test_failing_kernel_is_not_kept(place, pool):
    done = send(place, pool, WRONG, author="human:ada")
    assert done.passport is None and "FAILED at interpret" in done.feedback
    assert list(place[1].passports()) == []


@pytest.mark.parametrize("author", ["composer", "expert:quack", "ada", "claude:", "human:a\nb", "Human:ada", ":x"])
def test_names_that_are_taken_or_malformed(author):
    with pytest.raises(HarnessError, match="KIND:NAME"):
        Known(author)


def test_prompt_hash_must_be_one():
    with pytest.raises(HarnessError, match="--prompt-sha"):
        Known("human:ada", prompt_sha256="abc")


@pytest.mark.parametrize(
    ("text", "kernel"),
    [
        ("a = 1\n", "a = 1\n"),
        ("```\na\n```", "a\n"),
        ("x\n```py\na\n```\ny", "a\n"),
        ("```python\na\n```\n```python\nb\n```", None),
    ],
)
def test_kernel_in_an_answer(text, kernel):
    assert kernel_text(text) == (text if kernel is None else kernel)


def test_command_line(place, tmp_path, capsys, monkeypatch):
    import sys

    from agent.cli import main

    (tmp_path / "k.py").write_text("import os\n" + GOOD)
    arguments = ["submit", "k.py", "--author", "human:ada", "--tasks", "tasks.yaml", "--library", "lib", "--json"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["coda-agent", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    told = json.loads(capsys.readouterr().out)
    assert end.value.code == 1 and not told["passed"] and told["kernel"] is None and "line 1" in told["feedback"]
