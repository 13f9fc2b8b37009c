"""An environment with a tool, as people write them for `verifiers`: say a sum, by an adder of small numbers.

Only the Python of that package imports it, that of the tool's server too.
"""

import json
import zlib
from contextlib import AsyncExitStack

import httpx
import verifiers.v1 as vf
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp


class Data(vf.TaskData):
    pair: tuple[int, int]


class Adder(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """The sum of two numbers below 8."""
        if max(a, b) > 7:
            raise ValueError("too large")
        return a + b


class Sum(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(sum(self.data.pair)))

    @vf.metric
    async def told(self, trace: vf.Trace) -> dict[str, float]:
        """What the package itself would learn from, as checksums, and what the tool said."""
        last = trace.branches[-1]
        return {
            "results": float(len(trace.tool_messages)),
            "tokens": float(zlib.crc32(json.dumps(last.token_ids).encode())),
            "sampled": float(zlib.crc32(json.dumps(last.sampled_mask).encode())),
            "logps": sum(last.logprobs),
            "branches": float(trace.num_branches),
        }


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        pairs = [(a, b) for a in range(8) for b in range(8)]
        return [Sum(Data(pair=pair, prompt="{} {} ?".format(*pair))) for pair in pairs]

    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]


class Loop(vf.Harness[vf.HarnessConfig]):
    """Calls tools until a turn has no call; the loop is in this process."""

    SUPPORTS_MCP, NEEDS_CONTAINER, EXECUTES_CODE = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        said = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        async with (
            AsyncExitStack() as stack,
            httpx.AsyncClient(headers=headers, timeout=None) as client,
        ):
            tools, names, known = await connect_mcp(servers, stack)
            while True:
                body = {"model": ctx.model, "messages": said, "tools": tools}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                said.append(answer.json()["choices"][0]["message"])
                for call in said[-1].get("tool_calls", ()):
                    name, arguments = call["function"]["name"], call["function"]["arguments"]
                    text = await call_mcp(known, names, name, json.loads(arguments))
                    said.append({"role": "tool", "tool_call_id": call["id"], "content": text})
                if said[-1]["role"] != "tool":
                    return vf.ProgramResult(0, "", "")


__all__ = ["Loop", "Sums"]

if __name__ == "__main__":
    Adder.run()
