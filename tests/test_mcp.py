"""The MCP server in a process of its own, spoken to by the official client."""

import os
import sys
from pathlib import Path

import anyio
import pytest
from agent_loopback import FORBIDDEN, GOOD, SUITE

from generated.library import Library

mcp = pytest.importorskip("mcp")
ROOT = Path(__file__).resolve().parent.parent


def test_a_client_writes_a_kernel(tmp_path):
    from mcp.client.client import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    (tmp_path / "tasks.yaml").write_text(SUITE)
    (tmp_path / "tips_log.md").write_text("# Tips\n")
    arguments = ["-m", "agent.cli", "mcp", "--tasks", str(tmp_path / "tasks.yaml"), "--library", str(tmp_path / "lib"),
                 "--tips", str(tmp_path / "tips_log.md")]  # fmt: skip
    parameters = StdioServerParameters(
        command=sys.executable, args=arguments, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )

    async def talk() -> dict[str, str]:
        said = {}
        async with Client(stdio_client(parameters)) as client:

            async def call(tool: str, **given) -> str:
                return (await client.call_tool(tool, given)).content[0].text

            said["tools"] = " ".join(t.name for t in (await client.list_tools()).tools)
            said["tasks"] = await call("list_tasks")
            said["prompt"] = await call("get_prompt", task="gemm_rmsnorm")
            said["docs"] = await call("read_docs", name="ColVecLoad")
            said["forbidden example"] = await call("read_example", task="gemm_rmsnorm", other="gemm_rmsnorm")
            said["example"] = await call("read_example", task="gemm_rmsnorm", other="gemm_swiglu_lean")
            said["bad"] = await call("check_kernel", task="gemm_rmsnorm", source=FORBIDDEN)
            said["no task"] = await call("check_kernel", task="nothing", source=GOOD)
            said["tip"] = await call("propose_tip", claim="It works.", evidence="seen")
            said["kept"] = await call(
                "submit_kernel", task="gemm_rmsnorm", source=GOOD, author="claude:some-model", attempts=2
            )
        return said

    said = anyio.run(talk)
    assert {
        "list_tasks",
        "get_prompt",
        "read_docs",
        "read_example",
        "check_kernel",
        "measure_kernel",
        "submit_kernel",
    } <= set(said["tools"].split())
    assert "gemm_rmsnorm: a row scale" in said["tasks"] and "Your task: gemm_rmsnorm" in said["prompt"]
    assert "broadcast along N" in said["docs"] and "def gemm_swiglu_lean" in said["example"]
    assert said["forbidden example"].startswith("error: no example") and said["no task"].startswith(
        "error: no task 'nothing'"
    )
    assert "FAILED at policy: line 1" in said["bad"] and "kept as T01" in said["tip"]
    assert "PASSED" in said["kept"] and "kept as gemm_rmsnorm/" in said["kept"]
    kept = Library(tmp_path / "lib").find("gemm_rmsnorm")
    assert kept.author == "claude:some-model" and kept.attempts == 2 and kept.prompt_sha256
