"""`jaxrl-llm plot`: the curves of one or several runs in a picture."""

from jaxrl_llm import storage
from jaxrl_llm.errors import UserError
from jaxrl_llm.training import curves
from jaxrl_llm.training.folder import RunFolder


def main(runs: tuple[str, ...], /, *, out: str = curves.PICTURE) -> None:
    """Draw the curves of one or several runs into one picture.

    Args:
        runs: the folders or URLs of runs.
        out: the picture to write, a file or URL.
    """
    if not runs:
        raise UserError("plot wants the folders of one or several runs")
    with storage.upload_after(out) as target:
        curves.draw([RunFolder(run).path for run in runs], target)
    print(f"written to {out}")
