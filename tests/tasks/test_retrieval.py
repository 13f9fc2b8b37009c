"""Search as a tool: the text that fits comes first, and a wrong corpus, server or query is a line of text."""

import gzip
import json
import pathlib
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.learning.groups import TokenTask
from jaxrl_llm.models import tokenizer
from jaxrl_llm.tasks import questions, retrieval
from jaxrl_llm.tasks.retrieval import searching
from jaxrl_llm.tasks.task import Reward
from jaxrl_llm.tasks.tools import Toolbox
from tests.tasks.server import LATE, Server

TEXTS = [
    {"title": "mira", "text": "mira lives in oslo"},
    {"title": "oslo", "text": "oslo makes salt"},
    {"id": "3", "contents": "bob\nbob lives in lima"},
    {"title": "Zoë 1", "text": "Ångström\u2028lives"},
]


@pytest.fixture(scope="module", autouse=True)
def indexes(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("indexes")
        patch.setattr(retrieval, "INDEXES", folder)
        yield folder


def written(folder, rows=TEXTS, name="texts.jsonl"):
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = folder / name
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    return searching(written(tmp_path_factory.mktemp("corpus")), passages=2)


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("mira", "mira\nmira lives in oslo"),
        ("What is made in OSLO?", "oslo\noslo makes salt"),
        ("bob zzz", "bob\nbob lives in lima"),
        ("ångström", "Zoë 1\nÅngström\u2028lives"),
        ("zzz", "nothing was found"),
        ("the", "nothing was found"),
        ("", "nothing was found"),
        ("\ud800 \n]", "nothing was found"),
    ],
)
def test_the_text_that_fits_best_comes_first(search, query, first):
    assert search(query).split("\n\n")[0] == first


def test_so_many_passages_are_returned_and_none_that_does_not_fit(search):
    assert [len(search(query).split("\n\n")) for query in ("oslo", "lives", "salt")] == [2, 2, 1]


def test_several_search_at_once(search):
    with ThreadPoolExecutor(8) as threads:
        results = [*threads.map(search, ["mira", "salt", "bob"] * 20)]
    assert results == [search("mira"), search("salt"), search("bob")] * 20


def test_an_index_is_made_once_for_a_content(tmp_path, indexes):
    """In whatever file it is; a packed one has other bytes."""
    before = {*indexes.iterdir()}
    searching(written(tmp_path, TEXTS[:3]), workers=1)
    [made] = {*indexes.iterdir()} - before
    changed = made.stat().st_mtime_ns
    search = searching(written(tmp_path, TEXTS[:3], "other.jsonl"), workers=1, passages=9)
    assert made.stat().st_mtime_ns == changed
    assert {*indexes.iterdir()} - before == {made}
    packed = searching(written(tmp_path, TEXTS[:3], "texts.jsonl.gz"), workers=1, passages=9)
    assert packed("lives") == search("lives")
    assert {*search("lives").split("\n\n")} == {
        "mira\nmira lives in oslo",
        "bob\nbob lives in lima",
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"contents": "a"}\n{"contents": ', "texts.jsonl, line 2: not JSON"),
        ('{"contents": "a"}\n{"title": "b"}\n', "texts.jsonl.*row 1: a document has title and text, or contents"),
        ('{"contents": 7}\n', "row 0: a document"),
        ("[]\n", "row 0: a document"),
        ("", "no text to search in"),
        ('{"contents": "the, of"}\n', "no text to search in"),
    ],
)  # fmt: skip
def test_a_corpus_that_cannot_be_indexed_is_refused_in_a_line(tmp_path, indexes, content, said):
    path, before = tmp_path / "texts.jsonl", {*indexes.iterdir()}
    path.write_text(content)
    with pytest.raises(UserError, match=said) as error:
        searching(str(path))
    assert "\n" not in str(error.value)
    assert {*indexes.iterdir()} == before


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "give a corpus or the URL of a server, and not both"),
        ({"corpus": "a.jsonl", "server": "http://localhost:1"}, "and not both"),
        ({"corpus": "nowhere.jsonl"}, "No such file .* 'nowhere.jsonl'"),
        ({"server": "localhost:8000"}, "localhost:8000 is no URL"),
        ({"server": "http://me:sk@host"}, "a key in a URL would be kept by the run"),
        ({"server": "http://:sk@host"}, "a key in a URL would be kept by the run"),
        ({"server": "http://host/retrieve?key=sk"}, "a key in a URL would be kept by the run"),
    ],
)
def test_what_is_no_place_to_search_is_refused(settings, said):
    with pytest.raises(UserError, match=said):
        searching(**settings)


def test_without_its_package_a_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(UserError, match=r"pip install 'jaxrl_llm\[search\]'"):
        searching(written(tmp_path))


RUN = """
import os, sys
from jaxrl_llm.tasks import retrieval
from pathlib import Path
retrieval.INDEXES = Path(sys.argv[2])
search = retrieval.searching(sys.argv[1])
print(search("salt").replace("\\n", " "), "bm25s" in sys.modules, flush=True)
if sys.argv[3] == "waits":
    sys.stdin.read()
"""
BUSY = """
from jaxrl_llm.tasks.workers import Workers
pool = Workers(1, "tests.tasks.busy")
print("there", flush=True)
pool.ask([], 1000.0)
"""


@pytest.mark.parametrize("ending", ["ends", "waits"])
def test_the_processes_end_with_the_run(tmp_path, indexes, ending):
    """However that ends; and the run itself does not load the index."""
    command = [sys.executable, "-c", RUN, written(tmp_path), indexes, ending]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as run:
        assert run.stdout.readline() == "oslo oslo makes salt False\n"
        pids = pathlib.Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        if ending == "waits":
            assert len(pids) == 2
            maps = [pathlib.Path(f"/proc/{pid}/maps").read_text() for pid in pids]
            assert any("data.csc.index.npy" in one for one in maps)  # the index stays on disk
            assert not any("jaxlib" in one for one in maps)  # which would take the accelerator
            run.send_signal(signal.SIGKILL)
        run.wait()
    require_ended(pids)


def test_a_process_ends_with_the_run_in_the_middle_of_a_question():
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "there\n"
        [pid] = pathlib.Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        used = lambda: int(pathlib.Path(f"/proc/{pid}/stat").read_text().split()[13])
        before = used()
        while used() < before + 20:  # it computes
            time.sleep(0.05)
        run.send_signal(signal.SIGKILL)
        run.wait()
    require_ended([pid])


def require_ended(pids):
    for _ in range(1200):
        if not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
            return
        time.sleep(0.05)
    pytest.fail("a process is left")


# A server.


@pytest.fixture
def server():
    with Server() as made:
        yield made


def hits(*contents):
    found = [{"document": {"id": "1", "contents": text}, "score": 9.5} for text in contents]
    return json.dumps({"result": [found]})


def test_a_server_is_asked_as_that_of_search_r1(server):
    server.answers = [(200, hits('"Oslo"\nOslo makes salt.', "b\nc")), (200, hits())]
    tools = Toolbox([searching(server=f"{server.url}/retrieve", passages=2)])
    assert tools.answer(("search", "salt")) == ('"Oslo"\nOslo makes salt.\n\nb\nc', True)
    body = {"queries": ["salt"], "topk": 2, "return_scores": True}
    assert server.asked == [("/retrieve", None, body)]
    assert tools.answer(("search", {"query": "x"})) == ("nothing was found", True)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((500, "no"), "500 Internal Server Error"),
        ((404, "no"), "404 Not Found"),
        ((200, "no"), "JSON"),
        ((200, "[]"), "TypeError"),
        ((200, '{"result": []}'), "ValueError"),
        ((200, '{"result": [[{"score": 1}]]}'), "document"),
        ((LATE, "late"), "timed out"),
    ],
)
def test_what_a_server_does_wrong_is_told_to_the_policy(server, answer, said):
    server.answers = [answer]
    tools = Toolbox([searching(server=f"{server.url}/retrieve", seconds=0.3)])
    text, fine = tools.answer(("search", "salt"))
    assert (text.startswith("error: "), said in text, fine) == (True, True, False)
    server.answers = [(200, hits("a"))]
    assert tools.answer(("search", "salt")) == ("a", True)


def test_a_server_that_starts_late_is_asked_again():
    with Server() as gone:
        pass  # nothing listens at its port any more
    tools = Toolbox([searching(server=f"{gone.url}/retrieve")])
    later = lambda: back.append(Server((200, hits("a")), port=gone.server_port))
    late = threading.Timer(0.7, later)
    back = []
    late.start()
    assert tools.answer(("search", "salt")) == ("a", True)
    with back[0]:
        assert len(back[0].asked) == 1


def test_an_episode_searches_twice_and_is_right(search, tmp_path):
    """In plain words: what is found follows the turn, and only the last turn is graded."""
    source = tmp_path / "asked.jsonl"
    source.write_text('{"question": "what is made where mira lives", "golden_answers": ["salt"]}\n')
    asked = questions.task(str(source), ["em"], instruction="", held_out=0)
    task = Toolbox([search]).for_task(asked)
    spoken = "what is made where mira lives in oslo makes salt search ; <answer> </answer> error"
    known = TokenTask(task, tokenizer.of_words([*dict.fromkeys(spoken.split())]))
    turns = ["search mira ;", "search salt ;", "<answer> salt </answer>"]
    [episode] = known.replay([task.train[0]], [turns])
    assert known.tokenizer.decode(episode.tokens) == (
        "search mira ; <eos> mira mira lives in oslo "
        "search salt ; <eos> oslo oslo makes salt <answer> salt </answer>"
    )
    fields = {"em": 1, "f1": 1, "format": 1, "tool_used": 1, "tool_calls": 2, "tool_errors": 0}
    assert known.try_reward(task.train[0], turns) == Reward(1, True, fields)
    wrong = known.try_reward(task.train[0], [*turns[:2], "<answer> oslo </answer>"])
    assert (wrong.score, wrong.fields["tool_calls"]) == (0, 2)
