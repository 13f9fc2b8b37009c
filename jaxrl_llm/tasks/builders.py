"""The tasks' data sets: tensorflow-datasets builders of array_record files, without TensorFlow."""

import contextlib
import dataclasses
import io
import logging
import shutil
from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import tensorflow_datasets as tfds

from jaxrl_llm.errors import UserError, first_line
from jaxrl_llm.tasks.knights_knaves.generate import SPLITS, Recipe, generate
from jaxrl_llm.tasks.knights_knaves.logic import Puzzle, from_nested, to_nested
from jaxrl_llm.tasks.task import Mapped

if TYPE_CHECKING:
    from jaxrl_llm.tasks.math.records import Problem

E = TypeVar("E")
logger = logging.getLogger(__name__)
Splits = tuple[Mapped[E], Mapped[E]]  # train, test

_TEXT = tfds.features.Text()
_TEXTS = tfds.features.Sequence(_TEXT)


class _Info(tfds.core.DatasetInfo):
    def initialize_from_bucket(self) -> None:
        """Nothing: there is none, and the look for it leaves a temporary folder behind."""


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Writes `rows(split)` with the `FEATURES`."""

    VERSION = tfds.core.Version("1.0.0")
    FEATURES: ClassVar[dict[str, Any]]

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def _info(self) -> _Info:
        features = tfds.features.FeaturesDict(self.FEATURES)
        return _Info(builder=self, description=self.__doc__, features=features)

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        return {split: self._generate_examples(split) for split in SPLITS}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        return enumerate(self.rows(split))


@dataclasses.dataclass(eq=False)
class KnightsKnavesConfig(tfds.core.BuilderConfig):
    """A builder's config with the recipe of its puzzles."""

    recipe: Recipe = dataclasses.field(default_factory=Recipe)


class KnightsKnavesBuilder(_Builder):
    """Generated Knights and Knaves puzzles: `people2` to `people8`, and `mixed`."""

    name = "knights_knaves"
    BUILDER_CONFIGS: ClassVar = [
        *(KnightsKnavesConfig(name=f"people{n}", recipe=Recipe((n,))) for n in range(2, 9)),
        KnightsKnavesConfig(name="mixed", recipe=Recipe(tuple(range(2, 9)))),
    ]
    FEATURES: ClassVar = {
        "names": _TEXTS,
        "statements": _TEXTS,
        "solution": tfds.features.Sequence(tfds.features.Scalar(dtype=np.bool_)),
        "question": _TEXT,
    }

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        assert isinstance(self.builder_config, KnightsKnavesConfig)
        for puzzle in generate(self.builder_config.recipe, split):
            statements = [repr(to_nested(statement)) for statement in puzzle.statements]
            yield {**vars(puzzle), "statements": statements}


class MathBuilder(_Builder):
    """Math problems with their answers; the config's name is a digest of the problems given."""

    name = "math_problems"
    FEATURES: ClassVar = {"question": _TEXT, "truths": _TEXTS}

    def __init__(self, train: "Sequence[Problem]", test: "Sequence[Problem]", **kwargs: Any):
        self._problems = {"train": train, "test": test}
        digest = blake2b(repr(self._problems).encode(), digest_size=8).hexdigest()
        super().__init__(config=tfds.core.BuilderConfig(name=digest), **kwargs)

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        return map(vars, self._problems[split])


def knights_knaves(recipe: Recipe, data_dir: str | Path) -> Splits[Puzzle]:
    """The train and test puzzles of a recipe, built under `data_dir` unless they exist there."""
    people = "_".join(map(str, recipe.people))
    sizes = f"train{recipe.train}-test{recipe.test}-seed{recipe.seed}"
    name = f"people{people}-depth{recipe.depth}-{sizes}"  # all settings: no two recipes share files
    config = KnightsKnavesConfig(name=name, recipe=recipe)
    statement = lru_cache(2**16)(lambda text: from_nested(literal_eval(text.decode())))

    def decode(row: dict[str, Any]) -> Puzzle:
        return Puzzle(
            names=tuple(name.decode() for name in row["names"]),
            statements=tuple(map(statement, row["statements"])),
            solution=tuple(map(bool, row["solution"])),
            question=row["question"].decode(),
        )

    return _prepared(lambda: KnightsKnavesBuilder(config=config, data_dir=data_dir), decode)


def math_problems(
    train: "Sequence[Problem]", test: "Sequence[Problem]", data_dir: str | Path
) -> "Splits[Problem]":
    """The train and test problems, written under `data_dir` unless they are there."""
    from jaxrl_llm.tasks.math.records import Problem

    def decode(row: dict[str, Any]) -> Problem:
        return Problem(row["question"].decode(), tuple(text.decode() for text in row["truths"]))

    return _prepared(lambda: MathBuilder(train, test, data_dir=data_dir), decode)


def _prepared(make: Callable[[], Any], decode: Callable[[dict[str, Any]], E]) -> Splits[E]:
    """Builds the data set unless it exists, and opens both splits; UserError if it cannot."""
    with _quiet_tfds():
        try:
            builder = make()
            folder = builder.data_path
            if folder.exists() and not (folder / "dataset_info.json").exists():
                shutil.rmtree(folder)  # copied from a bucket during an upload to it
                builder = make()
            if not folder.exists():
                logger.info("building the data set in %s, this once", folder)
            builder.download_and_prepare(file_format="array_record")
        except OSError as error:
            if not make().data_path.exists():  # if it exists, another process built it meanwhile
                raise UserError(f"cannot build the data set: {error}") from error
        builder = make()  # reads the files that are there now, whichever process built them
        sources = [builder.as_data_source(split=split) for split in SPLITS]
    return Mapped(sources[0], decode), Mapped(sources[1], decode)


@lru_cache  # asked for once for the names of splits, and once for the rows of each
def published(name: str) -> Any:
    """The builder of `NAME[/CONFIG]` of tensorflow-datasets, which makes its files unless they are there."""
    try:
        with _quiet_tfds():
            builder = tfds.builder(name, file_format="array_record")
            builder.download_and_prepare()
    except (OSError, ValueError, ImportError, NotImplementedError) as error:
        reason = first_line(error)
        raise UserError(f"cannot make {name!r} of tensorflow-datasets: {reason}") from error
    return builder


def rows_of(name: str, split: str) -> list[dict[str, Any]]:
    """The rows of a split of `published(name)`."""
    with _quiet_tfds():
        return [_plain(row) for row in published(name).as_data_source(split=split)]


def _plain(value: Any) -> Any:
    """Text, numbers and lists in place of bytes and arrays."""
    if isinstance(value, Mapping):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list):
        return [*map(_plain, value)]
    return value.decode() if isinstance(value, bytes) else value


@contextlib.contextmanager
def _quiet_tfds() -> Iterator[None]:
    """Silences tensorflow-datasets: progress bars, prints, and notices on custom configs."""
    notices = logging.getLogger("absl")
    level = notices.level
    notices.setLevel(logging.ERROR)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        notices.setLevel(level)
