"""Every config builds, with every variant of the paper a flag away."""

import importlib.util
import json
import pathlib
from dataclasses import replace
from functools import partial
from itertools import islice
from random import Random

import jax.numpy as jnp
import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_llm.cli.main import main
from jaxrl_llm.config import Config
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning.groups import TokenTask
from jaxrl_llm.models import tokenizer
from jaxrl_llm.objectives import TokenData, kl, losses, partition, recipes
from jaxrl_llm.objectives.token_data import sampler
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks import retrieval
from jaxrl_llm.tasks.knights_knaves import generate as kk_generate
from jaxrl_llm.tasks.knights_knaves import task as knights_knaves
from jaxrl_llm.tasks.knights_knaves import tiny as kk_tiny
from tests.training.process import fails

ROOT = pathlib.Path(__file__).parents[1]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_every_config_builds(path):
    some = {"model": "Qwen/Qwen2.5-0.5B-Instruct", "data": "owner/name"}
    needed = {"grpo": some, "sft": some, "rltr": {"receiver": "folder"}}
    made = load(path.stem).config(**needed.get(path.stem, {}))
    assert isinstance(made, Config)
    assert callable(made.task)


@pytest.mark.parametrize("name", ["kk_tiny", "gym"])
def test_a_warm_start_of_no_steps_is_none(name):
    assert load(name).config(warm_steps=0).warm_start is None
    assert load(name).config(warm_steps=1).warm_start.steps == 1


@pytest.mark.parametrize("name", ["kk", "math", "kk_tiny", "pretrained"])
@pytest.mark.parametrize("algo", ["grpo", "reinforce_plus_plus"])
def test_the_grid_of_the_paper(name, algo):
    for alpha, eta in ((0.0, 0.0), (0.3, 0.0), (0.0, 0.5), (0.3, 0.5)):
        objective = load(name).config(algo, alpha=alpha, eta=eta).objective
        assert getattr(objective.advantage, "func", objective.advantage).__name__ == algo
        assert [factor.keywords["alpha"] for factor in objective.factors] == [alpha] * (alpha > 0)
        assert objective.surrogate.keywords == {"low": 0.2, "high": 0.24, "dual": 10.0}
        assert objective.stages == (2 if eta else 1)
        assert (objective.partition is partition.together) == (eta == 0)
        assert bool(objective.penalties) == (algo == "grpo")


def test_a_recipe_is_as_published_unless_asked_otherwise():
    """The paper's two methods are the default of its two algorithms alone."""
    config = load("kk_tiny").config
    for algo, (alpha, stages) in {
        "grpo": ([0.3], 2),
        "reinforce_plus_plus": ([0.3], 2),
        "cispo": ([], 1),
    }.items():
        objective = config(algo).objective
        assert [factor.keywords["alpha"] for factor in objective.factors] == alpha
        assert objective.stages == stages
    assert config("cispo", stages="reversed").objective.stages == 2


def of_recipe(algo, **flags):
    """The puzzles' config with a recipe, and with the teacher that it may need."""
    return load("kk_tiny").config(
        algo, teacher="folder" * (algo in ("distillation", "gkd")), **flags
    )


@pytest.mark.parametrize("algo", recipes.BY_NAME)
def test_max_lag_leaves_a_recipe_its_corrections(algo):
    """Where a recipe looks at the sampler, `old_logp` is the trainer's, else every rho is 1."""
    made = of_recipe(algo, max_lag=2, vllm="python")
    corrects = ("tis", "icepop", "mis", "dppo", "dppo_kl", "distillation")
    assert made.max_lag == 2
    assert (made.ratios == "trainer") == (algo in corrects)


def test_a_loss_that_reads_the_sampler_allows_for_a_lag():
    """A penalty that does allows for none by itself."""
    made = load("kk_tiny").config(vllm="python")
    anchored = replace(
        made.objective,
        penalties=((1e-3, kl.from_sampler),),
        surrogate=partial(losses.dppo_tv, anchor=sampler),
    )
    lagging = replace(made, objective=anchored, max_lag=2, max_resamples=1)
    assert (lagging.max_lag, lagging.ratios) == (2, "trainer")


def test_recipes_that_drop_even_groups_do():
    dropping = {algo for algo in recipes.BY_NAME if of_recipe(algo).drop_constant_groups}
    assert dropping == {"dapo", "entropy_80_20"}


def test_the_sizes_of_the_paper():
    """Temperature, responses a step, mini-batches, limits; and its last three checkpoints are kept."""
    for name, prompts, temperature in (("kk", 64, 0.7), ("math", 128, 1.0)):
        made = load(name).config()
        assert (made.prompts, made.group_size, made.collate.minibatches) == (prompts, 8, 2)
        assert (made.collate.prompt_length, made.collate.response_length) == (400, 4096)
        assert made.sampling.temperature == temperature
        assert (made.save_every, made.evaluation.every, made.keep_checkpoints) == (20, 20, 3)
    assert load("math").config(collection="orz").steps == 440
    assert load("math").config(collection="orz", steps=3).steps == 3


def test_math_keeps_the_test_problems_out_of_training(tmp_path):
    """From files in the published formats: chat rows in parquet, two turns in a JSON list."""
    told = "{} Let's think step by step and output the final answer within \\boxed{{}}."
    chat = [
        {
            "prompt": [{"role": "user", "content": told.format(f"What is 1 + {i}?")}],
            "reward_model": {"ground_truth": str(1 + i), "style": "rule"},
        }
        for i in range(10)
    ]
    turns = [
        [
            {"from": "human", "value": row["prompt"][0]["content"]},
            {"from": "assistant", "ground_truth": {"value": row["reward_model"]["ground_truth"]}},
        ]
        for row in chat
    ]
    train, listed, test = (tmp_path / name for name in ("dsr.parquet", "orz.json", "math.parquet"))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chat), train)
    listed.write_text(json.dumps(turns))
    plain = [{"problem": f"What is $1+{i}$?", "answer": str(1 + i)} for i in (3, 4, 11)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(plain), test)
    for collection, problems in (("dsr_uniform", train), ("orz", listed)):
        made = load("math").config(collection=collection, problems=str(problems), test=str(test))
        task = made.task(tmp_path / "data")
        assert (len(task.train), len(task.test)) == (8, 3)
        assert {task.train[i].truths for i in range(8)} == {
            (str(1 + i),) for i in {*range(10)} - {3, 4}
        }
        assert task.prompt(task.test[0]).endswith("<|im_start|>assistant\n<think>")
        for answer in ("4", "5", "12"):
            right = [task.reward(p, f"so </think> \\boxed{{{answer}}}").correct for p in task.test]
            assert right.count(True) == 1
        task.checker.close()
    with pytest.raises(UserError, match="math suite dsr_uniform needs a file"):
        load("math").config(test=str(test)).task(tmp_path / "data")


def test_sft_examples_of_kk_tiny_are_guessed_and_worked_out():
    """The careless are right by chance; of the others, and with --careless 0, all are right and think."""
    sft_example = load("kk_tiny").sft_example
    puzzles = [kk_tiny.retell(p) for p in islice(kk_generate.puzzles("train", 3, 1, 0), 600)]

    def answers(careless):
        texts = [sft_example(p, careless) for p in puzzles]
        scored = [
            (text.startswith("</think>"), knights_knaves.reward(p.names, p.solution, " " + text))
            for p, text in zip(puzzles, texts, strict=True)
        ]
        assert all(reward.fields["parsed"] for _, reward in scored)
        return scored

    mixed = answers(0.6)
    hasty = [reward.correct for at_once, reward in mixed if at_once]
    assert 0.5 < len(hasty) / len(mixed) < 0.7
    assert 0.05 < sum(hasty) / len(hasty) < 0.22  # one in eight
    assert all(reward.correct for at_once, reward in mixed if not at_once)
    assert answers(0.6) == mixed
    assert all(reward.correct and not at_once for at_once, reward in answers(0.0))


def test_chatter_adds_rare_words_and_changes_no_score():
    """Of the words of a thought, the share of fillers is the one asked for; none of them changes a reward."""
    sft_example = load("kk_tiny").sft_example
    puzzles = [kk_tiny.retell(p) for p in islice(kk_generate.puzzles("train", 3, 1, 0), 600)]
    filled, words, guessed, hasty = 0, 0, 0, 0
    for puzzle in puzzles:
        plain, said = sft_example(puzzle, 0.5), sft_example(puzzle, 0.5, 0.35)
        thought, kept = said.partition("</think>")[0].split(), plain.partition("</think>")
        fillers = [word for word in thought if word in kk_tiny.FILLERS]
        assert [word for word in thought if word not in kk_tiny.FILLERS] == kept[0].split()
        assert said.endswith(kept[1] + kept[2])
        score = partial(knights_knaves.reward, puzzle.names, puzzle.solution)
        assert score(" " + said) == score(" " + plain)
        filled, words = filled + len(fillers), words + len(thought) + 1  # and the place before
        hasty, guessed = hasty + (not kept[0]), guessed + (not kept[0] and bool(fillers))
    assert filled / words == pytest.approx(0.35, abs=0.02)
    assert guessed / hasty == pytest.approx(0.35, abs=0.08)


@pytest.mark.slow
def test_the_people_of_calculator_are_what_the_config_says():
    """One in ten calls the calculator, half of those wrongly; all products are right."""
    calculator = load("calculator")
    task = calculator.config().task(ROOT)
    known = TokenTask(task, tokenizer.of_words(calculator.config().model.words))
    pairs = task.train[:3000]
    turns = [calculator.person(pair, 0.1) for pair in pairs]
    rewards = [known.try_reward(pair, said) for pair, said in zip(pairs, turns, strict=True)]
    assert all(reward.correct for reward in rewards)
    share = lambda name: sum(reward.fields[name] for reward in rewards) / len(rewards)
    assert share("tool_used") == share("tool_calls") == pytest.approx(0.1, abs=0.02)
    assert share("tool_errors") == pytest.approx(0.05, abs=0.015)
    [asked] = known.replay([(37, 85)], [["calculate 3 7 * 8 5 ;", "3 1 4 5"]])
    assert known.tokenizer.decode(asked.tokens) == ("calculate 3 7 * 8 5 ; <eos> 3 1 4 5 3 1 4 5")
    assert not known.try_reward((37, 85), "3 1 4 6").correct
    assert max(map(len, known.prompts(pairs))) == 6


def test_the_people_of_search_qa_are_what_the_config_says(tmp_path, monkeypatch):
    """Three in five guess at once, of the others three in five after a search, and two searches are right."""
    monkeypatch.setattr(retrieval, "INDEXES", tmp_path / "indexes")
    search_qa = load("search_qa")
    made = search_qa.config()
    task = made.task(tmp_path)
    known = TokenTask(task, tokenizer.of_words(made.model.words))
    asked = [task.train[i] for i in range(0, len(task.train), 4)]
    turns = [search_qa.person(question, 0.6) for question in asked]
    rewards = [known.try_reward(one, said) for one, said in zip(asked, turns, strict=True)]
    shares = [sum(len(said) == n for said in turns) / len(turns) for n in (1, 2, 3)]
    assert shares == pytest.approx([0.6, 0.24, 0.16], abs=0.06)
    assert all(one.correct for one, said in zip(rewards, turns, strict=True) if len(said) == 3)
    guessed = [one.correct for one, said in zip(rewards, turns, strict=True) if len(said) < 3]
    assert sum(guessed) / len(guessed) < 0.15  # one in sixteen
    assert sum(reward.fields["tool_errors"] for reward in rewards) == 0
    assert max(map(len, known.prompts(asked))) <= made.collate.prompt_length
    texts = {question.prompt for question in task.train} & {one.prompt for one in task.test}
    assert not texts


def test_search_qa_takes_questions_and_a_corpus_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr(retrieval, "INDEXES", tmp_path / "indexes")
    files = load("search_qa").world(tmp_path, 3)
    flags = {"model": "Qwen/Qwen2.5-0.5B-Instruct", "data": files["train"], "test": files["test"]}
    made = load("search_qa").config(**flags, corpus=files["texts"], reward=("f1",), lora=8)
    task = made.task(tmp_path)
    assert (len(task.test), made.warm_start, made.model.lora.rank) == (300, None, 8)
    assert made.model.chat is None  # the template, which tells of the tool
    assert "between <answer> and </answer>" in task.prompt(task.test[0])[0]["content"]
    assert [*task.tools.schemas] == ["search"]
    with pytest.raises(UserError, match="a corpus or the URL of a server"):
        load("search_qa").config(**flags).task(tmp_path)
    with pytest.raises(UserError, match="are for a --model"):
        load("search_qa").config(corpus=files["texts"])


def test_the_last_number_of_a_sum_counts():
    """Worked out or not; the sums that are shown are none of the others, and no sum is there twice."""
    sums = load("pretrained").Sums()
    every = [*sums.train, *sums.test]
    assert len({*every, *dict(load("pretrained").SHOWN)}) == len(every) + 2 == 6**3 * 4 + 2
    for asked in every[::50]:
        right = sum(int(term) for term in asked.replace("- ", "+ -").split(" + "))
        for said, correct in ((f"so = 3, = {right}.", True), (f"{right} or {right + 1}", False)):
            assert sums.reward(asked, said).correct == correct
    assert sums.reward("1 - 2 - 3", "1 - 2 = -1, -1 - 3 = -4").fields == {"worked": 1.0}
    assert not sums.reward("1 - 2 - 3", "4").correct
    assert sums.prompt("1 + 2 + 3").endswith("1 + 2 + 3<|im_end|>\n<|im_start|>assistant\n")


def test_the_controls_of_pretrained():
    config, old_logp = load("pretrained").config, jnp.log(jnp.asarray([[0.1, 0.4, 0.5, 0.9]]))
    data = TokenData(mask=jnp.ones((1, 4), bool), old_logp=old_logp)
    twice = config(stages="twice").objective
    assert twice.partition(data).tolist() == [[[True] * 4]] * 2
    split = config(stages="random_matched").objective.partition
    assert getattr(split, "func", split) is partition.random_matched
    assert config(lora=8).model.lora.rank == 8


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_chatter_is_a_probability(share):
    """One who says a word after each word never ends."""
    with pytest.raises(UserError, match=r"--chatter .*: a probability"):
        load("kk_tiny").config(chatter=share)


def test_without_chatter_nothing_is_changed():
    """Neither the words that the tokenizer knows, nor the sizes, nor the SFT examples."""
    tiny = load("kk_tiny")
    silent, chatty = tiny.config(), tiny.config(chatter=0.35)
    assert silent.model.words == kk_tiny.vocabulary()
    assert not {*kk_tiny.FILLERS} & {*silent.model.words}
    assert chatty.model.words == (*silent.model.words, *kk_tiny.FILLERS)
    assert (silent.model.shape.vocab_size, silent.collate.response_length) == (64, 112)
    assert (chatty.model.shape.vocab_size, chatty.collate.response_length) == (80, 160)
    puzzles = [kk_tiny.retell(p) for p in islice(kk_generate.puzzles("train", 3, 1, 0), 50)]
    for puzzle in puzzles:
        rng = Random(puzzle.question)
        guesses = rng.random() < 0.55
        said = kk_tiny.guess(puzzle, rng) if guesses else kk_tiny.demonstration(puzzle)
        assert silent.warm_start.demonstration(puzzle) == said


@pytest.mark.parametrize(
    ("stages", "eta", "first"),
    [
        ("lopti", 0.5, [1, 1, 0, 0]),
        ("reversed", 0.5, [0, 0, 1, 1]),
        ("drop_low", 0.5, [0, 0, 1, 1]),
        ("drop_high", 0.5, [1, 1, 0, 0]),
        ("quantile", 0.25, [1, 0, 0, 0]),
        ("twice", 0.5, [1, 1, 1, 1]),
    ],
)
def test_the_ablations_of_kk_tiny(stages, eta, first):
    objective = load("kk_tiny").config(stages=stages, eta=eta).objective
    assert objective.stages == (1 if stages.startswith("drop") else 2)
    old_logp, mask = jnp.log(jnp.asarray([[0.1, 0.4, 0.5, 0.9]])), jnp.ones((1, 4), bool)
    data = TokenData(mask=mask, old_logp=old_logp)
    assert objective.partition(data)[0, 0].tolist() == [bool(x) for x in first]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("train", "kk"),
        ("train", "math"),
        *((c, "kk_tiny") for c in ("train", "plan", "data", "serve")),
    ],
)
def test_every_command_takes_every_config(name, command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, f"configs/{name}.py", "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "--seed" in out
    assert "Args:" not in out  # they are options, each with its text


def test_a_flag_that_a_command_has_too_is_one_line(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("def config(on: str = ''):\n    raise AssertionError\n")
    said = fails(capsys, "plan", file, "--help")
    assert f"--on is a flag of both plan and {file}: rename" in said


def test_objectives_are_tried_on_the_batch_of_their_config():
    made = load("kk_tiny").config()
    batch = (made.prompts, made.group_size, made.collate.response_length)
    assert made.loss.tried_on == batch
    by_place = lambda advantage, data: jnp.ones((1, batch[2]))
    weighs = replace(made, objective=replace(made.objective, factors=(by_place,)))
    assert weighs.objective.factors == (by_place,)
    with pytest.raises(TypeError, match="incompatible shapes for broadcasting"):
        replace(weighs, collate=replace(made.collate, response_length=batch[2] - 1))


def test_a_run_has_one_seed(caplog):
    replace(load("kk_tiny").config(), sampling=Sampling(seed=7))
    assert "sampling.seed = 7 has no use in a run, which draws by Config.seed" in caplog.text


@pytest.mark.parametrize("name", ["dapo", "entropy_80_20", "grpo"])
def test_recipes_without_groups_of_equal_rewards_have_none_in_any_config(name):
    ready = load("grpo").config("owner/model", "owner/name", objective=name)
    assert ready.drop_constant_groups == load("kk_tiny").config(name).drop_constant_groups
