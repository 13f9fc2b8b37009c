"""An environment as people write them for `verifiers`: say the larger number, after asking if you like.

Only the Python of that package imports it.
"""

from random import Random

import httpx
import verifiers.v1 as vf

PAIRS = [(a, b) for a in range(8) for b in range(8) if a != b]
Random(0).shuffle(PAIRS)


class Data(vf.TaskData):
    pair: tuple[int, int]


class Bigger(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(max(self.data.pair)))

    @vf.metric
    async def asked(self, trace: vf.Trace) -> float:
        return float(trace.num_turns - 1)


class Pairs(vf.Taskset[Bigger, vf.TasksetConfig]):
    def load(self):
        return [Bigger(Data(pair=pair, prompt="{} {} ?".format(*pair))) for pair in PAIRS]


class Config(vf.HarnessConfig):
    forgets: bool = False
    """Whether what was said before an answer is left out of the next request."""


class Talk(vf.Harness[Config]):
    """Tells who asks; the loop is in this process."""

    NEEDS_CONTAINER, EXECUTES_CODE = False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        said = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(headers=headers, timeout=None) as client:
            for _ in range(3):
                body = {"model": ctx.model, "messages": said}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                text = answer.json()["choices"][0]["message"]["content"] or ""
                if text.strip() != "ask":
                    break
                hint = {
                    "role": "user",
                    "content": "first" if data.pair[0] > data.pair[1] else "second",
                }
                turn = [] if self.config.forgets else [{"role": "assistant", "content": text}]
                said = [*said, *turn, hint]
        return vf.ProgramResult(0, "", "")


__all__ = ["Pairs", "Talk"]
