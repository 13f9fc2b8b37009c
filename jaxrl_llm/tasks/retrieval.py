"""Search as a tool: the passages of a corpus, or of a server, that fit a query best.

A corpus is indexed once (BM25), and searched by processes (this module) that map the index into
their memory, so they share it and hold up no thread of the run: `pip install 'jaxrl_llm[search]'`.
"""

import importlib.util
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from jaxrl_llm import storage
from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks import tables
from jaxrl_llm.tasks.workers import Workers, serve

logger = logging.getLogger(__name__)

INDEXES = Path("~/.cache/jaxrl_llm/search")  # of this host, by the content of their corpora
_INDEXING = 10_000.0  # seconds of CPU time
_HALF = "new-"  # begins the names of folders that are being written


def searching(
    corpus: str = "",
    server: str = "",
    *,
    passages: int = 3,
    workers: int = 2,
    seconds: float = 20.0,
) -> Callable[[str], str]:
    """The tool `search`: so many passages, a blank line between, for `Toolbox([searching(...)])`.

    A `corpus` is a file whose rows have `title` and `text`, or `contents`; `workers` queries run at a
    time, each for `seconds` of CPU time. A `server` is the URL of one that answers as Search-R1's,
    within `seconds`. Raises UserError for a corpus that cannot be read.
    """
    if bool(corpus) == bool(server):
        raise UserError("search: give a corpus or the URL of a server, and not both")
    best = _of_server(server, seconds) if server else _of_corpus(corpus, workers, seconds)

    def search(query: str) -> str:
        """Search a collection of texts for the passages that fit a query best.

        Args:
            query: What to look for.
        """
        return "\n\n".join(best(query, passages)) or "nothing was found"

    if corpus:
        vars(search)["limits_itself"] = True  # it waits for others' queries, which must not count
    return search


def _of_server(url: str, seconds: float) -> Callable[[str, int], list[str]]:
    if not url.startswith(("http://", "https://")):
        raise UserError(f"search: {url} is no URL, as http://localhost:8000/retrieve")
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query:
        raise UserError("search: a key in a URL would be kept by the run, and searching needs none")
    client = httpx.Client(timeout=seconds, transport=httpx.HTTPTransport(retries=4))

    def best(query: str, count: int) -> list[str]:
        body = {"queries": [query], "topk": count, "return_scores": True}
        [hits] = client.post(url, json=body).raise_for_status().json()["result"]
        return [hit["document"]["contents"] for hit in hits]

    return best


def _of_corpus(corpus: str, workers: int, seconds: float) -> Callable[[str, int], list[str]]:
    if importlib.util.find_spec("bm25s") is None:
        raise UserError("search in a corpus needs bm25s: pip install 'jaxrl_llm[search]'")
    pool = Workers(workers, "jaxrl_llm.tasks.retrieval")
    logger.info("%s is indexed, unless it was before", corpus)
    index = pool.ask(["", corpus, str(INDEXES.expanduser())], _INDEXING)
    if not index.startswith("/"):
        raise UserError(f"search: {index or 'no index: out of time or memory'}")

    def best(query: str, count: int) -> list[str]:
        reply = pool.ask([index, query, count], seconds)
        if not reply.startswith("["):
            raise RuntimeError("the query could not be answered")
        return json.loads(reply)

    return best


# In the processes.


def _bm25s() -> Any:
    sys.modules["jax"] = cast(Any, None)  # or it would take the accelerator, to sort a few numbers
    import bm25s

    return bm25s


def _indexed(corpus: Path, indexes: Path) -> str:
    """The folder with the index of a corpus, made unless it is there; or why there is none."""
    try:
        folder = indexes / storage.sha256(corpus)
        if folder.exists():
            return str(folder)
        texts = [_contents(row, f"{corpus}, row {n}") for n, row in enumerate(tables.rows(corpus))]
        indexes.mkdir(parents=True, exist_ok=True)
    except (OSError, UserError) as error:
        return f"no index: {error}"
    words = _bm25s().tokenize(texts, stopwords="en", show_progress=False)
    if not any(words.ids):
        return f"no index: {corpus} holds no text to search in"
    retriever = _bm25s().BM25()
    retriever.index(words, show_progress=False)
    for half in indexes.glob(f"{_HALF}*"):  # of who was killed
        if time.time() - half.stat().st_mtime > _INDEXING:
            shutil.rmtree(half, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_HALF, dir=indexes) as beside:
        retriever.save(f"{beside}/new", corpus=texts, show_progress=False)
        with suppress(OSError):  # another process has made it meanwhile
            os.rename(f"{beside}/new", folder)
    return str(folder)


def _contents(row: Any, where: str) -> str:
    match row:
        case {"contents": str(text)}:
            return text
        case {"title": str(title), "text": str(text)}:
            return f"{title}\n{text}"
    raise UserError(f"{where}: a document has title and text, or contents")


@cache
def _retriever(index: str) -> Any:
    return _bm25s().BM25.load(index, mmap=True, load_corpus=True)


def _best(index: str, query: str, count: int) -> str:
    """The texts of an index that fit a query, in JSON."""
    words = _bm25s().tokenize(query, stopwords="en", return_ids=False, show_progress=False)
    count = min(count, _retriever(index).scores["num_docs"])
    [found], [scores] = _retriever(index).retrieve(words, k=count, show_progress=False)
    return json.dumps([one["text"] for one, score in zip(found, scores, strict=True) if score > 0])


def _answer(index: str, *asked: Any) -> str:
    return _best(index, *asked) if index else _indexed(*map(Path, asked))


if __name__ == "__main__":
    serve(_answer, _bm25s, memory=1 << 60)
