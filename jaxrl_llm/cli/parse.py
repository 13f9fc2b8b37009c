"""Parses command lines with tyro, by the annotations of functions and dataclasses."""

import contextlib
import dataclasses
import functools
import inspect
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

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
    given = ask(_arguments_of(command), words, prog=f"jaxrl-llm {name}")
    command(*given.args, **given.kwargs)


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
    if not words or words[0].startswith("-"):
        if {*words} & {"-h", "--help"}:
            its_flags = f"(its flags: jaxrl-llm {name} CONFIG --help)"
            print(f"usage: jaxrl-llm {name} CONFIG ...   {its_flags}\n\n{described}")
            raise SystemExit(0)
        raise UserError(
            f"{name} wants a config, a file or a name: jaxrl-llm {name} kk_tiny (jaxrl-llm configs lists names)"
        )
    path, prog, words = configs.named(words[0]), f"jaxrl-llm {name} {words[0]}", words[1:]
    userfile.reset()
    make = configs.load(path)
    twice = {*inspect.signature(make).parameters} & {x.name for x in dataclasses.fields(options)}  # pyright: ignore[reportArgumentType]
    for flag in sorted(twice):
        raise UserError(
            f"--{flag.replace('_', '-')} is a flag of both {name} and {path}: rename the parameter of config()"
        )
    if not {*words} & {"-h", "--help"}:
        asked = ask(options, words, prog=prog, return_unknown_args=True, add_help=False)
        if folder := stored(asked[0], path):
            make = record.with_stored_flags(make, folder)

    def both(
        options: Annotated[options, tyro.conf.arg(name="")],  # pyright: ignore[reportInvalidTypeForm]
        config: Annotated[Any, tyro.conf.arg(name="", constructor=_arguments_of(make))],
    ) -> tuple[Any, Any]:
        return options, config

    both.__doc__ = f"{described}\n\n{path}: {inspect.getdoc(make) or ''}"
    chosen, given = ask(both, words, prog=prog)
    config = configs.build(make, path, *given.args, **given.kwargs)
    record.require_kept(make, given.arguments)
    return chosen, config, Source(path, given.arguments, tuple(userfile.files_read(but=path)))


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
        if said[1:] and said[1].startswith("Unrecognized"):  # flags without the values after them
            said[1] = re.sub(r"(--[^\s,]+)(, [^-]\S*)+", r"\1", said[1])
        raise UserError("; ".join([*said[1:3], f"see {prog} --help"])) from stop


def _arguments_of(function: Callable[..., Any]) -> Callable[..., inspect.BoundArguments]:
    """A function with the same parameters and help that returns its arguments.

    What tyro calls while it parses: errors of the function itself are not the parser's.
    """

    @functools.wraps(function)
    def bound(*args: Any, **given: Any) -> inspect.BoundArguments:
        return inspect.signature(function).bind(*args, **given)

    return bound
