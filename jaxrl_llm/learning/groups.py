"""Examples answered by a sampler and graded by a task; each process takes a share of them."""

import base64
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np

from jaxrl_llm import distributed, userfile
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.reward import Reward
from jaxrl_llm.rollouts.sampler import Draft, Sampler, Sampling
from jaxrl_llm.rollouts.trajectory import Trajectory
from jaxrl_llm.tasks.task import (
    Episodes,
    Interactive,
    Prompt,
    RewardSettings,
    Task,
    score_responses,
)


@dataclass(frozen=True)
class Group:
    """An example of a task, and the responses to it."""

    example: Any = field(compare=False)
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> list[Reward]:
        """The rewards of its responses, which have to be graded."""
        return [one.reward for one in self.trajectories if one.reward is not None]

    @property
    def is_constant(self) -> bool:
        """Whether no two checked rewards differ, in float32; never where it has one response."""
        scores = np.asarray([r.score for r in self.rewards if r.graded], np.float32)
        return len(self.trajectories) > 1 and not (len(scores) and scores.max() > scores.min())


def trajectories(groups: Iterable[Group]) -> list[Trajectory]:
    """The responses of all groups, in order."""
    return [one for group in groups for one in group.trajectories]


def rewards(groups: Iterable[Group]) -> list[Reward]:
    """The rewards of all responses, in order."""
    return [reward for group in groups for reward in group.rewards]


@dataclass(frozen=True)
class TokenTask:
    """A task in tokens."""

    task: Task[Any]
    tokenizer: Tokenizer
    settings: RewardSettings = field(default_factory=RewardSettings)

    def prompts(self, examples: Sequence[Any]) -> list[list[int]]:
        """The token ids of each example's prompt."""
        return [self.tokenizer.prompt(self._ask(example)) for example in examples]

    def turn(self, example: Any, text: str) -> list[int]:
        """The token ids of a turn of the policy after an example's prompt, and of what ends it."""
        return [*self.tokenizer.encode(text), self.tokenizer.end(self._ask(example))]

    def _ask(self, example: Any) -> Prompt:
        return userfile.user_code("a prompt cannot be made")(self.task.prompt)(example)

    def sample(
        self, sampler: Sampler, examples: Sequence[Any], *, n: int, sampling: Sampling
    ) -> list[Group]:
        """`n` responses to each of this process's share of `examples`; episodes have their reward."""
        prompts = self.prompts(examples)
        mine = _mine(prompts)
        if not mine:
            return []
        chosen = [prompts[i] for i in mine]
        if isinstance(self.task, Interactive):
            with self._episodes([examples[i] for i in mine for _ in range(n)]) as reply:
                made = sampler.generate(chosen, n=n, sampling=sampling, reply=reply)
            pairs = zip(made, reply.rewards, strict=True)
            made = [replace(one, reward=reward) for one, reward in pairs]
        else:
            made = sampler.generate(chosen, n=n, sampling=sampling)
        parts = [tuple(made[i * n : (i + 1) * n]) for i in range(len(mine))]
        return [Group(examples[i], part) for i, part in zip(mine, parts, strict=True)]

    def replay(
        self, examples: Sequence[Any], said: Sequence[str | Sequence[str]]
    ) -> list[Trajectory]:
        """Episodes in which the policy says these turns, or this one, each with its end."""
        endless = Sampling(max_tokens=2**31, max_turns=2**31)
        made = [Draft(endless, prompt) for prompt in self.prompts(examples)]
        with self._episodes(examples) as reply:
            for i, turns in enumerate(said):
                for turn in [turns] if isinstance(turns, str) else turns:
                    tokens = self.turn(examples[i], turn)
                    logps = [0.0] * len(tokens)
                    made[i].add(tokens, logps, stopped=True)
                    if not made[i].goes_on(reply(i, tokens, logps).result()):
                        break
        pairs = zip(made, reply.rewards, strict=True)
        return [replace(draft.done(0, episode=True), reward=reward) for draft, reward in pairs]

    def try_reward(self, example: Any, response: str | Sequence[str]) -> Reward:
        """The reward of one response, or of the turns of an episode."""
        if isinstance(self.task, Interactive):
            [reward] = [one.reward for one in self.replay([example], [response])]
            assert reward is not None
            return reward
        said = [response] if isinstance(response, str) else response
        return self._scored([example], said)[0]

    def _episodes(self, examples: Sequence[Any]) -> Episodes:
        assert isinstance(self.task, Interactive)
        return Episodes(self.task, self.tokenizer, examples, self.settings)

    def grade(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with the rewards of all responses; StopRequested on a stop."""
        flat = [(group.example, one) for group in groups for one in group.trajectories]
        if all(one.reward is not None for _, one in flat):
            return [*groups]
        texts = [self.tokenizer.decode(one.tokens) for _, one in flat]
        scored = iter(self._scored([example for example, _ in flat], texts))
        with_reward = lambda one: replace(one, reward=next(scored))
        return [
            replace(group, trajectories=tuple(map(with_reward, group.trajectories)))
            for group in groups
        ]

    def _scored(self, examples: Sequence[Any], responses: Sequence[str]) -> list[Reward]:
        return score_responses(self.task, examples, responses, self.settings)

    def answer(
        self,
        sampler: Sampler,
        examples: Sequence[Any],
        *,
        n: int,
        sampling: Sampling,
        stop: distributed.Stop,
    ) -> list[Group]:
        """Graded responses to all examples, in all processes; StopRequested if one was asked to stop."""
        work = lambda: self.grade(self.sample(sampler, examples, n=n, sampling=sampling))
        return self.together(examples, work, stop)

    def together(
        self, examples: Sequence[Any], work: Callable[[], list[Group]], stop: distributed.Stop
    ) -> list[Group]:
        """The groups of all processes, in the order of examples; `work` makes this one's."""
        shares = distributed.share(work, stop, to_bytes=pack, from_bytes=unpack)
        return shares[0] if len(shares) == 1 else self._merged(examples, shares)

    def whole(self, examples: Sequence[Any], own: list[Group] | None) -> list[Group] | None:
        """The groups of all processes, from this one's; None if any process has none."""
        if distributed.count() == 1:
            return own
        payloads = distributed.gather(b"" if own is None else pack(own))
        return self._merged(examples, [*map(unpack, payloads)]) if all(payloads) else None

    def own(self, examples: Sequence[Any], whole: Sequence[Group]) -> list[Group]:
        """This process's share of the groups of all: the inverse of `whole`."""
        return [whole[i] for i in _mine(self.prompts(examples))]

    def _merged(self, examples: Sequence[Any], shares: Sequence[list[Group]]) -> list[Group]:
        """The shares of all processes in the order of the examples, which are not sent along."""
        prompts, left = self.prompts(examples), [iter(share) for share in shares]
        found = [next(left[owner]) for owner in _owners(prompts)]
        return [*map(_asked, found, examples, prompts)]


def _asked(group: Group, example: Any, prompt: Sequence[int]) -> Group:
    """A group of an example and its prompt."""
    return Group(example, tuple(replace(one, prompt=prompt) for one in group.trajectories))


def _owners(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The process of each prompt; equal prompts share one, as a sampler numbers their responses."""
    numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    return [numbers[tuple(prompt)] * distributed.count() // len(numbers) for prompt in prompts]


def _mine(prompts: Sequence[Sequence[int]]) -> list[int]:
    return [i for i, owner in enumerate(_owners(prompts)) if owner == distributed.index()]


def noted(groups: Sequence[Group]) -> dict[str, Any]:
    """Groups, but for their examples, as JSON for `from_note`; numbers as bytes."""
    prompts = [[*group.trajectories[0].prompt] for group in groups]
    return {"prompts": prompts, "packed": base64.b64encode(pack(groups)).decode()}


def from_note(note: dict[str, Any]) -> list[Group]:
    """What was `noted`."""
    pairs = zip(note["prompts"], unpack(base64.b64decode(note["packed"])), strict=True)
    return [_asked(group, None, prompt) for prompt, group in pairs]


def pack(groups: Sequence[Group]) -> bytes:
    """Groups as bytes for `unpack`; without prompts and examples."""
    flat = trajectories(groups)
    join = lambda rows, dtype: np.asarray([x for row in rows for x in row], dtype)
    about = [
        (one.finished, one.turns, one.restarts, one.version, one.reward and astuple(one.reward))
        for one in flat
    ]
    rest = {"sizes": [len(group.trajectories) for group in groups], "about": about}
    buffer = io.BytesIO()
    np.savez(
        buffer,
        allow_pickle=False,
        lengths=np.asarray([len(one.tokens) for one in flat], np.int32),
        tokens=join([one.tokens for one in flat], np.int32),
        logps=join([one.logps for one in flat], np.float32),
        rest=np.frombuffer(json.dumps(rest).encode(), np.uint8),
    )
    return buffer.getvalue()


def unpack(payload: bytes) -> list[Group]:
    """What was packed."""
    with np.load(io.BytesIO(payload), allow_pickle=False) as found:
        part = dict(found)
    rest, ends = json.loads(part["rest"].tobytes()), np.cumsum(part["lengths"])
    spans = lambda pairs: tuple((start, end) for start, end in pairs)
    flat = iter(
        Trajectory(
            (),
            part["tokens"][end - size : end].tolist(),
            part["logps"][end - size : end].tolist(),
            finished,
            spans(turns),
            spans(restarts),
            version,
            reward and Reward(*reward),
        )
        for size, end, (finished, turns, restarts, version, reward) in zip(
            part["lengths"], ends, rest["about"], strict=True
        )
    )
    return [Group(None, tuple(next(flat) for _ in range(size))) for size in rest["sizes"]]
