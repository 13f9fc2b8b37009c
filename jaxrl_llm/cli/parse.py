"""Parses command lines with tyro, by the annotations of functions and dataclasses."""

import contextlib
import dataclasses
import functools
import inspect
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import tyro

from jaxrl_llm import config as configs
from jaxrl_llm import userfile
from jaxrl_llm.config import Config
from jaxrl_llm.errors import UserError
from jaxrl_llm.training import record
from jaxrl_llm.training.record import Source

O = TypeVar("O")  # noqa: E741 (options)


def call(command: Callable[..., None], words: list[str], name: str) -> None:
    """Parses the words as arguments of the command and calls it; a UserError if they are wrong."""
    parsed: list[Callable[[], None]] = []

    @functools.wraps(command)
    def later(*args: Any, **kwargs: Any) -> None:
        # The command is called after parsing, so that its errors are not taken for the parser's.
        parsed.append(functools.partial(command, *args, **kwargs))

    ask(later, words, prog=f"jaxrl-llm {name}")
    parsed[0]()


def with_config(
    name: str,
    words: list[str],
    options: type[O],
    described: str | None,
    stored: Callable[[O, Path], Path | None] = lambda options, path: None,
) -> tuple[O, Config, Source]:
    """Options of a command, the config that its file makes of the other flags, and how it was made.

    `described` is the help text. `stored(options, path of the config file)` may name the folder of
    a run, whose flags are then the defaults. A UserError if the words are wrong.
    """
    if words[:1] in ([], ["-h"], ["--help"]) or words[0].startswith("-"):
        if {*words} & {"-h", "--help"}:
            print(
                f"usage: jaxrl-llm {name} CONFIG ...   (its flags: jaxrl-llm {name} CONFIG --help)"
            )
            print(f"\n{described}")
            raise SystemExit(0)
        raise UserError(f"{name} wants a config file: jaxrl-llm {name} configs/kk_tiny.py")
    path, words = Path(words[0]), words[1:]
    userfile.forget()
    make, prog = configs.load(path), f"jaxrl-llm {name} {path}"
    for flag in flags_of_both(make, options):
        raise UserError(
            f"{flag} is a flag of both {name} and {path}: rename the parameter of config()"
        )
    everything = functools.partial(
        _all_flags,
        options,
        make,
        words,
        prog,
        f"{described}\n\n{path}: {inspect.getdoc(make) or ''}",
    )
    if {*words} & {"-h", "--help"}:
        everything()
    chosen, left = ask(options, words, prog=prog, return_unknown_args=True, add_help=False)
    if folder := stored(chosen, path):
        make = record.with_stored_flags(make, folder)
    flags: dict[str, Any] = {}

    @functools.wraps(make)
    def build(*args: Any, **given: Any) -> Config:
        flags.update(inspect.signature(make).bind(*args, **given).arguments)
        return configs.build(make, path, *args, **given)

    with contextlib.redirect_stderr(io.StringIO()):
        try:
            config = tyro.cli(build, args=left, add_help=False)
        except SystemExit:
            everything()  # parses again with the flags of both, for a complete error message
            raise
    return chosen, config, Source(path, flags, tuple(userfile.ran(but=path)))


def flags_of_both(make: Callable[..., Any], options: Any) -> list[str]:
    """Flags that both the config's function and the command's options define."""
    both = {*inspect.signature(make).parameters} & {one.name for one in dataclasses.fields(options)}
    return ["--" + name.replace("_", "-") for name in sorted(both)]


def ask(parser: Any, words: list[str], *, prog: str, **settings: Any) -> Any:
    """The result of tyro; its error message, a framed text, becomes a UserError of one line."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(parser, args=words, prog=prog, **settings)
    except SystemExit as stop:
        if stop.code != 2:
            raise
        parts = re.split(r"[─-]{3,}", complaint.getvalue())
        lines = [" ".join(re.sub(r"[│╭╮╰╯─]", " ", part).split()) for part in parts]
        said = [part for part in lines if part and not part.startswith("For full helptext")]
        raise UserError("; ".join([*said[1:3], f"see {prog} --help"])) from stop


def _all_flags(
    options: Any, make: Callable[..., Any], words: list[str], prog: str, described: str
) -> NoReturn:
    """Prints the help or raises the error, with the flags of command and config in one list."""

    def both(
        options: Annotated[options, tyro.conf.arg(name="")],  # pyright: ignore[reportInvalidTypeForm]
        config: Annotated[Any, tyro.conf.arg(name="", constructor=make)],
    ) -> None:
        del options, config

    both.__doc__ = described
    ask(both, words, prog=prog)
    raise AssertionError(f"{words} were refused, and now are not")
