"""The command line: one module for each command, imported when that command is run.

A UserError or OSError of a command ends the program with one line and exit code 2.
"""

import _thread
import contextlib
import importlib
import logging
import os
import re
import select
import sys
import threading
import time
from collections.abc import Iterator
from importlib import metadata

from jaxrl_llm import accelerators, storage, userfile
from jaxrl_llm.errors import UserError, first_line, out_of_memory, printable

COMMANDS = {
    "train": "a whole run of a config: data, warm start, reinforcement, a test and a picture",
    "sft": "supervised learning of a table of conversations: train with the config sft",
    "eval": "how good a run's policy is, on its test examples or on published problems",
    "sample": "talk to a run's policy",
    "export": "a run's policy in Hugging Face format",
    "plot": "the curves of several runs in one picture",
    "view": "a page on which every token of runs can be looked at",
    "report": "a page about a run or a study: what was run, curves, evaluations, responses",
    "plan": "memory, traffic and time of a config on a machine that is not here",
    "configs": "the configs that come with this package, by name",
    "data": "build the data sets of a config and show what is in them",
    "serve": "keep the vLLM servers of a config running",
    "study": "a grid of variants and seeds: means, paired differences, pictures",
    "analyze": "which tokens an update comes from, and which it moves",
    "bench": "time the parts of a step on this machine",
}
WITHOUT_JAX = ("plot", "view", "configs")
LEAVE = 5.0  # seconds that other threads get to end after the main thread


def entry() -> None:
    """The program `jaxrl-llm`: `main`, then an exit that no thread left behind can block."""
    code = 1

    def end() -> None:
        threading.main_thread().join()
        time.sleep(LEAVE)
        os._exit(code)

    threading.Thread(target=end, daemon=True).start()
    sys.unraisablehook = _heard_again
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        raise


def _heard_again(dropped: "sys.UnraisableHookArgs") -> None:
    """Has a Ctrl-C come again that came where nothing can be raised, as in JAX's call-back of the collector."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        threading.Timer(0.1, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(dropped)


def main(words: list[str] | None = None) -> None:
    """Runs a command line (None: that of the process); SystemExit(2) on a UserError or OSError."""
    with _closed_output(), _own_warnings():
        try:
            _run(sys.argv[1:] if words is None else words)
        except UserError as error:
            text = storage.shown(" ".join(str(error).split()))
            print(f"jaxrl-llm: {printable(text)}", file=sys.stderr)
            raise SystemExit(2) from error
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            text = storage.shown(f"{error.filename or 'a file'}: {error.strerror or error}")
            print(f"jaxrl-llm: cannot read or write {printable(text)}", file=sys.stderr)
            raise SystemExit(2) from error
        except KeyboardInterrupt as error:
            raise SystemExit(130) from error
        except Exception as error:
            if not out_of_memory(error):
                raise
            fits = "; ".join(getattr(error, "__notes__", ()))  # a run adds what would fit
            less = (
                fits
                or "more micro-batches, or fewer slots of the engine, need less; jaxrl-llm plan tells how much"
            )
            remedy = (
                "the host has too little memory for what is offloaded, or XLA may not pin it: "
                f"{accelerators.PINNED} is how many GB it may for a GPU"
                if re.search("host memory|pinned host", str(error))
                else f"{less}. Beside a run on the same GPU, JAX_PLATFORMS=cpu keeps off it"
            )
            print(f"jaxrl-llm: out of memory ({first_line(error)}): {remedy}", file=sys.stderr)
            raise SystemExit(2) from error


def _run(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print("usage: jaxrl-llm COMMAND ...   (each has --help)\n")
        for name, said in COMMANDS.items():
            print(f"  {name:8} {said}")
        return
    name, *rest = words
    if name == "--version":
        print(*(f"{one} {metadata.version(one)}" for one in ("jaxrl_llm", "jax", "flax", "optax")))
        return
    if name not in COMMANDS:
        hint = userfile.nearest(name, COMMANDS)
        raise UserError(f"there is no command {name!r}{hint} (jaxrl-llm --help lists them)")
    if name == "sft":
        name, rest = "train", words
    helps = not {"-h", "--help"}.isdisjoint(rest)
    if name not in WITHOUT_JAX and not helps:
        accelerators.prepare()  # it asks the driver, which takes its time
    command = importlib.import_module(f"jaxrl_llm.cli.{name}")
    if hasattr(command, "run"):  # it reads a config first, or has commands of its own
        command.run(rest)
    else:
        from jaxrl_llm.cli import parse

        parse.call(command.main, rest, name)


class _Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        kind = "warning: " if record.levelno >= logging.WARNING else ""
        # the terminal may be closed, or a signal may have come while it is written to
        with contextlib.suppress(OSError, RuntimeError):
            said = storage.shown(kind + record.getMessage())
            print(printable(said), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _own_warnings() -> Iterator[None]:
    """Logs of the package read like its other lines, and other libraries' handlers get none."""
    logger = logging.getLogger("jaxrl_llm")
    handlers, propagate, level = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [_Said()], False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@contextlib.contextmanager
def _closed_output() -> Iterator[None]:
    """Exits with 1, silently, if standard output is closed early, as by `| head`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError as error:
        output = select.poll()
        output.register(sys.stdout, 0)
        if not output.poll(0):  # standard output is fine: some other pipe broke
            raise
        from jaxrl_llm.training import terminal

        terminal.silence(sys.stdout)  # or Python's flush at exit fails again
        raise SystemExit(1) from error
