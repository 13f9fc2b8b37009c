"""Reinforcement learning for language models: train, evaluate, talk to, export; and time the parts.

What is wrong outside the program is said in one line, exit code 2.
"""

import contextlib
import dataclasses
import functools
import inspect
import io
import re
import select
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxrl_llm import desk, userfile
from jaxrl_llm.errors import UserError
from jaxrl_llm.machines import share
from jaxrl_llm.runs import terminal
from jaxrl_llm.runs.ending import ending

WITH_CONFIG = ("train", "plan", "data", "serve")


def main(arguments: list[str] | None = None) -> None:
    """Run the command that the arguments name."""
    share.take()
    with ending(), _read_as_far_as_anybody_likes():
        _run(sys.argv[1:] if arguments is None else arguments)


@contextlib.contextmanager
def _read_as_far_as_anybody_likes() -> Iterator[None]:
    """A block whose output may go unread from somewhere on, as `| head` leaves it."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError as error:
        output = select.poll()
        output.register(sys.stdout, 0)
        if not output.poll(0):  # another pipe
            raise
        terminal.silence()
        raise SystemExit(1) from error


def _run(given: list[str]) -> None:
    try:
        if len(given) > 1 and given[0] in WITH_CONFIG and not given[1].startswith("-"):
            command = _with_config(given[0], Path(given[1]), given[2:])
        elif len(given) > 1 and given[0] == "launch" and not given[1].startswith("-"):
            command = _launch(given[1], given[2:])
        else:
            command = _parse(_application().cli, given, prog="jaxrl-llm", description=__doc__)
        command()
    except UserError as error:
        print("jaxrl-llm: " + desk.spoken(" ".join(str(error).split())), file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt as error:
        raise SystemExit(130) from error


def _application() -> tyro.extras.SubcommandApp:
    """Every command; parsing gives back a call that is still to be made."""
    from jaxrl_llm.cli import analyze, bench, data, export, plan, plot, sample, serve, study, train
    from jaxrl_llm.cli import eval as evaluation
    from jaxrl_llm.cli.launch import command as launch

    benches = tyro.extras.SubcommandApp()
    for name, command in bench.COMMANDS.items():
        benches.command(name=name)(_later(command))
    app = tyro.extras.SubcommandApp()
    app.command(name="train")(_needs_config("train", train.main))
    app.command(name="plan")(_needs_config("plan", plan.main))
    app.command(name="eval")(_later(evaluation.main))
    app.command(name="analyze")(_later(analyze.main))
    app.command(name="sample")(_later(sample.main))
    app.command(name="export")(_later(export.main))
    app.command(name="plot")(_later(plot.main))
    app.command(name="study")(_later(study.main))
    app.command(name="data")(_needs_config("data", data.main))
    app.command(name="serve")(_needs_config("serve", serve.main))
    app.command(name="launch")(
        _needs_config("launch", launch.main, f"{{{','.join(launch.KINDS)}}} ")
    )
    app.command(benches, name="bench", help="Time the parts of a step on this machine.")
    return app


def _with_config(name: str, path: Path, arguments: list[str]) -> partial[None]:
    """A command whose flags are its own options and the parameters of the file's `config()`."""
    from jaxrl_llm import config as configs
    from jaxrl_llm.cli import data, plan, serve, train
    from jaxrl_llm.runs import record

    userfile.forget()
    make, flags = configs.load(path), {}
    if name == "train":  # a run is resumed with its own flags
        make = record.with_stored_flags(make, _resumed_folder(path, arguments))

    @functools.wraps(make)
    def build(*args: Any, **given: Any) -> configs.Config:
        bound = inspect.signature(make).bind(*args, **given)
        flags.update(bound.arguments)
        return configs.build(make, path, *args, **given)

    command = {"train": train, "plan": plan, "data": data, "serve": serve}[name]
    more = {"made_by": path, "flags": flags} if name == "train" else {}
    options = command.Options
    for flag in _flags_of_both(make, options):
        raise UserError(
            f"{flag} is a flag of both {name} and {path}: rename the parameter of config()"
        )

    def parsed(
        options: Annotated[options, tyro.conf.arg(name="")],  # pyright: ignore[reportInvalidTypeForm]
        config: Annotated[configs.Config, tyro.conf.arg(name="", constructor=build)],
    ) -> partial[None]:
        return partial(command.main, options, config, **more)

    parsed.__doc__ = f"{command.main.__doc__}\n\n{path}: {inspect.getdoc(make) or ''}"
    return _parse(partial(tyro.cli, parsed), arguments, prog=f"jaxrl-llm {name} {path}")


def _launch(kind: str, arguments: list[str]) -> Callable[[], None]:
    """The command that prints how to train with these arguments elsewhere; wrong ones are found here."""
    from jaxrl_llm import config as configs
    from jaxrl_llm.cli.launch import command

    words = [kind, *arguments]
    if arguments[:1] in (["-h"], ["--help"]):
        arguments = ["CONFIG", *arguments]
    command.check(kind, arguments)
    path, *arguments = Path(arguments[0]), *arguments[1:]
    options, left = _parse(
        partial(tyro.cli, command.KINDS[kind], return_unknown_args=True),
        arguments,
        prog=f"jaxrl-llm launch {kind} {path}",
        description=f"{command.KINDS[kind].__doc__}\n\nAll others are flags of: jaxrl-llm train {path} --help",
    )
    for flag in _flags_of_both(configs.load(path), options):
        if flag in {command.flag_of(word) for word in arguments}:
            raise UserError(
                f"{flag} is a flag of both launch {kind} and {path}: rename that of the config"
            )
    trainer = command.Trainer(path, tuple(left), *_with_config("train", path, left).args)
    return partial(command.main, options, trainer, words)


def _flags_of_both(make: Callable[..., Any], options: Any) -> list[str]:
    """Flags of a config that a command has too."""
    both = {*inspect.signature(make).parameters} & {one.name for one in dataclasses.fields(options)}
    return ["--" + name.replace("_", "-") for name in sorted(both)]


def _resumed_folder(path: Path, arguments: list[str]) -> Path | None:
    """The folder of the run that the arguments of `train` ask to resume, if they do."""
    from jaxrl_llm.cli import train
    from jaxrl_llm.runs import folder

    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        options, _ = tyro.cli(
            train.Options, args=arguments, return_unknown_args=True, add_help=False
        )
        if options.resume:
            out = folder.of(options.out, path)
            return out if options.resumes(out) else None
    return None


def _parse(parser: Callable[..., Any], arguments: list[str], **described: Any) -> Any:
    """What the parser makes of the arguments; its complaint, a framed text, becomes one line."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return parser(args=arguments, **described)
    except SystemExit as stop:
        if stop.code != 2:
            raise
        parts = re.split(r"[─-]{3,}", complaint.getvalue())
        words = [" ".join(re.sub(r"[│╭╮╰╯─]", " ", part).split()) for part in parts]
        said = [part for part in words if part and not part.startswith("For full helptext")]
        raise UserError("; ".join([*said[1:3], f"see {described['prog']} --help"])) from stop


def _later(command: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """The command as it parses, but called only when everything is parsed."""

    @functools.wraps(command)
    def bound(*args: Any, **kwargs: Any) -> Callable[[], None]:
        return partial(command, *args, **kwargs)

    return bound


def _needs_config(
    name: str, command: Callable[..., Any], kind: str = ""
) -> Callable[[], Callable[[], None]]:
    """What stands in the list of commands for one that is parsed with its config."""

    def bound() -> Callable[[], None]:
        raise UserError(f"{name} wants a config file: jaxrl-llm {name} {kind}configs/kk_tiny.py")

    bound.__doc__ = (
        f"{command.__doc__}\n\nGive a config file; its flags: jaxrl-llm {name} {kind}CONFIG --help"
    )
    return bound
