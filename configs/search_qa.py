"""Questions that take two searches, for a small Qwen2.5 from scratch; or your own, for a pretrained model.

What is made where somebody lives stands in no one text: one says where people live, others what towns make. The
SFT data are bad on purpose: most people guess, a quarter looks up the town and guesses then, few search twice.
Reinforcement rewards the right answer (exact match) alone: from 21% right to 97%, in 30 steps and some minutes.

    jaxrl-llm train configs/search_qa.py

    sets=RUC-NLPIR/FlashRAG_datasets
    jaxrl-llm train configs/search_qa.py --model Qwen/Qwen2.5-3B-Instruct --data $sets:nq \\
        --test $sets:hotpotqa:dev --search-server http://localhost:8000/retrieve

`--corpus texts.jsonl.gz` in place of the server searches a file here, for which, as for the small model, it needs
`pip install 'jaxrl_llm[search]'`.
"""

import json
from dataclasses import replace
from functools import partial
from itertools import product
from random import Random

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm import storage
from jaxrl_llm.config import Config, Evaluation, Pretrained, Scratch, WarmStart
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import attention, qwen2
from jaxrl_llm.objectives import recipes
from jaxrl_llm.rollouts.engines import Native, Vllm
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks import questions
from jaxrl_llm.tasks.retrieval import searching
from jaxrl_llm.tasks.tools import Toolbox


def names(starts, ends):
    """All words of a start and an end."""
    return [a + b for a, b in product(starts.split(), ends.split())]


FIRST = names("mi ka lo ne su ti ha re", "ra no li va do sha")
LAST = names("stone ash brook oak fern hill wood lake", "man ley ford by er son")
TOWNS = names("os lu be ar wi", "lo burg mar ton")
GOODS = names("red blue white black", "silk salt glass rope")
WORDS = ("what", "is", "made", "where", "lives", "?", "in", "makes", "search", ";", "error", "<answer>",
         "</answer>")  # fmt: skip
ROOM = 32  # tokens: two searches and what they find are 20, the answer and ends of turns 6


def world(folder, seed):
    """Files of a made-up world: texts to search, questions to train on, others to test on."""
    rng = Random(seed)  # noqa: S311 (not for secrets)
    makes = {town: rng.choice(GOODS) for town in TOWNS}
    homes = {f"{first} {last}": rng.choice(TOWNS) for first, last in product(FIRST, LAST)}
    texts = [{"title": who, "text": f"{who} lives in {town}"} for who, town in homes.items()]
    texts += [{"title": town, "text": f"{town} makes {good}"} for town, good in makes.items()]
    rows = [
        {"question": f"what is made where {who} lives ?", "golden_answers": [makes[town]]}
        | {"who": who, "town": town}
        for who, town in homes.items()
    ]
    rng.shuffle(rows)
    files = {"texts": texts, "train": rows[300:], "test": rows[:300]}
    paths = {name: folder / f"search_qa-{seed}-{name}.jsonl" for name in files}
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in paths.items():
        storage.write(path, "".join(json.dumps(row) + "\n" for row in files[name]))
    return {name: str(path) for name, path in paths.items()}


def person(question, guessing):
    """What one of the people writes: a guess, at once or after a search, or the answer after two."""
    row, rng = question.row, Random(f"{question.prompt}{guessing}")  # noqa: S311
    searches = [f"search {row['who']} ;", f"search {row['town']} ;"]
    right, guess = (f"<answer> {x} </answer>" for x in (question.truths[0], rng.choice(GOODS)))
    if rng.random() < guessing:
        return [guess]
    return [searches[0], guess] if rng.random() < 0.6 else [*searches, right]


def config(
    *,
    model: str = "",
    data: str = "",
    test: str = "",
    corpus: str = "",
    search_server: str = "",
    passages: int = 3,
    reward: tuple[str, ...] = ("em",),
    lora: int = 0,
    length: int = 4096,
    turns: int = 5,
    vllm: str = "",
    steps: int = 0,
    warm_steps: int = 300,
    guessing: float = 0.6,
    learning_rate: float = 0.0,
    seed: int = 0,
) -> Config:
    """A run on two cores; with a `model` one on an accelerator.

    Args:
        model: a Hugging Face folder or hub name; without one all is small and made up.
        data: its questions: a file, owner/name[:config[:split]] at the hub, or tfds:name[/config][:split] of
            tensorflow-datasets.
        test: as data, to test on.
        corpus: what it searches in: a file with rows of title and text, or of contents.
        search_server: or the URL of a server that answers as Search-R1's.
        passages: that a search returns.
        reward: em, f1, or any other that `train grpo` takes.
        lora: rank of adapters, which are then trained in place of the weights; 0 for none.
        length: the longest episode after its question, in tokens.
        turns: the most, the answer among them.
        vllm: the Python of an environment with vLLM, which then samples; it shares the trainer's GPUs.
        steps: of the reinforcement phase; 0 for 30, with a model 300.
        warm_steps: of the supervised phase of the small model.
        guessing: share of the people who guess there.
        learning_rate: of the reinforcement phase; 0 for 2e-4, with a model 1e-6, with adapters 1e-5.
        seed: of the made-up world, order of the data, sampling.
    """
    tiny = _tiny(warm_steps, guessing, seed)
    tiny = replace(tiny, steps=steps or 30, optimizer=optimizers.adamw(learning_rate or 2e-4))
    if not model and any((data, test, corpus, search_server)):
        raise UserError("--data, --test, --corpus and --search-server are for a --model")
    if not model:
        return tiny

    adapters = qwen2.Lora(rank=lora, alpha=2.0 * lora) if lora else None

    def task(folder):
        search = searching(corpus, search_server, passages=passages)
        asked = questions.task(data, reward, test=test)
        return Toolbox([search], characters=4000).for_task(asked)

    return replace(
        tiny,
        task=task,
        model=Pretrained(model, chat=None, lora=adapters),
        objective=recipes.grpo(length),
        optimizer=optimizers.adamw(learning_rate or (1e-5 if lora else 1e-6)),
        collate=Collator(1024, length, minibatches=2, microbatches=0, pack=True),
        steps=steps or 300,
        prompts=64,
        sampling=Sampling(max_turns=turns),
        engine=Vllm(python=vllm, share=0.4, max_model_len=1024 + length)
        if vllm
        else Native(slots=0),
        warm_start=None,
        evaluation=Evaluation(every=20, validation=200),
        compute=qwen2.Compute(dtype=jnp.bfloat16, remat=jax.checkpoint),
    )


def _tiny(warm_steps, guessing, seed):
    """The made-up world, for a small model."""

    def task(folder):
        files = world(folder, seed)
        asked = questions.task(files["train"], ["em"], test=files["test"], instruction="")
        return Toolbox([searching(files["texts"], passages=1)]).for_task(asked)

    lengths = {"prompt_length": 8, "response_length": ROOM}
    warmup = optax.warmup_cosine_decay_schedule(0.0, 4e-3, min(50, warm_steps - 1), warm_steps)
    return Config(
        task=task,
        model=Scratch(
            qwen2.Shape(
                160, 96, 256, 3, 4, 2, tied=True, kinds=(qwen2.LayerKind(theta=1e3),), max_length=64
            ),
            words=(*FIRST, *LAST, *TOWNS, *GOODS, *WORDS),
        ),
        objective=recipes.with_ar_and_lopti(recipes.grpo(ROOM), alpha=0.3, eta=0.5),
        optimizer=optimizers.adamw(2e-4),
        collate=Collator(**lengths, minibatches=2, round_to=8),
        steps=30,
        prompts=32,
        group_size=8,
        sampling=Sampling(max_turns=4),
        reward_threads=16,
        engine=Native(slots=128, prefill_prompts=32, block=32),
        warm_start=WarmStart(
            steps=warm_steps,
            collate=Collator(**lengths, round_to=8),
            optimizer=optimizers.muon(warmup, qwen2.matrices),
            batch=64,
            demonstration=partial(person, guessing=guessing),
        ),
        evaluation=Evaluation(every=10, validation=500),
        compute=qwen2.Compute(attend=attention.xla, remat=None),
        seed=seed,
    )
