"""Prompts answered by a sampler and scored by a task; each process takes a share of them."""

import base64
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm import distributed, userfile
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.reward import Reward
from jaxrl_llm.rollouts.episode import Episode, rollout
from jaxrl_llm.rollouts.sampler import Rollout, Sampler, Sampling
from jaxrl_llm.tasks.task import (
    Episodes,
    Interactive,
    Prompt,
    RewardSettings,
    Task,
    score_responses,
)

BY_RESPONSE = (
    "responses",
    "logps",
    "finished",
    "turns",
    "restarts",
    "rewards",
)  # fields of a rollout


class Answers(NamedTuple):
    """`n` adjacent responses to each example, with the reward of each response."""

    examples: Sequence[Any]
    rollout: Rollout
    rewards: Sequence[Reward]

    def groups(self, chosen: Sequence[int]) -> "Answers":
        """The examples of these numbers, with their responses."""
        n = len(self.rewards) // len(self.examples)
        rows = _rows(chosen, n)
        examples, rewards = [self.examples[i] for i in chosen], [self.rewards[row] for row in rows]
        return Answers(examples, _picked(self.rollout, rows), rewards)

    def followed(self, other: "Answers") -> "Answers":
        """Both, one after the other; the version is the older one."""
        a, b = self.rollout, other.rollout
        both = {name: [*getattr(a, name), *getattr(b, name)] for name in ("prompts", *BY_RESPONSE)}
        rollout = replace(
            a, version=min(a.version, b.version), tolerance=_tolerance((a, b)), **both
        )
        rewards = [*self.rewards, *other.rewards]
        return Answers([*self.examples, *other.examples], rollout, rewards)

    @property
    def checked(self) -> list[Reward]:
        """The rewards that could be computed."""
        return [reward for reward in self.rewards if reward.checked]


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
    ) -> Rollout:
        """`n` responses to each of this process's share of `examples`."""
        prompts = self.prompts(examples)
        own = [prompts[i] for i in _own(prompts)]
        if not own:
            return Rollout([], [], [])
        if not isinstance(self.task, Interactive):
            return sampler.generate(own, n=n, sampling=sampling)
        mine = [examples[i] for i in _own(prompts) for _ in range(n)]
        with self._episodes(mine) as reply:
            made = sampler.generate(own, n=n, sampling=sampling, reply=reply)
        return replace(made, rewards=reply.rewards)

    def played(self, examples: Sequence[Any], said: Sequence[str | Sequence[str]]) -> Rollout:
        """Episodes in which the policy says these turns, or this one, each with its end."""
        endless = Sampling(max_tokens=2**31, max_turns=2**31)
        made = [Episode(endless, 0) for _ in said]
        with self._episodes(examples) as reply:
            for i, turns in enumerate(said):
                for turn in [turns] if isinstance(turns, str) else turns:
                    tokens = self.turn(examples[i], turn)
                    logps = [0.0] * len(tokens)
                    made[i].sampled(tokens, logps, stopped=True)
                    if not made[i].goes_on(reply(i, tokens, logps).result()):
                        break
        return rollout(self.prompts(examples), made, turns=True, rewards=reply.rewards)

    def tried(self, example: Any, response: str | Sequence[str]) -> Reward:
        """The reward of one response, or of the turns of an episode."""
        if isinstance(self.task, Interactive):
            return self.played([example], [response]).rewards[0]
        said = [response] if isinstance(response, str) else response
        return self._scored([example], said)[0]

    def _episodes(self, examples: Sequence[Any]) -> Episodes:
        assert isinstance(self.task, Interactive)
        return Episodes(self.task, self.tokenizer, examples, self.settings)

    def judge(self, examples: Sequence[Any], own: Rollout) -> Answers:
        """The responses that `sample` returned for `examples`, with rewards; StopRequested on a stop."""
        mine = [examples[i] for i in _own(self.prompts(examples))]
        n = len(own.responses) // max(len(mine), 1)
        if own.rewards:
            return Answers(mine, own, own.rewards)
        texts = [self.tokenizer.decode(response) for response in own.responses]
        rewards = self._scored([example for example in mine for _ in range(n)], texts)
        return Answers(mine, own, rewards)

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
    ) -> Answers:
        """Scored responses to all examples, in all processes; StopRequested if one was asked to stop."""
        work = lambda: self.judge(examples, self.sample(sampler, examples, n=n, sampling=sampling))
        return self.together(examples, work, stop)

    def together(
        self, examples: Sequence[Any], work: Callable[[], Answers], stop: distributed.Stop
    ) -> Answers:
        """The answers of all processes in one; `work` makes this one's. Raises as `answer` does."""
        shares = distributed.share(work, stop, to_bytes=_packed, from_bytes=_unpacked)
        if len(shares) == 1:
            return shares[0]
        return Answers(examples, *_merged(self.prompts(examples), shares))

    def whole(self, examples: Sequence[Any], own: Rollout | None) -> Rollout | None:
        """The responses of all processes in one, from this one's; None if any process has none."""
        if distributed.count() == 1:
            return own
        mine = b"" if own is None else _packed(Answers((), own, ()))
        payloads = distributed.gather(mine)
        if not all(payloads):
            return None
        return _merged(self.prompts(examples), [*map(_unpacked, payloads)])[0]

    def own(self, examples: Sequence[Any], whole: Rollout) -> Rollout:
        """This process's share of the responses of all: the inverse of `whole`."""
        n = len(whole.responses) // len(examples)
        return _picked(whole, _rows(_own(self.prompts(examples)), n))


def _rows(groups: Sequence[int], n: int) -> list[int]:
    """The responses of groups of `n`, by number."""
    return [i * n + k for i in groups for k in range(n)]


def _tolerance(rollouts: Sequence[Rollout]) -> float | None:
    """The widest of those that are known."""
    known = [one.tolerance for one in rollouts if one.tolerance is not None]
    return max(known, default=None)


def _picked(rollout: Rollout, rows: Sequence[int]) -> Rollout:
    """These responses of a rollout."""
    pick = lambda values: [values[row] for row in rows] if values else ()
    picked = {name: pick(getattr(rollout, name)) for name in ("prompts", *BY_RESPONSE)}
    return replace(rollout, **picked)


def _owners(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The process of each prompt; equal prompts share one, as a sampler numbers their responses."""
    numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    return [numbers[tuple(prompt)] * distributed.count() // len(numbers) for prompt in prompts]


def _own(prompts: Sequence[Sequence[int]]) -> list[int]:
    return [i for i, owner in enumerate(_owners(prompts)) if owner == distributed.index()]


def _merged(
    prompts: Sequence[Sequence[int]], shares: Sequence[Answers]
) -> tuple[Rollout, Sequence[Reward]]:
    """The shares of all processes, equally many responses a prompt, in the order of the prompts."""
    n = sum(len(share.rollout.responses) for share in shares) // len(prompts)
    taken, order = [0] * len(shares), []
    for owner in _owners(prompts):
        order += [(owner, taken[owner] + k) for k in range(n)]
        taken[owner] += n
    rollouts = [share.rollout for share in shares]
    held = [one for one in rollouts if one.responses]
    pick = lambda by_share: [by_share[i][row] for i, row in order if by_share[i]] or ()
    whole = Rollout(
        prompts=[prompt for prompt in prompts for _ in range(n)],
        version=max(one.version for one in held),
        tolerance=_tolerance(held),
        **{name: pick([getattr(one, name) for one in rollouts]) for name in BY_RESPONSE},
    )
    return whole, pick([share.rewards for share in shares])


def noted(rollout: Rollout, rewards: Sequence[Reward] = ()) -> dict[str, Any]:
    """Responses, and their rewards if there are any, as JSON for `from_note`; numbers as bytes."""
    packed = _packed(Answers((), rollout, rewards))
    return {"prompts": rollout.prompts, "packed": base64.b64encode(packed).decode()}


def from_note(found: dict[str, Any]) -> Answers:
    """What was `noted`."""
    made = _unpacked(base64.b64decode(found["packed"]))
    return made._replace(rollout=replace(made.rollout, prompts=found["prompts"]))


def _packed(share: Answers) -> bytes:
    """A share's responses and rewards as bytes for `_unpacked`; without prompts and examples."""
    rollout = share.rollout
    flat = lambda rows, dtype: np.asarray([x for row in rows for x in row], dtype)
    rest = {
        "version": rollout.version,
        "tolerance": rollout.tolerance,
        "rewards": [astuple(reward) for reward in share.rewards],
        "turns": rollout.turns,
        "restarts": rollout.restarts,
        "episodes": [astuple(reward) for reward in rollout.rewards],
    }
    buffer = io.BytesIO()
    np.savez(
        buffer,
        allow_pickle=False,
        lengths=np.asarray([len(row) for row in rollout.responses], np.int32),
        tokens=flat(rollout.responses, np.int32),
        logps=flat(rollout.logps, np.float32),
        finished=np.asarray(rollout.finished, bool),
        rest=np.frombuffer(json.dumps(rest).encode(), np.uint8),
    )
    return buffer.getvalue()


def _unpacked(payload: bytes) -> Answers:
    with np.load(io.BytesIO(payload), allow_pickle=False) as found:
        part = dict(found)
    rest = json.loads(part["rest"].tobytes())
    ends = np.cumsum(part["lengths"])[:-1]
    tokens, logps = (
        [row.tolist() for row in np.split(part[name], ends)][: len(part["lengths"])]
        for name in ("tokens", "logps")
    )
    finished = part["finished"].tolist()
    known = {name: rest[name] for name in ("version", "tolerance", "turns", "restarts")}
    rewards, episodes = ([Reward(*one) for one in rest[name]] for name in ("rewards", "episodes"))
    rollout = Rollout((), tokens, logps, finished, **known, rewards=episodes)
    return Answers((), rollout, rewards)
