"""The public names: they are there, light, documented by examples that run, and exact."""

import ast
import dataclasses
import doctest
import inspect
import json
import math
import pathlib
import re
import shutil
import subprocess
import sys
from concurrent import futures

import jax
import numpy as np
import pytest

import jaxrl_llm as jl
from jaxrl_llm.learning import update
from jaxrl_llm.models import sharding
from tests import public, tiny

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "python.md"
ON_THE_PAGE = {"train"}  # whose example is a whole run
FEW = jl.Sampling(max_tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("public")
    public.write_model(where / "model")
    return where


@pytest.fixture(scope="module", params=[1, 8])
def model(request, folder):
    devices = jax.devices()[: request.param]
    return jl.load(folder / "model", mesh=sharding.make_mesh(fsdp=-1, devices=devices))


def test_importing_the_package_does_not_import_jax():
    code = "import sys, jaxrl_llm; dir(jaxrl_llm); sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_names_are_those_that_type_checkers_know():
    tree = ast.parse((ROOT / "jaxrl_llm" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    known = {
        alias.asname: f"{node.module}.{alias.name}" for node in block.body for alias in node.names
    }
    assert sorted(known) == jl.__all__
    assert set(jl.__all__) <= set(dir(jl))
    for name in jl.__all__:
        module, _, member = known[name].rpartition(".")
        there = __import__(module, fromlist=[member])
        assert getattr(there, member) is getattr(jl, name)


def test_ids_need_no_tokenizer(model, folder, tmp_path):
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        if (folder / "model" / name).exists():
            shutil.copy(folder / "model" / name, tmp_path)
    bare, ids = jl.load(tmp_path, mesh=model.mesh), [[2, 3, 4, 5]]
    assert len(repr(model)) < 1000  # a notebook prints it, without its arrays
    np.testing.assert_array_equal(jl.token_logps(bare, ids), jl.token_logps(model, ids))
    short = jl.Sampling(max_tokens=5, stop=model.tokenizer.stops)
    [there], [here] = (jl.generate(one, ids, short) for one in (model, bare))
    assert here == dataclasses.replace(there, text="")
    for asks in (
        lambda: jl.generate(bare, ["one two"], short),
        lambda: bare.tokenizer.encode("one"),
        lambda: bare.tokenizer.decode([2]),
        lambda: len(bare.tokenizer),
        lambda: bare.tokenizer.eos,
    ):
        with pytest.raises(jl.UserError, match=r"has no tokenizer: add tokenizer\.json"):
            asks()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        _ = jl.lode


@pytest.mark.parametrize(
    "name",
    [n for n in jl.__all__ if n not in ON_THE_PAGE and not inspect.ismodule(getattr(jl, n))],
)
def test_every_name_has_an_example_that_runs(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    text = inspect.getdoc(getattr(jl, name)) or ""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    example = doctest.DocTestParser().get_doctest(text, {"jl": jl}, name, None, None)
    assert example.examples
    problems = []
    doctest.DocTestRunner(optionflags=flags).run(example, out=problems.append)
    assert "".join(problems) == ""


def test_the_page_runs_and_leaves_out_no_name(folder, monkeypatch):
    monkeypatch.chdir(folder)
    text = PAGE.read_text()
    space = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), space)
    named = set(re.findall(r"\bjl\.(\w+)", text))
    assert named - {"__version__"} == set(jl.__all__)


def rows(count, longest, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, longest + 1, count)
    return [rng.integers(0, public.SHAPE.vocab_size, n).tolist() for n in sizes]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_trainers_scorer_bit_for_bit(model, temperature):
    """Every response token of a batch, as the collator lays it out for the trainer."""
    asked, answered = rows(16, 20), rows(16, 44, seed=1)
    responses = tiny.trajectories(asked, answered)
    shards = model.mesh.shape["data"] * model.mesh.shape["fsdp"]
    batch = jl.Collator(prompt_length=20, response_length=44, shards=shards)(responses)
    with jax.set_mesh(model.mesh):
        score = update.make_score(model.policy.logp(temperature))
        trainers = np.asarray(batch.layout.to_rows(score(model.params, batch.inputs)))
    whole = [p + r for p, r in zip(asked, answered, strict=True)]
    logps = jl.token_logps(model, whole, temperature=temperature)
    for row, p, r, expected in zip(logps, asked, answered, trainers, strict=True):
        assert np.array_equal(row[len(p) - 1 : len(p) + len(r) - 1], expected[: len(r)])
        assert not row[len(p) + len(r) - 1 :].any()


def test_padding_company_and_form_change_nothing(model):
    """Ragged lists, padded arrays with lengths, alone or together: the same numbers, 0 elsewhere."""
    ragged = [*rows(5, 100), [], [3]]
    together = jl.token_logps(model, ragged)
    width = max(map(len, ragged))
    padded = np.full((len(ragged), width), 1)
    for i, row in enumerate(ragged):
        padded[i, : len(row)] = row
    again = jl.token_logps(model, padded, [len(row) for row in ragged])
    assert together.shape == (7, width - 1)
    assert together.dtype == np.float32
    assert np.array_equal(together, again)
    for i, row in enumerate(ragged):
        size = max(len(row) - 1, 0)
        assert (together[i, :size] < 0).all()
        assert not together[i, size:].any()
        alone = jl.token_logps(model, [row])
        np.testing.assert_allclose(alone[0], together[i, :size], atol=1e-5)


def test_a_few_programs_serve_all_shapes(model):
    with tiny.compilations() as compiled:
        for seed in range(6):
            jl.token_logps(model, rows(5 + seed, 60, seed), temperature=0.9)
    assert 1 <= len(compiled) <= 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: jl.token_logps(m, [[1, 10]]),
            "row 0 has a token that is none of the model's 10",
        ),
        (lambda m: jl.token_logps(m, ["text"]), "row 0 is no list of token ids: give [model.tok"),
        (lambda m: jl.token_logps(m, [1, 2]), "row 0 is no list of token ids"),
        (lambda m: jl.token_logps(m, [[0.5, 1.0]]), "row 0 is no list of token ids"),
        (lambda m: jl.token_logps(m, 3), "tokens are rows of token ids"),
        (lambda m: jl.token_logps(m, [[1, 2]], [1.5]), "lengths are one for each row"),
        (lambda m: jl.token_logps(m, [[1, 2]], [3]), "none longer than its row"),
        (lambda m: jl.token_logps(m, [[1, 2]], [1, 1]), "one for each row"),
        (lambda m: jl.token_logps(m, [[1] * 257]), "room for 256"),
        (lambda m: jl.token_logps(m, [[1, 2]], temperature=0), "temperature = 0"),
        (lambda m: jl.token_logps(m, [[1, 2]], temperature=math.nan), "temperature = nan"),
        (lambda m: jl.token_logps(m, [[1, 2]], temperature=math.inf), "temperature = inf"),
        (
            lambda m: jl.generate(m, [[2, 999999]], FEW),
            "row 0 has a token that is none of the model's",
        ),
        (lambda m: jl.generate(m, ["one", [2, -5]], FEW), "row 1 has a token that is none"),
        (lambda m: jl.generate(m, [[2, 3.9]], FEW), "generate: row 0 is no list of token ids"),
        (lambda m: jl.generate(m, [2, 3], FEW), "generate: row 0 is no list of token ids"),
        (lambda m: jl.generate(m, "one two"), "prompts is a list"),
        (lambda m: jl.generate(m, ["one"] * 2, jl.Sampling(max_tokens=256)), "lower max_tokens"),
        (lambda m: jl.generate(m, ["nine"]), "cannot read 'nine'"),
        (lambda m: jl.load("nobody/../x"), "no model folder"),
        (lambda m: jl.load("model", dtype="half"), "dtype"),
    ],
)
def test_wrong_use_is_one_line(model, call, message, folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(jl.UserError, match=re.escape(message)) as error:
        call(model)
    assert "\n" not in str(error.value)


def test_messages_go_by_the_chat_template(tmp_path):
    """As a run asks a chat model; a text is gone on with."""
    public.write_model(tmp_path / "model")
    template = "{% for m in messages %}{{ m.content }} three {% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    model, few = jl.load(tmp_path / "model"), jl.Sampling(max_tokens=4)
    by_template = jl.generate(model, [[{"role": "user", "content": "one two"}]], few)
    assert by_template == jl.generate(model, ["one two three"], few)
    assert by_template != jl.generate(model, ["one two"], few)


def test_generated_log_probs_are_token_logps(model):
    sampling = jl.Sampling(temperature=0.8, max_tokens=12, seed=3)
    prompts = ["one two", "three", [4, 5, 6]]
    made = jl.generate(model, prompts, sampling, n=2)
    assert made == jl.generate(model, prompts, sampling, n=2)
    asked = [model.tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]
    asked = [p for p in asked for _ in range(2)]
    whole = [p + r.tokens for p, r in zip(asked, made, strict=True)]
    logps = jl.token_logps(model, whole, temperature=0.8)
    for row, prompt, response in zip(logps, asked, made, strict=True):
        found = row[len(prompt) - 1 :][: len(response.tokens)]
        np.testing.assert_allclose(found, response.logps, atol=1e-4)
        assert response.text == model.tokenizer.decode(response.tokens)
        assert response.finished == (response.tokens[-1] == model.tokenizer.eos)


def test_generation_stops_where_it_is_told(model):
    greedy = jl.Sampling(temperature=0.0, max_tokens=8)
    first = jl.generate(model, ["one"], greedy)[0].tokens[0]
    [cut] = jl.generate(model, ["one"], dataclasses.replace(greedy, stop=(first,)))
    assert cut.tokens == [first]
    assert cut.finished
    assert cut.text == ""


def test_a_text_leaves_out_the_token_that_ended_it_and_no_other(model):
    """Whichever tokens end it; cut after one that does not, it has that one's text too."""
    words, every = model.tokenizer, [*range(model.shape.vocab_size)]
    for stop in (every[2:], every[:2], every[:1]):
        sampling = jl.Sampling(max_tokens=3, stop=tuple(stop))
        for response in jl.generate(model, ["one two"], sampling, n=32):
            said = response.tokens[: len(response.tokens) - response.finished]
            assert response.text == " ".join(words.decode([token, words.eos]) for token in said)


def test_models_of_one_shape_answer_for_themselves_in_threads(folder):
    """The second waits for the first: one engine has the weights of one."""
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    one = jl.load(folder / "model", mesh=mesh)
    other = dataclasses.replace(one, params=jax.tree.map(lambda x: -x, one.params))
    greedy = jl.Sampling(temperature=0.0, max_tokens=8, stop=(0,))
    ask = lambda model: jl.generate(model, ["one two", "three"], greedy)
    alone = [ask(model) for model in (one, other)]
    assert alone[0] != alone[1]
    with futures.ThreadPoolExecutor(2) as pool:
        together = [pool.map(ask, [model] * 20) for model in (one, other)]
        for want, found in zip(alone, together, strict=True):
            assert all(answer == want for answer in found)


def test_half_precision_on_a_mesh_is_near(folder):
    whole = jl.token_logps(jl.load(folder / "model"), rows(4, 30))
    half = jl.load(folder / "model", mesh=jl.Mesh(data=2, tensor=2), dtype="bfloat16")
    assert dict(half.mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert {x.dtype.name for x in jax.tree.leaves(half.params)} == {"bfloat16"}
    np.testing.assert_allclose(jl.token_logps(half, rows(4, 30)), whole, atol=0.1)


def test_the_wheel_says_that_it_is_typed():
    """Hatchling takes every file of the package that git does not ignore."""
    typed = ROOT / "jaxrl_llm" / "py.typed"
    assert typed.exists()
    ignored = subprocess.run(["git", "check-ignore", str(typed)], cwd=ROOT, capture_output=True)
    assert ignored.returncode == 1
    assert json.dumps("jaxrl_llm") in (ROOT / "pyproject.toml").read_text()
