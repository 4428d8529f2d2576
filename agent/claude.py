"""Claude as an author: the Anthropic Messages API through the official SDK."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verifier.verdict import HarnessError

from .authors import TELL_EVERY, Call, Fatal, Tool, Transient, Turn, retry_after
from .budget import CHARS_PER_TOKEN, Usage
from .prompt import Prompt

# The newest model of the SDK's list that is meant for long agentic coding and has a published price.
DEFAULT_MODEL = "claude-opus-5-5"
MAX_TOKENS = 16_000  # of one reply, thinking included; a kernel needs under 1,000
_TRANSIENT = {"overloaded_error", "rate_limit_error", "api_error", "timeout_error", "gateway_timeout_error"}


class Claude:
    """Speaks the Messages API with streaming, tools, thinking and prompt caching.

    Args:
        thinking: ``adaptive``, ``none``, or a number of tokens for models without adaptive thinking.
        effort: ``low`` to ``max``; None leaves it to the model's default.
        client: an ``anthropic.Anthropic``; made from the environment when left out.
    """

    def __init__(
        self, model: str | None = None, thinking: str = "adaptive", effort: str | None = None, client: Any = None
    ):
        try:
            import anthropic
        except ImportError:
            raise HarnessError("the author 'claude' needs the package anthropic: pip install anthropic") from None
        self.sdk = anthropic
        self.model = model or DEFAULT_MODEL
        self.name = f"claude:{self.model}"
        self.options = _thinking(self.model, thinking)
        if effort:
            self.options["output_config"] = {"effort": effort}
        if client is None:
            # our own loop retries, so that every retry is journalled and counted
            try:
                client = anthropic.Anthropic(max_retries=0)
            except anthropic.AnthropicError:
                client = None  # no credentials in the SDK's own places either
            if client is None or not (client.api_key or client.auth_token or client.credentials):
                raise HarnessError(
                    "no Anthropic credentials; set ANTHROPIC_API_KEY, or let any other agent write the kernel: "
                    "coda-agent prompt TASK, then coda-agent submit FILE --task TASK --author claude:MODEL"
                )
        self.client = client

    def reply(
        self,
        task,
        prompt: Prompt,
        tools: list[Tool],
        history: list[dict],
        max_tokens: int,
        progress: Callable[[str], None],
    ) -> Turn:
        """One streamed call; see :class:`agent.authors.Author`."""
        message = None
        try:
            with self.client.messages.stream(
                model=self.model,
                max_tokens=min(max_tokens, MAX_TOKENS),
                # the static part is the same for every task of a run: it is cached once for all conversations
                system=[{"type": "text", "text": prompt.static, "cache_control": {"type": "ephemeral"}}],
                tools=[{"name": t.name, "description": t.description, "input_schema": t.schema} for t in tools],
                messages=_messages(history),
                **self.options,
            ) as stream:
                try:
                    characters = told = 0
                    for event in stream:
                        if event.type == "message_start":
                            message = stream.current_message_snapshot
                        elif event.type == "content_block_delta":
                            characters += sum(len(v) for v in event.delta.to_dict().values() if isinstance(v, str))
                            if characters >= told + TELL_EVERY:
                                told = characters
                                progress(f"writing, {characters} characters")
                    if message is None or message.stop_reason is None:
                        raise Transient("the stream ended before the message did", usage=_usage(message))
                except ValueError as e:
                    if message is None or "tool parameter JSON" not in str(e):
                        raise Transient(f"unreadable stream: {e}", usage=_usage(message)) from e
                    return _turn(message, broken=str(e).split("Error: ")[-1].split(" JSON: ")[0].strip())
        except self.sdk.APIStatusError as e:
            reason = f"{e.type or e.status_code}: {e.api_message or e.message}"
            if e.type in _TRANSIENT or e.status_code in (408, 409, 429) or e.status_code >= 500:
                raise Transient(reason, retry_after(e.response), _usage(message)) from e
            raise Fatal(reason) from e
        except self.sdk.APIConnectionError as e:
            raise Transient(f"connection: {e.__cause__ or e}", usage=_usage(message)) from e
        except self.sdk.AnthropicError as e:
            raise Fatal(str(e)) from e
        except OSError as e:
            raise Transient(f"connection: {e}", usage=_usage(message)) from e
        except Exception as e:
            # the SDK lets its HTTP library's errors through while a stream is read
            if type(e).__module__.split(".")[0] in ("httpx2", "httpcore2", "httpx", "httpcore"):
                raise Transient(f"connection: {e}", usage=_usage(message)) from e
            raise
        return _turn(message)


def _thinking(model: str, how: str) -> dict:
    if how == "none":
        return {}
    if how == "adaptive" and "-4-5" not in model:
        return {"thinking": {"type": "adaptive"}}
    # models of the 4.5 generation know only a fixed thinking budget
    return {"thinking": {"type": "enabled", "budget_tokens": int(how) if how.isdigit() else 6000}}


def _messages(history: list[dict]) -> list[dict]:
    """The history in the API's form; the last block carries a cache mark, so each call reuses the one before."""
    messages: list[dict] = []
    for entry in history:
        if entry["role"] == "user":
            role, content = "user", [{"type": "text", "text": entry["text"]}]
        elif entry["role"] == "assistant":
            role, content = "assistant", list(entry["raw"])
        else:
            role = "user"
            content = [
                {"type": "tool_result", "tool_use_id": r["id"], "content": r["text"], "is_error": r["error"]}
                for r in entry["results"]
            ]
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += content
        else:
            messages.append({"role": role, "content": content})
    last = messages[-1]["content"]
    last[-1] = {**last[-1], "cache_control": {"type": "ephemeral"}}
    return messages


def _turn(message: Any, broken: str | None = None) -> Turn:
    """Our form of a finished message, or of one whose last tool call is ``broken``."""
    raw, calls, text = [], [], []
    cut = message.stop_reason == "max_tokens"
    for i, block in enumerate(message.content):
        last = i == len(message.content) - 1
        if block.type == "text":
            if block.text.strip():
                raw.append({"type": "text", "text": block.text})
                text.append(block.text)
        elif block.type == "thinking":
            raw.append({"type": "thinking", "thinking": block.thinking, "signature": block.signature})
        elif block.type == "tool_use":
            problem = None
            if last and broken:
                problem = f"the arguments are not valid JSON ({broken})"
            elif last and cut:
                problem = "your reply reached its length limit inside this call; send the call again, with less text before it"
            arguments = block.input if isinstance(block.input, dict) and not problem else {}
            raw.append({"type": "tool_use", "id": block.id, "name": block.name, "input": arguments})
            calls.append(Call(block.id, block.name, arguments, problem))
        else:
            raw.append(block.to_dict())
    if message.stop_reason == "refusal":
        details = message.stop_details
        said = (details and (details.explanation or details.category)) or " ".join(text)
        return Turn(raw, said or "the model declined to answer", [], "refused", _usage(message))
    if message.stop_reason == "model_context_window_exceeded":
        raise Fatal("the conversation no longer fits the model's context window")
    usage = _usage(message)
    if broken:  # the stream was left before its final count: estimate what was written
        written = sum(len(str(b.to_dict())) for b in message.content)
        usage = Usage(
            usage.input, max(usage.output, int(written / CHARS_PER_TOKEN)), usage.cache_write, usage.cache_read
        )
    return Turn(raw, "\n".join(text), calls, "length" if cut else "done", usage)


def _usage(message: Any) -> Usage:
    if message is None:
        return Usage()
    u = message.usage
    return Usage(u.input_tokens, u.output_tokens, u.cache_creation_input_tokens or 0, u.cache_read_input_tokens or 0)
