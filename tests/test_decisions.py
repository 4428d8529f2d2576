"""What people decide about kernels: the history is kept, served kernels follow it, nobody decides on stale evidence."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_library import passport, timing

from generated.library import Conflict, Library, LibraryError
from generated.passport import _ALLOWED, Decision, Passport

H200, SHAPE = "NVIDIA H200", (4096, 4096, 4096)


def decision(verb, reviewer="anna", reason="because"):
    return Decision(verb=verb, reviewer=reviewer, reason=reason)


def decide(lib, name, verb, **more):
    p = lib.find(name)
    return lib.decide(p, decision(verb, **more), lib.seen(p))


@pytest.fixture
def lib(tmp_path):
    """Two measured kernels of one task, nobody decided yet."""
    lib = Library(tmp_path / "lib")
    for text, gemm in (("# slow\n", 0.8), ("# fast\n", 0.9)):
        p = passport(text, timings=[timing(SHAPE, 100, gemm)], status="measured")
        lib.add(text, p)
        setattr(lib, text[2:6], p.kernel)
    return lib


def test_only_accepted_kernels_are_served(lib):
    with pytest.raises(LibraryError, match=f"no accepted kernel.*proposed: .*{lib.fast}.*coda-agent review gemm_rmsnorm"):
        lib.best("gemm_rmsnorm", H200, SHAPE)
    decide(lib, lib.slow, "accept")
    assert lib.best("gemm_rmsnorm", H200, SHAPE)["kernel"] == lib.slow
    decide(lib, lib.fast, "accept")
    assert lib.best("gemm_rmsnorm", H200, SHAPE)["kernel"] == lib.fast
    decide(lib, lib.fast, "retire", reason="wrong at M = 1")
    assert lib.best("gemm_rmsnorm", H200, SHAPE)["kernel"] == lib.slow
    back = decide(lib, lib.fast, "restore", reviewer="bert", reason="it was the driver")
    assert lib.best("gemm_rmsnorm", H200, SHAPE)["kernel"] == lib.fast
    assert [(d.verb, d.reviewer) for d in back.history] == [("accept", "anna"), ("retire", "anna"), ("restore", "bert")]
    assert (back.state, back.reviewer, back.review) == ("accepted", "anna", "because")


@pytest.mark.parametrize(
    "verbs, state",
    [
        ([], "proposed"),
        (["request changes"], "changes requested"),
        (["request changes", "restore"], "proposed"),
        (["reject", "restore"], "proposed"),
        (["reject", "accept"], "accepted"),
        (["reject", "accept", "retire", "restore"], "accepted"),
        (["accept", "retire", "accept"], "accepted"),
        (["reject", "restore", "accept", "retire"], "retired"),
    ],
)
def test_states(lib, verbs, state):
    for verb in verbs:
        decide(lib, lib.slow, verb)
    assert lib.find(lib.slow).state == state and len(lib.find(lib.slow).history) == len(verbs)


@pytest.mark.parametrize("before, verb", [([], "retire"), ([], "restore"), (["accept"], "accept"), (["accept"], "reject")])
def test_impossible_decisions_say_what_is_possible(lib, before, verb):
    for step in before:
        decide(lib, lib.slow, step)
    with pytest.raises(LibraryError, match=f"{lib.slow} is (proposed|accepted); possible now: "):
        decide(lib, lib.slow, verb)
    assert len(lib.find(lib.slow).history) == len(before)


@given(st.lists(st.sampled_from(["accept", "reject", "request changes", "retire", "restore"]), max_size=12))
def test_any_walk_is_kept_or_refused_and_restores_are_undo(verbs):
    """The state equals that of a stack of states, popped by restore; a refused step changes nothing."""
    p, stack = passport(), ["proposed"]
    names = {"accept": "accepted", "reject": "rejected", "request changes": "changes requested", "retire": "retired"}
    for verb in verbs:
        if verb in _ALLOWED[stack[-1]]:
            assert p.refusal(verb) == ""
            p.history = [*p.history, decision(verb)]
            stack.pop() if verb == "restore" else stack.append(names[verb])
        else:
            assert p.refusal(verb)
        assert p.state == stack[-1]
    assert Passport.model_validate_json(p.model_dump_json()) == p


def test_a_history_written_by_hand_is_refused():
    data = passport().model_dump(mode="json")
    data["history"] = [decision("restore").model_dump()]
    with pytest.raises(ValueError, match="cannot restore.*is proposed"):
        Passport.model_validate(data)


# --- stale evidence -------------------------------------------------------------------------------


def test_somebody_else_decided_meanwhile(lib):
    shown = lib.find(lib.slow)
    seen = lib.seen(shown)
    decide(lib, lib.slow, "reject", reviewer="bert", reason="spills")
    with pytest.raises(Conflict, match=r"bert decided meanwhile \(reject: spills\)"):
        lib.decide(shown, decision("accept"), seen)
    assert lib.find(lib.slow).state == "rejected"


def test_a_rival_was_accepted_meanwhile(lib):
    shown = lib.find(lib.slow)
    seen = lib.seen(shown)
    decide(lib, lib.fast, "accept")
    with pytest.raises(Conflict, match="another kernel of gemm_rmsnorm was accepted or retired meanwhile"):
        lib.decide(shown, decision("accept"), seen)


def test_it_was_measured_again_meanwhile(lib):
    shown = lib.find(lib.slow)
    seen = lib.seen(shown)
    lib.add("# slow\n", shown.model_copy(update={"timings": [timing(SHAPE, 90, 0.7)]}))
    with pytest.raises(Conflict, match="measured again meanwhile"):
        lib.decide(shown, decision("accept"), seen)


def test_a_changed_text_cannot_be_accepted(lib):
    p = lib.find(lib.slow)
    lib.path(p).write_text("# other\n")
    with pytest.raises(LibraryError, match="was changed after it was checked"):
        lib.decide(p, decision("accept"), lib.seen(p))
    assert lib.find(lib.slow).state == "proposed"


def test_a_corrupt_passport_hinders_nobody_else(lib):
    lib.path(lib.find(lib.fast)).with_suffix(".json").write_text("{half")
    found, problems = lib.scan()
    assert [p.kernel for p in found] == [lib.slow] and len(problems) == 1 and lib.fast in problems[0]
    p = found[0]
    lib.decide(p, decision("accept"), lib.seen(p))
    assert json.loads((lib.root / "index.json").read_text())["gemm_rmsnorm"][H200]["4096x4096x4096"]["kernel"] == lib.slow


def test_format_1_is_read(lib):
    path = lib.path(lib.find(lib.slow)).with_suffix(".json")
    old = json.loads(path.read_text())
    del old["history"]
    path.write_text(json.dumps({**old, "format": 1, "reviewer": None, "review": None}))
    assert lib.find(lib.slow).state == "proposed" and lib.find(lib.slow).format == 2


def test_adding_the_same_text_again_through_the_loop_keeps_the_history(lib):
    from agent.generate import keep

    decide(lib, lib.slow, "reject", reason="spills")
    keep(lib, "# slow\n", passport("# slow\n", attempts=7))
    again = lib.find(lib.slow)
    assert (again.state, again.review, again.attempts, again.status) == ("rejected", "spills", 7, "measured")
