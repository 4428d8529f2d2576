"""The loop with the real SDKs against servers on 127.0.0.1 that speak the real wire formats."""

import json

import anthropic
import openai
import pytest
from agent_loopback import FORBIDDEN, GOOD, SUITE, WRONG, ChatCompletions, Loopback, Messages, Reply, check, finish

from agent.budget import Ledger, Limits, price_of
from agent.claude import DEFAULT_MODEL, Claude
from agent.conversation import Conversation
from agent.openai_compatible import OpenAICompatible
from agent.prompt import render
from agent.tools import Desk
from reference_kernels.tasks import load_suite

KEY = "sk-ant-loopback-0123456789"


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    path = tmp_path_factory.mktemp("suite") / "tasks.yaml"
    path.write_text(SUITE)
    return load_suite(path)


class Talk:
    """One conversation with a scripted server; the journal is a list."""

    def __init__(self, kind, script, suite, pool, tmp_path, limits=Limits(attempts=6), thinking="adaptive"):
        self.events = []
        handler, path = {"claude": (Messages, ""), "openai": (ChatCompletions, "/v1")}[kind]
        with Loopback(script, handler, path) as self.server:
            if kind == "claude":
                client = anthropic.Anthropic(api_key=KEY, base_url=self.server.url, max_retries=0)
                author = Claude(client=client, thinking=thinking)
            else:
                author = OpenAICompatible(
                    "local", openai.OpenAI(api_key="none", base_url=self.server.url, max_retries=0)
                )
            task = suite["gemm_rmsnorm"]
            log = lambda event, **data: self.events.append(
                json.loads(json.dumps({"event": event, "task": task.name, **data}))
            )
            tips_log = tmp_path / "tips_log.md"
            tips_log.write_text("# Tips\n")
            self.ledger = Ledger(limits, price_of(author.model, "4,20" if kind == "openai" else None))
            desk = Desk(
                task, suite, pool, author.name, log, lambda text: None, lambda: limits.attempts, tips_log=tips_log
            )
            prompt = render(task, suite, tools=True, attempts=6)
            self.ending = Conversation(author, prompt, desk, self.ledger, log, first_wait=0.001).run()
        self.requests = self.server.requests

    def results(self) -> list[dict]:
        return [
            r
            for e in self.events
            if e["event"] == "message" and e["entry"]["role"] == "results"
            for r in e["entry"]["results"]
        ]


@pytest.fixture(params=["claude", "openai"])
def talk(request, suite, pool, tmp_path):
    return lambda script, **options: Talk(request.param, script, suite, pool, tmp_path, **options)


@pytest.fixture
def claude(suite, pool, tmp_path):
    return lambda script, **options: Talk("claude", script, suite, pool, tmp_path, **options)


def test_second_try_is_accepted_and_paid_for(talk):
    done = talk([check(WRONG), check(GOOD), finish()])
    assert (done.ending.name, done.ending.attempts, done.ending.candidate.attempt) == ("accepted", 2, 2)
    assert done.ending.candidate.report.source == GOOD
    assert done.ending.usage.total == 3 * 150 and done.ending.dollars > 0
    first = done.results()[0]
    assert first["error"] and "FAILED at interpret" in first["text"] and "Traceback" not in first["text"]
    assert "PASSED" in done.results()[1]["text"] and "registers" in done.results()[1]["text"]


@pytest.mark.parametrize(
    "fault",
    [
        Reply(status=529, message="Overloaded"),
        Reply(status=429, message="slow down", headers={"retry-after": "0.01"}),
        Reply(status=500, message="oops"),
        Reply(cut_after=0),
        Reply(text="half a sentence", cut_after=3),
        Reply(error_event="overloaded_error"),
    ],
    ids=["overloaded", "rate limit", "server error", "cut at once", "cut mid-stream", "error event"],
)
def test_passing_faults_are_retried_and_nothing_is_lost(talk, fault):
    done = talk([check(FORBIDDEN), fault, fault, finish(give_up=True)])
    assert done.ending.name == "gave up" and done.ending.attempts == 1
    failed = [e["failed"] for e in done.events if e["event"] == "call" and e["failed"]]
    assert len(failed) == 2
    assert done.requests[1] == done.requests[2] == done.requests[3]  # the same history was sent again


def test_endless_overload_is_an_error_that_names_the_cause(claude):
    done = claude([Reply(status=529, message="Overloaded")] * 20)
    assert done.ending.name == "error" and "overloaded" in done.ending.reason and len(done.requests) == 9


def test_a_longer_wait_than_the_budget_ends_the_conversation(claude):
    slow = Reply(status=429, message="slow down", headers={"retry-after": "300"})
    done = claude([slow], limits=Limits(minutes=1, attempts=6))
    assert done.ending.name == "error" and "minutes" in done.ending.reason


@pytest.mark.parametrize("status", [400, 401])
def test_faults_that_stay_are_not_retried(talk, status):
    done = talk([Reply(status=status, message="no such thing")])
    assert done.ending.name == "error" and "no such thing" in done.ending.reason and len(done.requests) == 1


def test_refusal(talk):
    done = talk([Reply(text="I would rather not.", stop="refusal")])
    assert done.ending.name == "refused" and "rather not" in done.ending.reason


def test_cut_off_call_is_not_carried_out(talk):
    cut = Reply(calls=[("check_kernel", '{"source": "from primitives import')], stop="max_tokens")
    done = talk([cut, finish(give_up=True)])
    assert done.ending.name == "gave up" and done.ending.attempts == 0
    assert done.results()[0]["error"] and "length limit" in done.results()[0]["text"]


def test_cut_off_before_any_call(talk):
    done = talk([Reply(text="Let me think at length", stop="max_tokens"), finish(give_up=True)])
    assert done.ending.name == "gave up" and done.ending.attempts == 0
    assert "length limit" in json.dumps(done.requests[1]["messages"][-1])


@pytest.mark.parametrize("arguments", ['{"source": nonsense}', '{"source": 1}', '{"file": "x"}', "[1, 2]"])
def test_malformed_arguments_become_an_answer(talk, arguments):
    done = talk([Reply(calls=[("check_kernel", arguments)]), finish(give_up=True)])
    assert done.ending.name == "gave up" and done.ending.attempts == 0
    assert done.results()[0]["error"]


def test_unknown_tool(talk):
    done = talk([Reply(calls=[("run_shell", {"command": "ls"})]), finish(give_up=True)])
    assert done.results()[0]["error"] and "no tool 'run_shell'" in done.results()[0]["text"]


def test_two_calls_in_one_turn_are_answered_together(talk):
    both = Reply(calls=[("read_docs", {"name": "ColVecLoad"}), ("check_kernel", {"source": FORBIDDEN})])
    done = talk([both, finish(give_up=True)])
    assert [r["error"] for r in done.results()[:2]] == [False, True] and done.ending.attempts == 1
    assert "broadcast along N" in done.results()[0]["text"] and "line 1" in done.results()[1]["text"]


def test_empty_answers_are_nudged_then_given_up(talk):
    done = talk([Reply()] * 4)
    assert done.ending.name == "gave up" and len(done.requests) == 4
    assert "called no tool" in json.dumps(done.requests[-1]["messages"])


def test_talk_without_calls_is_kept_in_the_history(talk):
    done = talk([Reply(text="I will write the kernel now."), finish(give_up=True)])
    assert "I will write the kernel now." in json.dumps(done.requests[1]["messages"])


def test_token_budget_is_checked_before_each_call(talk):
    # after one call of 3,150 tokens the next would read them again: not within 5,000
    done = talk(
        [Reply(calls=check(FORBIDDEN).calls, usage=(3000, 150, 0, 0))] * 3, limits=Limits(tokens=8000, attempts=6)
    )
    assert done.ending.name == "budget" and "tokens" in done.ending.reason
    assert done.ledger.used.total <= 8000


def test_dollar_budget_bounds_the_reply_too(talk):
    costly = Reply(calls=check(FORBIDDEN).calls, usage=(3000, 500, 0, 0))
    done = talk([costly] * 9, limits=Limits(dollars=0.09, attempts=9))
    assert done.ending.name == "budget" and len(done.requests) >= 2 and done.ledger.dollars <= 0.09
    assert all(r["max_tokens"] <= 0.09 * 1e6 / 20 for r in done.requests)


def test_attempts_are_a_budget(talk):
    done = talk([check(FORBIDDEN), check(FORBIDDEN + "\n")], limits=Limits(attempts=2))
    assert done.ending.name == "budget" and "attempts" in done.ending.reason and done.ending.attempts == 2


def test_what_passed_is_kept_when_the_provider_fails_afterwards(talk):
    done = talk([check(GOOD), Reply(status=401, message="key revoked")])
    assert done.ending.name == "accepted" and "key revoked" in done.ending.reason


# --- what only the Messages API has ---


def test_layout_is_cached_and_byte_stable(claude):
    done = claude([check(FORBIDDEN), Reply(thinking="hm", calls=finish(give_up=True).calls)])
    first, second = done.requests
    assert first["system"] == second["system"] and first["tools"] == second["tools"]
    assert first["system"][0]["cache_control"] == {"type": "ephemeral"}
    plain = lambda body: json.dumps(
        [[{k: v for k, v in b.items() if k != "cache_control"} for b in m["content"]] for m in body["messages"]]
    )
    assert plain(second).startswith(plain(first)[:-1])  # the history only grows
    assert "cache_control" in second["messages"][-1]["content"][-1]
    assert first["model"] == DEFAULT_MODEL and first["thinking"] == {"type": "adaptive"}


def test_thinking_goes_back_signed_and_unchanged(claude):
    done = claude([Reply(thinking="first think", text="so", calls=check(FORBIDDEN).calls), finish(give_up=True)])
    block = done.requests[1]["messages"][1]["content"][0]
    assert block == {"type": "thinking", "thinking": "first think", "signature": "sig-1"}


def test_thinking_of_older_models():
    client = anthropic.Anthropic(api_key=KEY)
    assert Claude("claude-haiku-4-5", client=client).options["thinking"]["type"] == "enabled"
    assert Claude(thinking="none", client=client).options == {}
    assert Claude("x", effort="low", client=client).options["output_config"] == {"effort": "low"}


def test_cut_stream_is_paid_for(claude):
    done = claude([Reply(text="x" * 50, usage=(900, 50, 0, 0), cut_after=3), finish(give_up=True)])
    call = next(e for e in done.events if e["event"] == "call" and e["failed"])
    assert call["usage"]["input"] == 900 and call["dollars"] > 0


def test_cache_prices(claude):
    done = claude([Reply(calls=finish(give_up=True).calls, usage=(1000, 100, 2000, 4000))])
    assert done.ending.dollars == pytest.approx((1000 * 4 + 100 * 20 + 2000 * 5 + 4000 * 0.2) / 1e6)


def test_default_model_is_in_the_sdk_and_priced():
    from typing import get_args

    from anthropic.types.model import Model

    assert DEFAULT_MODEL in get_args(get_args(Model)[0]) and price_of(DEFAULT_MODEL)
