"""`jaxrl-llm report`: what a run or a study has made, as one page to send and to print."""

from jaxrl_llm import storage
from jaxrl_llm.research import report
from jaxrl_llm.training.folder import RunFolder


def main(folder: str, /, *, out: str = "report.html") -> None:
    """Write one page about a run: curves, evaluations, time, responses, and what was run.

    Of a study it has tables and pictures. The page needs no network and nothing beside it, has no
    script, and prints well. It executes nothing of the folder.

    Args:
        folder: that of a run or a study, or its URL.
        out: the page to write, a file or URL.
    """
    with storage.upload_after(out) as target:
        storage.write(target, report.html(RunFolder(folder).path))
    print(f"written to {out}: open it in a browser")
