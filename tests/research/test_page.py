"""The page of tokens: its numbers are those of the step, and what a model wrote cannot act in it."""

import base64
import json
import re
import shutil
import threading
import time
import urllib.error
import urllib.request
from concurrent import futures
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jl
from jaxrl_llm.cli import view
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import optimizers, tokens, update
from jaxrl_llm.models import qwen2
from jaxrl_llm.models import tokenizer as tokenizers
from jaxrl_llm.objectives import kl
from jaxrl_llm.research import page
from jaxrl_llm.tasks.task import Reward
from jaxrl_llm.training import tokens as kept
from tests import tiny
from tests.reference import peer
from tests.training.test_reinforce import Policy

OBJECTIVE = replace(
    jl.recipes.with_ar_and_lopti(jl.recipes.grpo(14), alpha=0.3, eta=0.02),
    penalties=((1e-3, kl.k3),),
)
SCORES = (1.0, 0.0, 0.2, 1.0, 0.0, 0.0, 0.0, 1.0)
ROWS = range(4, 8)  # the second of two groups


def label_logps(params, one):
    """Of one response, by a forward pass on it alone."""
    definition, _ = qwen2.graph(tiny.SHAPE)
    sequence = jnp.asarray([[*one.prompt, *one.tokens]])
    model = qwen2.nnx.merge(definition, params)
    logits = np.asarray(model(sequence, jnp.arange(sequence.shape[1])[None]) @ model.head.T)
    logps = np.asarray(jax.nn.log_softmax(logits[0, :-1], -1))
    return logps[np.arange(len(logps)), sequence[0, 1:]][len(one.prompt) - 1 :]


@pytest.mark.parametrize(
    ("mesh", "pack", "ratios"),
    [
        ((1, 1, 1), False, "trainer"),
        ((1, 1, 1), True, "sampler"),
        tiny.slow((2, 2, 2), True, "trainer"),
    ],
    ids=str,
)
def test_numbers_are_those_of_plain_forward_passes(mesh, pack, ratios):
    """The trainer's, whichever log-probs the ratios are of."""
    mesh, optimizer = tiny.mesh_of(*mesh), optimizers.adamw(3e-2)
    falling = lambda one: [-0.5 * (1 + i) for i in range(one.length)]
    responses = [replace(one, logps=falling(one)) for one in tiny.responses()]
    _, before = tiny.policy(mesh=mesh)
    shards = 4 if mesh.size > 1 else 1
    with jax.set_mesh(mesh):
        state = update.init_state(jax.tree.map(jnp.copy, before), optimizer)
        reference = jax.tree.map(lambda x: 1.01 * x, before)
        made = tiny.step(
            Policy(), OBJECTIVE, optimizer, tiny.collator(shards=shards, pack=pack), mesh, state,
            reference=reference, sampler_ratios=ratios == "sampler",
        )  # fmt: skip
        rewards = [Reward(x, x == 1.0) for x in SCORES]
        groups = tiny.groups(responses, rewards, n=4)
        batch, reward = made.batch(groups)
        seen, _ = made.score(state.params, batch, groups)
        seen["teacher_logp"] = seen["ref_logp"] - 1
        credited = made.programs.credit(batch, reward, **seen)
        state, _ = made.programs.update(state, credited)
        numbers = made.token_stats(state.params, batch, reward, credited, ROWS)
    alone = lambda params: jax.tree.map(jnp.asarray, jax.device_get(params))
    scores = np.asarray(SCORES[4:])
    advantage = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
    for i, row in enumerate(ROWS):
        old, new, ref = (
            label_logps(alone(p), responses[row]) for p in (before, state.params, reference)
        )
        found = {name: x[i, : len(old)] for name, x in numbers.items()}
        close = partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5)
        close(found["old"], old)
        close(found["new"], new)
        close(found["reference"], ref)
        close(found["teacher"], ref - 1)
        close(found["entropy"], -old)  # what the policy of this test calls so
        close(found["sampler"], responses[row].logps)
        close(found["advantage"], np.full(len(old), advantage[i]))
        base = old if ratios == "trainer" else np.asarray(responses[row].logps)
        close(found["factor"], 0.3 * np.exp(base) + 0.7)
        np.testing.assert_array_equal(found["weight1"] > 0, base <= np.log(0.02))
        np.testing.assert_array_equal(found["weight2"] > 0, base > np.log(0.02))
        ratio = np.exp(new - base)
        flat = (ratio > 1.2) if advantage[i] > 0 else (ratio < 0.8)
        np.testing.assert_array_equal(found["clip"], flat)
        assert all(np.isnan(x[i, len(old) :]).all() for x in numbers.values())
    clip, weight = (numbers[name][~np.isnan(numbers[name])] for name in ("clip", "weight1"))
    assert {*np.unique(clip)} == {0.0, 1.0} == {*np.unique(weight > 0)}


EVIL = ("</script><script>alert(1)</script>", "<img/src=x>", "\u202eabc", "\x1b[31m", "&lt;")


@pytest.fixture
def run(tmp_path):
    """A folder as a run leaves it, of two steps; words and prompts of the model try to act."""
    folder = tmp_path / "run"
    tokenizers.of_words([*EVIL, *"abc"]).save(folder / "model")
    responses = tiny.trajectories([[7]] * 4, [[2, 3, 7], [4, 1], [5, 6, 8, 9], [3]])
    groups = tiny.groups(responses, [Reward(float(i), i > 1, {"f": 0.5}) for i in range(4)])
    width = lambda x: np.asarray([[*range(i, i + 4)] for i in range(4)], np.float32) * x
    for step in (3, 4):
        numbers = {"old": width(-0.1 * step), "new": width(-0.11 * step), "sampler": width(-1.0)}
        numbers |= {
            "advantage": width(1),
            "factor": width(2),
            "clip": width(0),
            "weight1": width(1),
        }
        kept.write(folder, step, groups, [EVIL[0]] * 2, numbers)
    lines = [{"step": s, "phase": "reinforce", "reward": s / 10} for s in (3, 4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


class Parts(HTMLParser):
    """The elements of a page, and the JSON in it."""

    def __init__(self, text):
        super().__init__()
        self.names, self.scripts, self._inside = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self._inside = tag == "script"

    def handle_data(self, data):
        if self._inside:
            self.scripts.append(data)
            self._inside = False


def numbers_of(data, name):
    return np.frombuffer(base64.b64decode(data["numbers"][name]), "<f4")


def test_a_page_holds_what_was_kept_and_nothing_that_acts(run, capsys):
    view.main((str(run),), out=str(run / "page.html"))
    assert "page.html" in capsys.readouterr().out
    text = (run / "page.html").read_text()
    parts = Parts(text)
    assert parts.names.count("script") == 2
    assert not {"img", "link", "iframe"} & {*parts.names}
    assert "http" not in re.sub(r'"http://www.w3.org/2000/svg"|http-equiv', "", text)
    data = json.loads(parts.scripts[0])
    assert [(s["run"], s["step"]) for s in data["steps"]] == [(0, 3), (0, 4)]
    ids = np.frombuffer(base64.b64decode(data["token"]), "<i4")
    words = "".join(data["pieces"][i] for i in ids[:3]).split()
    assert words == [EVIL[0].replace("alert(1)", "alert(1)"), EVIL[1], "a"]
    moved, old = numbers_of(data, "moved"), numbers_of(data, "old")
    assert len(moved) == 20
    np.testing.assert_allclose(old[:3], [0.0, -0.3, -0.6], rtol=1e-3)
    np.testing.assert_allclose(moved[:3], [0.0, -0.03, -0.06], rtol=1e-3)
    second = data["steps"][1]["responses"][2]
    assert (second["start"], second["tokens"], second["reward"], second["group"]) == (15, 4, 2.0, 1)
    np.testing.assert_allclose(old[15:19], -0.4 * np.arange(2, 6), rtol=1e-3)
    assert data["runs"][0]["curves"]["reward"] == [[3, 0.3], [4, 0.4]]


def test_turns_are_where_they_were(run):
    """A response of two turns, with what the environment said between them, and one of one turn."""
    turns = [((0, 2), (3, 4)), ((0, 1),)]
    responses = tiny.trajectories(
        [[7]] * 2, [[2, 3, 4, 5], [6]], turns=turns, turn_rewards=[(0.5, 1.0), ()]
    )
    numbers = {name: np.asarray([[1, 2, 4], [8, 0, 0]], np.float32) for name in ("old", "new")}
    kept.write(run, 5, tiny.groups(responses, [Reward(1.0, True)] * 2), ["a"], numbers)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "phase": "reinforce"}\n')
    data = page.gathered([run], 1000)
    first, second = data["steps"][-1]["responses"]
    assert (first["turns"], second["turns"]) == ([[0, 2], [3, 4]], [[0, 1]])
    assert first["turn_rewards"] == [0.5, 1.0]
    assert "turns" not in data["steps"][0]["responses"][0]
    assert "turn_rewards" not in second
    sampled = np.frombuffer(base64.b64decode(data["sampled"]), np.uint8)[first["start"] :]
    assert sampled.tolist() == [1, 1, 0, 1, 1]
    old = numbers_of(data, "old")[first["start"] :]
    np.testing.assert_array_equal(old, [1, 2, np.nan, 4, 8])


def test_of_a_long_run_steps_evenly_apart_are_shown(run):
    for step in range(5, 14):
        (run / "tokens" / f"step-{step:06d}.npz").write_bytes(
            (run / "tokens" / "step-000003.npz").read_bytes()
        )
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step": {s}, "phase": "reinforce"}}\n' for s in range(5, 13))
    shown = [s["step"] for s in page.gathered([run], 50)["steps"]]
    assert shown == [3, 5, 7, 10, 12]  # 13 was undone by a resume, and not done again yet
    ends = [s["step"] for s in page.gathered([run], 9)["steps"]]
    assert ends == [3, 12]  # though one has more tokens than that


def test_what_cannot_be_shown_is_said(run, tmp_path):
    (tmp_path / "empty").mkdir()
    nowhere = ("there is no folder", [tmp_path / "none"])
    for said, words in (nowhere, ("kept no tokens", [tmp_path / "empty"]), ("folders of", [])):
        with pytest.raises(UserError, match=said):
            view.main(tuple(map(str, words)), out=str(tmp_path / "page.html"))
    (run / "tokens" / "step-000004.npz").write_bytes(b"PK\x03\x04 half")
    with pytest.raises(UserError, match=r"step-000005.npz cannot be read"):
        page.written(run, 5)  # a step that has none
    with pytest.raises(UserError, match=r"step-000004.npz cannot be read"):
        view.main((str(run),), out=str(tmp_path / "page.html"))
    assert not (tmp_path / "page.html").exists()


def test_any_damage_to_kept_tokens_is_said(run):
    path = kept.at(run, 4)
    whole, said = path.read_bytes(), 0
    flipped = lambda i: whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :]
    for content in (b"", *map(flipped, range(0, len(whole), 7))):
        path.write_bytes(content)
        try:
            kept.read(run, 4)
        except UserError:
            said += 1
    assert said > len(whole) // 14  # the rest lies in dates and the like


def test_runs_of_the_same_name_are_told_apart(run, tmp_path):
    for name in "ab":
        shutil.copytree(run, tmp_path / name / "seed0")
    data = page.gathered([tmp_path / name / "seed0" for name in "ab"], 1000)
    assert [one["name"] for one in data["runs"]] == ["a/seed0", "b/seed0"]


def test_a_served_page_says_what_is_wrong_in_any_script(run, tmp_path):
    folder = run.rename(tmp_path / "пробег")
    server = view.server((str(folder),), 1000, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with server:
        (folder / "tokens" / "step-000004.npz").write_bytes(b"")
        with pytest.raises(urllib.error.HTTPError, match="503") as error:
            urllib.request.urlopen(server.address, timeout=300)
        assert "пробег/tokens/step-000004.npz cannot be read" in error.value.read().decode()
        server.shutdown()


def test_a_served_page_wants_its_key_and_shows_new_steps(run, capsys):
    server = view.server((str(run),), 1000, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with server:
        get = lambda where: urllib.request.urlopen(where, timeout=300).read().decode()
        address = server.address
        assert json.loads(get(address + "data"))["live"]
        assert "<html" in get(address)
        for where in (address.rsplit("/", 2)[0] + "/", address[:-2] + "/data"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get(where)
        (run / "tokens" / "step-000004.npz").unlink()
        assert len(json.loads(get(address + "data"))["steps"]) == 1
        server.shutdown()


def test_what_a_server_of_the_page_meets_is_no_traceback(run, monkeypatch, capfd):
    """A tab that was closed, a file system that is away."""
    server = view.server((str(run),), 1000, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with server:
        for error in (ConnectionResetError("gone"), BrokenPipeError("gone")):
            try:
                raise error
            except ConnectionError:
                server.handle_error(None, ("127.0.0.1", 1))
        assert capfd.readouterr() == ("", "")
        away = OSError(5, "Input/output error")
        monkeypatch.setattr(page, "gathered", lambda *_: (_ for _ in ()).throw(away))
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(server.address, timeout=300)
        server.shutdown()
    assert "Traceback" not in capfd.readouterr().err


def test_one_request_at_a_time_reads_the_runs(run, monkeypatch):
    server, gathered = view.server((str(run),), 1000, 0), page.gathered
    inside, most = [], []

    def slow(*given):
        inside.append(given)
        most.append(len(inside))
        time.sleep(0.2)
        inside.pop()
        return gathered(*given)

    monkeypatch.setattr(page, "gathered", slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with server, futures.ThreadPoolExecutor(3) as threads:
        read = lambda _: urllib.request.urlopen(server.address, timeout=300).status
        assert [*threads.map(read, range(3))] == [200] * 3
        server.shutdown()
    assert most == [1] * 3


@pytest.mark.parametrize(
    ("name", "kept_as", "sign"),
    [
        ("new", "moved", 1),
        ("sampler", "less_sampler", -1),
        ("reference", "less_reference", -1),
        ("teacher", "less_teacher", -1),
    ],
)
def test_in_16_bits_a_small_difference_keeps_its_digits(name, kept_as, sign):
    numbers = {"old": np.float32([-9.123]), "new": np.float32([-9.123])}
    numbers[name] = np.float32([-9.12345])
    found = tokens.rounded(numbers)
    np.testing.assert_allclose(found[kept_as], sign * -0.00045, rtol=2e-3)
    assert name not in found


def test_what_16_bits_have_no_room_for_keeps_its_digits():
    """The weight of a token among millions, and an advantage of rewards that are not scaled."""
    numbers = {"old": np.float32([-1.0]), "new": np.float32([-1.0])}
    numbers |= {"weight1": np.float32([3e-8]), "advantage": np.float32([-1e5])}
    found = tokens.rounded(numbers)
    for name in ("weight1", "advantage"):
        np.testing.assert_array_equal(found[name], numbers[name])


def test_pieces_add_up_to_the_text():
    words = tokenizers.of_words(["a", "b"])
    assert "".join(words.pieces([2, 3, 1])) == "a b <eos>"
    assert words.pieces([2, 99, 3])[1] == "\ufffd"


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "length"), [(40, 12), (400, 125)], ids=["small", "large"])
def test_in_a_browser(rows, length, run, tmp_path):
    """Every control, the link, light and dark, wide and narrow; 100,000 tokens too."""
    rng = np.random.default_rng(0)
    for folder in (run, tmp_path / "other"):
        if folder != run:
            shutil.copytree(run, folder)
            staged = [{"step": s, "phase": "reinforce", "grad_norm/stage1": 1.0} for s in (3, 4)]
            with (folder / "metrics.jsonl").open("a") as file:
                file.write("".join(json.dumps(x) + "\n" for x in staged))
        for step in (3, 4):
            numbers = {
                name: rng.normal(size=(rows, length)).astype(np.float32)
                for name in ("old", "new", "sampler", "advantage", "factor", "clip", "entropy")
            }
            numbers["old"] = -np.abs(numbers["old"])
            numbers["weight1"] = (numbers["old"] < -0.7).astype(np.float32)
            numbers["weight2"] = 1 - numbers["weight1"]
            responses = [rng.integers(2, 10, 2 + i % (length - 1)).tolist() for i in range(rows)]
            rewards = [Reward(float(i), i % 2 == 1) for i in range(rows)]
            turns = [((0, max(1, len(r) // 3)), (len(r) // 2, len(r))) for r in responses]
            made = tiny.trajectories([[7]] * rows, responses, turns=turns)
            prompts = [EVIL[i // (rows // 4)] for i in range(rows // 2)]
            kept.write(folder, step, tiny.groups(made, rewards), prompts, numbers)
    view.main((str(run), str(tmp_path / "other")), out=str(tmp_path / "page.html"))
    peer.browser(tmp_path / "page.html", tmp_path / "picture", readable=rows == 40)
    assert len([*tmp_path.glob("picture-*.png")]) == 4
