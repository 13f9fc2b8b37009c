"""Examples answered by a sampler and graded by a task; each process takes a share of them."""

import base64
import io
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np

from jaxrl_llm import distributed, userfile
from jaxrl_llm.models.tokenizer import HiddenTokens, Tokenizer
from jaxrl_llm.reward import Reward
from jaxrl_llm.rollouts.sampler import Draft, Sampler, Sampling
from jaxrl_llm.rollouts.trajectory import Trajectory
from jaxrl_llm.tasks.task import (
    Episodes,
    Interactive,
    Prompt,
    RewardSettings,
    Task,
    score_groups,
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

    def is_constant(self, turns: bool = False) -> bool:
        """True if no two graded rewards differ, in float32, nor with `turns` those of their turns.

        Never where it has one response.
        """
        # in the precision that they are learned from: what differs in a later digit has no advantage
        different = {
            tuple(map(np.float32, (one.reward.score, *(one.turn_rewards if turns else ()))))
            for one in self.trajectories
            if one.reward is not None and one.reward.graded
        }
        return len(self.trajectories) > 1 and len(different) < 2


def trajectories(groups: Iterable[Group]) -> list[Trajectory]:
    """The responses of all groups, in order."""
    return [one for group in groups for one in group.trajectories]


def rewards(groups: Iterable[Group]) -> list[Reward]:
    """The rewards of all responses, in order."""
    return [reward for group in groups for reward in group.rewards]


@dataclass(eq=False)
class Pending:
    """A group that is sampled, or will be: of the example at a `place`, by the process `owner`.

    `responses` are those to come, in that process once they are asked for; of episodes `replies`
    are their environments, which know the first response as number `first`.
    """

    place: int
    example: Any
    prompt: Sequence[int]
    owner: int
    seed: int
    responses: Sequence[Future[Trajectory]] = ()
    replies: Episodes | None = None
    first: int = 0

    @property
    def is_mine(self) -> bool:
        """True in the process that samples it."""
        return self.owner == distributed.index()

    @property
    def is_there(self) -> bool:
        """True if this process has all of its responses."""
        # asked before the groups are sampled too, when there is no response yet to be done
        whole = lambda one: one.done() and not one.cancelled() and one.exception() is None
        return bool(self.responses) and all(map(whole, self.responses))

    def group(self) -> Group:
        """The group of its responses, which are there; episodes have their reward."""
        made = [response.result() for response in self.responses]
        # those of a checkpoint have no environment any more, and their reward already
        if self.replies is not None:
            made = [_rewarded(one, self.replies, i) for i, one in enumerate(made, self.first)]
        return Group(self.example, tuple(made))

    def call_off(self) -> None:
        """Gives up what is not there."""
        for response in self.responses:
            response.cancel()
        if self.replies is not None:
            self.replies.end(len(self.responses))

    def put(self, group: Group) -> None:
        """Has these responses, which were sampled before."""
        # as the sampler would give them, so that nobody has to know which came from a checkpoint
        self.responses = [Future() for _ in group.trajectories]
        for response, one in zip(self.responses, group.trajectories, strict=True):
            response.set_result(one)


@dataclass(frozen=True)
class TokenTask:
    """A task in tokens."""

    task: Task[Any]
    tokenizer: Tokenizer
    settings: RewardSettings = field(default_factory=RewardSettings)

    def prompts(self, examples: Sequence[Any]) -> list[list[int]]:
        """The token ids of each example's prompt."""
        return [self.tokenizer.prompt(self.ask(example)) for example in examples]

    def turn(self, prompt: Prompt, text: str) -> list[int]:
        """The token ids of a turn of the policy in a conversation, and of what ends it."""
        return [*self.tokenizer.encode(text), self.tokenizer.end(prompt)]

    def ask(self, example: Any) -> Prompt:
        """An example's prompt as the task writes it; its errors are UserErrors."""
        return userfile.user_code("a prompt cannot be made")(self.task.prompt)(example)

    def pending(
        self, examples: Sequence[Any], places: Sequence[int], seeds: Sequence[int]
    ) -> list[Pending]:
        """Groups to sample, shared out among the processes."""
        prompts = self.prompts(examples)
        # all processes make all of them, so that each knows the order without being told
        rows = zip(places, examples, prompts, _owners(prompts), seeds, strict=True)
        return [Pending(*row) for row in rows]

    def submit(
        self, sampler: Sampler, groups: Sequence[Pending], *, n: int, sampling: Sampling
    ) -> None:
        """Asks for `n` responses to each group that is this process's; one call a seed."""
        mine, replies = [one for one in groups if one.is_mine], None
        if mine and isinstance(self.task, Interactive):
            # one for the whole call: its threads and its count of errors are shared by all groups
            replies = self._episodes([one.example for one in mine for _ in range(n)])
        # numbers of responses to equal prompts go over a call: one seed, one call
        first = 0
        try:
            for seed, some in itertools.groupby(mine, key=lambda one: one.seed):
                asked, how = [*some], replace(sampling, seed=seed)
                # a sampler numbers the responses of a call from 0, the environments those of all calls
                reply = replies and (lambda i, *turn, first=first: replies(first + i, *turn))
                made = sampler.submit([one.prompt for one in asked], n=n, sampling=how, reply=reply)
                for i, one in enumerate(asked):
                    one.responses, one.replies = made[i * n : (i + 1) * n], replies
                    one.first, first = first, first + n
                    if replies is not None:
                        # one that is there, or called off, is done: others may take much longer
                        for k, response in enumerate(one.responses, one.first):
                            response.add_done_callback(lambda _, k=k: replies.finish(k))
        except BaseException:  # the embedded engine samples now, and a stop may come
            if replies is not None:
                replies.end(n * len(mine))
            raise

    def collect(self, sampler: Sampler, groups: Sequence[Pending]) -> list[Group]:
        """This process's of these groups, once they are there; episodes have their reward."""
        mine = [one for one in groups if one.is_mine]
        try:
            # all at once: the embedded engine samples while it is waited for, and fills its slots best so
            sampler.wait([response for one in mine for response in one.responses])
            return [one.group() for one in mine]
        finally:
            # a stop or an error ends the environments too, which may hold processes
            for one in mine:
                if one.replies is not None:
                    one.replies.end(len(one.responses))

    def replay(
        self, examples: Sequence[Any], turns: Sequence[str | Sequence[str]]
    ) -> list[Trajectory]:
        """Episodes in which the policy says these turns, or this one, each with its end."""
        # limits are the collator's to enforce: a demonstration that is too long is counted there
        endless = Sampling(max_tokens=2**31, max_turns=2**31)
        prompts = [*map(self.ask, examples)]
        drafts = [Draft(endless, self.tokenizer.prompt(prompt)) for prompt in prompts]
        with self._episodes(examples) as reply:
            for i, several in enumerate(turns):
                if isinstance(drafts[i].prompt, HiddenTokens):
                    drafts[i].goes_on(reply(i, None).result())
                for turn in [several] if isinstance(several, str) else several:
                    tokens = self.turn(prompts[i], turn)
                    logps = [0.0] * len(tokens)
                    drafts[i].add(tokens, logps, stopped=True)
                    if not drafts[i].goes_on(reply(i, tokens, logps).result()):
                        break
        return [_rewarded(one.done(episode=True), reply, i) for i, one in enumerate(drafts)]

    def try_reward(self, example: Any, response: str | Sequence[str]) -> Reward:
        """The reward of one response, or of the turns of an episode."""
        if isinstance(self.task, Interactive):
            [reward] = [one.reward for one in self.replay([example], [response])]
            assert reward is not None
            return reward
        [said] = [response] if isinstance(response, str) else response
        prompt = self.ask(example)
        said = self.tokenizer.opened(prompt, self.tokenizer.prompt(prompt)) + said
        [[reward]] = score_groups(self.task, [example], [[said]], self.settings)
        return reward

    def _episodes(self, examples: Sequence[Any]) -> Episodes:
        assert isinstance(self.task, Interactive)
        return Episodes(self.task, self.tokenizer, examples, self.settings)

    def grade(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with the rewards of all responses; StopRequested on a stop."""
        # episodes were graded as they went, and groups of a checkpoint before it
        if all(one.reward is not None for one in trajectories(groups)):
            return [*groups]
        examples = [group.example for group in groups]
        texts = [*map(self._texts, groups)]
        scored = score_groups(self.task, examples, texts, self.settings)
        with_reward = lambda one, reward: replace(one, reward=reward)
        return [
            replace(group, trajectories=tuple(map(with_reward, group.trajectories, rewards)))
            for group, rewards in zip(groups, scored, strict=True)
        ]

    def _texts(self, group: Group) -> list[str]:
        """Its responses. A thought that the prompt has begun is one of theirs: tries in it are no answers."""
        opened = self.tokenizer.opened(self.ask(group.example), group.trajectories[0].prompt)
        return [opened + self.tokenizer.decode(one.tokens) for one in group.trajectories]

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
        groups = self.pending(examples, range(len(examples)), [sampling.seed] * len(examples))

        # in one function, so that a process that fails or is stopped in either is waited for by none
        def work() -> list[Group]:
            self.submit(sampler, groups, n=n, sampling=sampling)
            return self.grade(self.collect(sampler, groups))

        return together(groups, work, stop)


def together(
    groups: Sequence[Pending], work: Callable[[], list[Group]], stop: distributed.Stop
) -> list[Group]:
    """The groups of all processes, in their order; `work` makes this one's."""
    ours = distributed.in_step(work, stop)
    if distributed.count() == 1:
        return ours
    # prompts and examples are not sent along
    left = [iter(unpack(share)) for share in distributed.gather(pack(ours))]
    return [_with_prompt(next(left[one.owner]), one.example, one.prompt) for one in groups]


def _rewarded(one: Trajectory, episodes: Episodes, i: int) -> Trajectory:
    """An episode with the rewards that its environment, the one of number `i`, has given."""
    return replace(one, reward=episodes.rewards[i], turn_rewards=tuple(episodes.turn_rewards[i]))


def _with_prompt(group: Group, example: Any, prompt: Sequence[int]) -> Group:
    """A group of an example and its prompt."""
    return Group(example, tuple(replace(one, prompt=prompt) for one in group.trajectories))


def _owners(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The process of each prompt; equal prompts share one, as a sampler numbers their responses."""
    # in blocks, so that a process's share is one stretch of the data
    numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    return [numbers[tuple(prompt)] * distributed.count() // len(numbers) for prompt in prompts]


def noted(groups: Sequence[Group]) -> dict[str, Any]:
    """Groups, but for their examples, as JSON for `from_note`; numbers as bytes."""
    prompts = [[*group.trajectories[0].prompt] for group in groups]
    return {"prompts": prompts, "packed": base64.b64encode(pack(groups)).decode()}


def from_note(note: dict[str, Any]) -> list[Group]:
    """The inverse of `noted`."""
    pairs = zip(note["prompts"], unpack(base64.b64decode(note["packed"])), strict=True)
    return [_with_prompt(group, None, prompt) for prompt, group in pairs]


def pack(groups: Sequence[Group]) -> bytes:
    """Groups as bytes for `unpack`; without prompts and examples."""
    flat = trajectories(groups)
    join = lambda rows, dtype: np.asarray([x for row in rows for x in row], dtype)
    about = [
        (
            one.finished,
            one.turns,
            one.restarts,
            one.versions,
            one.reward and astuple(one.reward),
            one.turn_rewards,
            [len(x) for x in one.experts],
        )
        for one in flat
    ]
    rest = {"sizes": [len(group.trajectories) for group in groups], "about": about}
    buffer = io.BytesIO()
    # arrays: as JSON a token would take thirty bytes, and a checkpoint may have millions
    np.savez(
        buffer,
        allow_pickle=False,
        lengths=np.asarray([len(one.tokens) for one in flat], np.int32),
        tokens=join([one.tokens for one in flat], np.int32),
        logps=join([one.logps for one in flat], np.float32),
        **{f"experts{i}": np.concatenate([*x.experts]) for i, x in enumerate(flat) if x.experts},
        rest=np.frombuffer(json.dumps(rest).encode(), np.uint8),
    )
    return buffer.getvalue()


def unpack(payload: bytes) -> list[Group]:
    """The inverse of `pack`."""
    with np.load(io.BytesIO(payload), allow_pickle=False) as found:
        part = dict(found)
    rest, ends = json.loads(part["rest"].tobytes()), np.cumsum(part["lengths"])
    # JSON knows lists alone, and groups are compared
    spans = lambda pairs: tuple((start, end) for start, end in pairs)

    def one(i, finished, turns, restarts, versions, reward, turn_rewards=(), contexts=()):
        here = slice(ends[i] - part["lengths"][i], ends[i])
        return Trajectory(
            (),
            part["tokens"][here].tolist(),
            part["logps"][here].tolist(),
            finished,
            spans(turns),
            spans(restarts),
            tuple(versions),
            reward and Reward(*reward),
            tuple(turn_rewards),
            tuple(np.split(part[f"experts{i}"], np.cumsum(contexts)[:-1]) if contexts else ()),
        )

    flat = itertools.starmap(one, ((i, *about) for i, about in enumerate(rest["about"])))
    return [Group(None, tuple(next(flat) for _ in range(size))) for size in rest["sizes"]]
