"""The pictures of gallery.md: makes the runs of its commands that are not there yet, and draws them.

python docs/pictures.py
"""

import os
import re
import shlex
from functools import partial
from pathlib import Path

from jaxrl_llm.cli.main import main
from jaxrl_llm.training import curves, journal

HERE = Path(__file__).parent
os.environ["SOURCE_DATE_EPOCH"] = "0"  # the same numbers give the same bytes


def commands(page: str) -> dict[str, list[str]]:
    """The words of each command of the page that has a picture, after `jaxrl-llm`, by its folder."""
    drawn = re.findall(r"^    jaxrl-llm (train .* --out runs/gallery/.*)$", page, re.MULTILINE)
    found = map(shlex.split, drawn)
    return {words[words.index("--out") + 1]: words for words in found}


def curve(folder: str) -> list[tuple[int, float]]:
    """(step of reinforcement, accuracy of the sampled responses in percent) of a run."""
    [points] = curves.series(journal.read(Path(folder)), "accuracy").values()
    return [(i, 100 * y) for i, (_, y) in enumerate(points, 1)]


def drawn(folder: str, plain: str):
    """A run's curve before that of the plain one."""
    figure, [[axis]] = curves.sheet(1, 1, (4.2, 2.0))
    axis.plot(*zip(*curve(plain), strict=True), color="0.7", lw=1.5)
    axis.plot(*zip(*curve(folder), strict=True), color="C0", lw=2)
    axis.set(ylim=(0, 80), ylabel="accuracy, %", xlabel="step", xticks=range(0, 21, 5))
    return figure


def draw(page: Path) -> None:
    """Draws a picture for each command of the page into `images/gallery` beside it."""
    import matplotlib as mpl

    made = commands(page.read_text())
    plain, *_ = made
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "", "path.simplify": True}):
        for folder in made:
            target = page.parent / "images" / "gallery" / f"{Path(folder).name}.svg"
            target.parent.mkdir(parents=True, exist_ok=True)
            curves.save(partial(drawn, folder, plain), target)


if __name__ == "__main__":
    for folder, words in commands((HERE / "gallery.md").read_text()).items():
        if not (Path(folder) / curves.PICTURE).exists():
            main([*words, "--resume", "auto"])
    draw(HERE / "gallery.md")
