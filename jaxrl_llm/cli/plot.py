"""`jaxrl-llm plot`: the curves of runs."""

from pathlib import Path

from jaxrl_llm import desk
from jaxrl_llm.errors import UserError
from jaxrl_llm.runs import folder
from jaxrl_llm.training import curves


def main(runs: tuple[Path, ...], /, *, out: Path = Path(curves.PICTURE)) -> None:
    """Draw the curves of one or several runs into one picture.

    Args:
        runs: the folders or URLs of runs.
        out: the picture to write, a file or URL.
    """
    if not runs:
        raise UserError("plot wants the folders of one or several runs")
    target = desk.at_hand(out.parent) / out.name
    curves.draw([folder.at_hand(run) for run in runs], target)
    desk.store(target)
    print(f"written to {desk.named(target)}")
