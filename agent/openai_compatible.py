"""Other models as authors: any OpenAI-compatible endpoint (vLLM, Ollama, a gateway) through the openai package."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from verifier.verdict import HarnessError

from .authors import TELL_EVERY, Call, Fatal, Tool, Transient, Turn, retry_after
from .budget import Usage
from .prompt import Prompt

MAX_TOKENS = 16_000  # of one reply


class OpenAICompatible:
    """Speaks chat completions with streaming and tools; ``OPENAI_BASE_URL`` names the endpoint.

    Args:
        model: as the endpoint calls it.
        client: an ``openai.OpenAI``; made from the environment when left out.
    """

    def __init__(self, model: str | None, client: Any = None):
        try:
            import openai
        except ImportError:
            raise HarnessError(
                "the author 'openai' needs the package openai: pip install 'coda-agent[openai]'"
            ) from None
        if not model:
            raise HarnessError("the author 'openai' needs --model NAME, as the endpoint calls it")
        self.sdk, self.model, self.name = openai, model, f"openai:{model}"
        if client is None:
            key, endpoint = os.environ.get("OPENAI_API_KEY"), os.environ.get("OPENAI_BASE_URL")
            if not key and not endpoint:
                raise HarnessError(
                    "set OPENAI_BASE_URL (and OPENAI_API_KEY if the endpoint wants one) for the author 'openai'"
                )
            client = openai.OpenAI(api_key=key or "none", max_retries=0)  # our own loop retries
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
        usage = Usage()
        text, stop, refusal, parts, told = "", None, "", {}, 0
        try:
            stream = self.client.chat.completions.create(
                model=self.model,
                max_tokens=min(max_tokens, MAX_TOKENS),
                messages=[{"role": "system", "content": prompt.static}, *_messages(history)],
                tools=[
                    {
                        "type": "function",
                        "function": {"name": t.name, "description": t.description, "parameters": t.schema},
                    }
                    for t in tools
                ],
                stream=True,
                stream_options={"include_usage": True},
            )
            with stream:
                for chunk in stream:
                    if chunk.usage:
                        cached = getattr(chunk.usage.prompt_tokens_details, "cached_tokens", None) or 0
                        usage = Usage(chunk.usage.prompt_tokens - cached, chunk.usage.completion_tokens, 0, cached)
                    for choice in chunk.choices:
                        stop = choice.finish_reason or stop
                        text += choice.delta.content or ""
                        refusal += getattr(choice.delta, "refusal", None) or ""
                        for piece in choice.delta.tool_calls or ():
                            part = parts.setdefault(piece.index, {"id": "", "name": "", "arguments": ""})
                            part["id"] = piece.id or part["id"]
                            if piece.function:
                                part["name"] += piece.function.name or ""
                                part["arguments"] += piece.function.arguments or ""
                        written = len(text) + sum(len(p["arguments"]) for p in parts.values())
                        if written >= told + TELL_EVERY:
                            told = written
                            progress(f"writing, {written} characters")
        except self.sdk.APIStatusError as e:
            reason = f"{e.status_code}: {e.message}"
            if e.status_code in (408, 409, 429) or e.status_code >= 500:
                raise Transient(reason, retry_after(e.response), usage) from e
            raise Fatal(reason) from e
        except self.sdk.APIConnectionError as e:
            raise Transient(f"connection: {e.__cause__ or e}", usage=usage) from e
        except self.sdk.APIError as e:  # an error event within the stream
            raise Transient(e.message, usage=usage) from e
        except self.sdk.OpenAIError as e:
            raise Fatal(str(e)) from e
        except Exception as e:
            if type(e).__module__.split(".")[0] in ("httpx", "httpcore", "httpx2", "httpcore2", "json"):
                raise Transient(f"connection: {e}", usage=usage) from e
            raise
        if stop is None:
            raise Transient("the stream ended before the message did", usage=usage)
        if stop == "content_filter" or refusal:
            return Turn([], refusal or text or "the endpoint's content filter stopped the answer", [], "refused", usage)
        return _turn(text, list(parts.values()), stop == "length", usage)


def _turn(text: str, parts: list[dict], cut: bool, usage: Usage) -> Turn:
    calls, raw = [], []
    for i, part in enumerate(parts):
        arguments, problem = {}, None
        try:
            arguments = json.loads(part["arguments"] or "{}")
            if not isinstance(arguments, dict):
                raise ValueError("not an object")
        except ValueError as e:
            arguments, problem = {}, f"the arguments are not valid JSON ({e})"
        if cut and i == len(parts) - 1:
            problem = (
                "your reply reached its length limit inside this call; send the call again, with less text before it"
            )
        name = part["id"] or f"call_{i}"
        calls.append(Call(name, part["name"], arguments, problem))
        # some endpoints parse what they are sent back: never return broken JSON to them
        function = {"name": part["name"], "arguments": json.dumps(arguments)}
        raw.append({"id": name, "type": "function", "function": function})
    message = {"role": "assistant", "content": text}
    if raw:
        message["tool_calls"] = raw
    return Turn(message, text, calls, "length" if cut else "done", usage)


def _messages(history: list[dict]) -> list[dict]:
    messages: list[dict] = []
    for entry in history:
        if entry["role"] == "user":
            messages.append({"role": "user", "content": entry["text"]})
        elif entry["role"] == "assistant":
            messages.append(entry["raw"])
        else:
            messages += [{"role": "tool", "tool_call_id": r["id"], "content": r["text"]} for r in entry["results"]]
    return messages
