"""Servers on 127.0.0.1 that speak the providers' wire formats, and kernels small enough to check quickly.

The Messages server refuses, like the real one, conversations that are not well formed;
so a loop that sends a wrong history fails its test instead of passing by luck.
"""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SUITE = """
version: 1
defaults: {dtypes: [bf16], timed: [[256, 256, 256]], ragged: [[40, 80, 64]]}
tasks:
  gemm_rmsnorm:
    summary: a row scale
    math: "y = (A B) * rstd[m]"
    operands: {rstd: {kind: ColVecLoad, dtype: fp32, fill: rstd}}
    outputs: {y: {kind: TileStore}}
    ops: ["y = scale_rows(acc, rstd)"]
  gemm_swiglu_lean:
    summary: SwiGLU
    math: "(g, u) = (z[2j], z[2j+1]) of z = A B;  y[j] = silu(g) u"
    outputs: {y: {kind: TileStore, width: 0.5}}
    ops: ["y = swiglu(acc)"]
"""
GOOD = """from primitives import ColVecLoad, TileStore, epilogue

@epilogue(rstd=ColVecLoad(), y=TileStore())
def gemm_rmsnorm(acc, rstd):
    return {"y": acc * rstd}
"""
WRONG = GOOD.replace("acc * rstd", "acc + rstd")  # runs, computes something else
FORBIDDEN = "import os\n" + GOOD  # refused by the policy, in no time


@dataclass
class Reply:
    """One answer of a server. ``calls``: (name, arguments or raw JSON text)."""

    text: str = ""
    thinking: str = ""
    calls: list[tuple[str, dict | str]] = field(default_factory=list)
    stop: str | None = None
    usage: tuple[int, int, int, int] = (100, 50, 0, 0)  # input, output, cache write, cache read
    cut_after: int | None = None  # events sent before the connection breaks
    error_event: str | None = None  # an error within the stream
    status: int = 200
    headers: dict = field(default_factory=dict)
    message: str = ""


def check(source: str) -> Reply:
    return Reply(calls=[("check_kernel", {"source": source})])


def finish(**arguments) -> Reply:
    return Reply(calls=[("finish", {"note": "done", **arguments})])


class Loopback:
    """A scripted server; ``requests`` holds the bodies it got, ``url`` where it listens."""

    def __init__(self, script: list[Reply], handler: type[BaseHTTPRequestHandler], path: str = ""):
        self.script, self.requests, self.headers = list(script), [], []
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (handler,), {"loopback": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}{path}"

    def __enter__(self) -> Loopback:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    loopback: Loopback
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.loopback.lock:
            self.loopback.requests.append(body)
            self.loopback.headers.append(dict(self.headers))
            reply = (
                self.loopback.script.pop(0) if self.loopback.script else Reply(status=400, message="the script is over")
            )
        fault = self.fault(body)
        if fault:
            reply = Reply(status=400, message=fault)
        if reply.status != 200:
            return self.refuse(reply)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for n, event in enumerate(self.events(reply, body)):
            if reply.cut_after is not None and n >= reply.cut_after:
                self.connection.shutdown(socket.SHUT_RDWR)
                break
            self.wfile.write(event.encode())
            self.wfile.flush()
        self.close_connection = True
        return None

    def refuse(self, reply: Reply) -> None:
        data = json.dumps({"type": "error", "error": {"type": _TYPES[reply.status], "message": reply.message}}).encode()
        self.send_response(reply.status)
        for name, value in {
            "content-type": "application/json",
            "content-length": str(len(data)),
            **reply.headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    429: "rate_limit_error",
    500: "api_error",
    529: "overloaded_error",
}


class Messages(_Handler):
    """The Anthropic Messages API."""

    def fault(self, body: dict) -> str | None:
        """What the real API would refuse."""
        if self.path != "/v1/messages" or not body.get("stream"):
            return f"unexpected request {self.path}"
        if not (self.headers.get("x-api-key") or self.headers.get("authorization")) or not self.headers.get(
            "anthropic-version"
        ):
            return "a key and anthropic-version are required"
        open_calls: set[str] = set()
        marks = len([b for b in body["system"] if "cache_control" in b])
        for i, message in enumerate(body["messages"]):
            if (message["role"] == "user") != (i % 2 == 0) or not message["content"]:
                return f"messages.{i}: roles must alternate and content must not be empty"
            results = {b["tool_use_id"] for b in message["content"] if b["type"] == "tool_result"}
            if results != open_calls:
                return f"messages.{i}: tool_use ids without tool_result: {open_calls ^ results}"
            open_calls = {b["id"] for b in message["content"] if b["type"] == "tool_use"}
            marks += len([b for b in message["content"] if "cache_control" in b])
            for block in message["content"]:
                if block["type"] == "thinking" and not block["signature"].startswith("sig-"):
                    return f"messages.{i}: thinking signature does not match"
                if block["type"] == "text" and not block["text"].strip():
                    return f"messages.{i}: text content blocks must be non-empty"
        return "too many cache_control blocks" if marks > 4 else None

    def events(self, reply: Reply, body: dict):
        def event(kind: str, **data) -> str:
            return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n"

        read, write, cache_write, cache_read = reply.usage
        usage = {
            "input_tokens": read,
            "output_tokens": 1,
            "cache_creation_input_tokens": cache_write,
            "cache_read_input_tokens": cache_read,
        }
        number = len(self.loopback.requests)
        yield event("message_start", message={"id": f"msg_{number}", "type": "message", "role": "assistant", "model": body["model"],
                                              "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage})  # fmt: skip
        yield event("ping")
        if reply.error_event:
            yield f"event: error\ndata: {json.dumps({'type': 'error', 'error': {'type': reply.error_event, 'message': 'Overloaded'}})}\n\n"
            return
        blocks: list[tuple[dict, list[dict]]] = []
        if reply.thinking:
            deltas = [
                {"type": "thinking_delta", "thinking": reply.thinking},
                {"type": "signature_delta", "signature": f"sig-{number}"},
            ]
            blocks.append(({"type": "thinking", "thinking": "", "signature": ""}, deltas))
        if reply.text:
            half = len(reply.text) // 2
            deltas = [{"type": "text_delta", "text": t} for t in (reply.text[:half], reply.text[half:])]
            blocks.append(({"type": "text", "text": ""}, deltas))
        for n, (name, arguments) in enumerate(reply.calls):
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            pieces = [text[i : i + 40] for i in range(0, len(text), 40)]
            deltas = [{"type": "input_json_delta", "partial_json": p} for p in pieces]
            blocks.append(({"type": "tool_use", "id": f"toolu_{number}_{n}", "name": name, "input": {}}, deltas))
        for index, (start, deltas) in enumerate(blocks):
            yield event("content_block_start", index=index, content_block=start)
            for delta in deltas:
                yield event("content_block_delta", index=index, delta=delta)
            yield event("content_block_stop", index=index)
        stop = reply.stop or ("tool_use" if reply.calls else "end_turn")
        yield event("message_delta", delta={"stop_reason": stop, "stop_sequence": None}, usage={"output_tokens": write})
        yield event("message_stop")


class ChatCompletions(_Handler):
    """The chat completions API as vLLM, Ollama and others speak it."""

    def fault(self, body: dict) -> str | None:
        if self.path != "/v1/chat/completions" or not body.get("stream"):
            return f"unexpected request {self.path}"
        open_calls: list[str] = []
        for i, message in enumerate(body["messages"]):
            if message["role"] == "tool":
                if message["tool_call_id"] not in open_calls:
                    return f"messages.{i}: no such tool call"
                open_calls.remove(message["tool_call_id"])
            elif open_calls:
                return f"messages.{i}: tool calls {open_calls} were not answered"
            for call in message.get("tool_calls", ()):
                json.loads(call["function"]["arguments"])
                open_calls.append(call["id"])
        return None

    def events(self, reply: Reply, body: dict):
        def chunk(delta: dict | None, stop: str | None = None, usage: dict | None = None) -> str:
            choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": stop}]
            data = {
                "id": "c1",
                "object": "chat.completion.chunk",
                "created": 1,
                "model": body["model"],
                "choices": choices,
            }
            return f"data: {json.dumps({**data, 'usage': usage})}\n\n"

        yield chunk({"role": "assistant", "content": ""})
        if reply.error_event:
            yield f"data: {json.dumps({'error': {'type': reply.error_event, 'message': 'Overloaded', 'code': None, 'param': None}})}\n\n"
            return
        for piece in (reply.text[:5], reply.text[5:]):
            if piece:
                yield chunk({"content": piece})
        for n, (name, arguments) in enumerate(reply.calls):
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            call = {"index": n, "id": f"call_{len(self.loopback.requests)}_{n}", "type": "function"}
            yield chunk({"tool_calls": [{**call, "function": {"name": name, "arguments": ""}}]})
            for i in range(0, len(text), 40):
                yield chunk({"tool_calls": [{"index": n, "function": {"arguments": text[i : i + 40]}}]})
        yield chunk(
            {},
            {"max_tokens": "length", "refusal": "content_filter"}.get(
                reply.stop, "tool_calls" if reply.calls else "stop"
            ),
        )
        read, write, _, cached = reply.usage
        usage = {"prompt_tokens": read + cached, "completion_tokens": write, "total_tokens": read + write + cached,
                 "prompt_tokens_details": {"cached_tokens": cached}}  # fmt: skip
        yield chunk(None, usage=usage)
        yield "data: [DONE]\n\n"
