"""The model card of an exported policy: where it comes from, and how good it is; and the hub."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jaxrl_llm
from jaxrl_llm import storage
from jaxrl_llm.errors import UserError, first_line
from jaxrl_llm.models import hf
from jaxrl_llm.training import curves, journal, record
from jaxrl_llm.training.components import PRETRAINED
from jaxrl_llm.training.folder import RunFolder

CARD = "README.md"


def write(folder: RunFolder, step: int, there: Path, *, adapters: bool) -> None:
    """Writes the card, and the run's curve if there is one, beside an exported policy of a run."""
    run, picture = record.read(folder.path), folder.path / curves.PICTURE
    base = str(run["flags"].get("model") or "")
    version = str(run["given"].get(PRETRAINED, ""))  # of a folder it is a checksum
    of_hub = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", base) and version.startswith(hf.COMMIT)
    head = {
        "library_name": "peft" if adapters else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", "jaxrl_llm"],
        **({"base_model": base} if of_hub else {}),
    }
    if picture.exists():
        shutil.copyfile(picture, there / curves.PICTURE)
    parts = [
        "---",
        *(f"{name}: {json.dumps(value)}" for name, value in head.items()),  # JSON is YAML
        "---",
        f"# {there.name}",
        "",
        f"Step {step} of a run of jaxrl_llm {jaxrl_llm.__version__}.",
        "",
        *_evaluations(journal.read(folder.path), step),
        *([f"![The run's curves]({curves.PICTURE})", ""] if picture.exists() else []),
        *_provenance(run),
    ]
    storage.write(there / CARD, "\n".join(parts) + "\n")


def _evaluations(records: list[journal.Record], step: int) -> list[str]:
    """A table of accuracies: before what is learned, at the step, and on the test set."""
    ours, begins = journal.learning(records)
    scored = {r["step"]: r for r in journal.evaluations(ours)}
    first = min((r["step"] for r in ours if "eval/accuracy" in r), default=-1)
    tests = [r for r in records if r.get("test/step") == step and "test/accuracy" in r]
    rows = [
        (f"validation, {name}", "eval", scored[at])
        for name, at in ((f"before {begins}", first), ("this step", step))
        if at in scored
    ]
    rows += [("test, this step", "test", one) for one in tests]
    if not rows:
        return []
    table = ["| accuracy, greedy | % | 95% interval | mean reward | examples |"]
    table += ["|---|---|---|---|---|"]
    for name, of, r in rows:
        low, value, high = (100 * r[f"{of}/accuracy{tail}"] for tail in ("_low", "", "_high"))
        reward, examples = (r[f"{of}/{key}"] for key in ("score", "examples"))
        table.append(
            f"| {name} | {value:.1f} | {low:.1f} to {high:.1f} | {reward:.3g} | {examples:.0f} |"
        )
    return [*table, ""]


def _provenance(run: record.Run) -> list[str]:
    """The run's id, its config and its flags; of paths the last part, which tells of no machine."""
    flags = {name: _named(value) for name, value in run["flags"].items()}
    config = Path(run["config"]).name if run["config"] else "made by a program"
    rows = [("run", run["id"]), ("config", config), *flags.items()]
    rows += [(name, sums[:16]) for name, sums in run["sums"].items()]
    return [
        "| | |",
        "|---|---|",
        *(f"| {_in_cell(name)} | {_code(value)} |" for name, value in rows),
    ]


def _code(value: Any) -> str:
    """A value as code in a cell, between more backticks than stand together in it."""
    text = _in_cell(str(value))
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " * ("`" in text)
    return f"{fence}{space}{text}{space}{fence}"


def _in_cell(text: str) -> str:
    """A text that neither ends its cell of a table nor the table."""
    return re.sub(r"\r\n?|\n", r"\\n", text).replace("|", r"\|")


def _named(value: Any) -> Any:
    """A value of a flag without folders and hosts, which are nobody else's business."""
    if isinstance(value, Mapping):
        return {name: _named(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_named(one) for one in value]
    if not isinstance(value, str):
        return value
    if "://" in value:
        parts = urlsplit(value)
        return f"{parts.scheme}://.../{Path(parts.path).name}"
    return Path(value).name if value[:1] in "/~." else value


def push(folder: Path, repository: str) -> str:
    """Uploads an exported folder to a repository of the hub, private if it is new; its address."""
    import huggingface_hub

    try:
        api = huggingface_hub.HfApi()
        url = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=url.repo_id, commit_message="Export")
    except Exception as error:  # from the name, the token, the disk or the HTTP library
        raise UserError(
            f"cannot upload to {repository} ({first_line(error)}): log in with hf auth login, or set HF_TOKEN to "
            f"a token that may write; the export lies in {folder}"
        ) from error
    return str(url)
