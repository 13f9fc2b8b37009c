"""The command line of jaxrl_llm; what is wrong outside the program is said in one line, exit code 2."""

import sys

import tyro

from jaxrl_llm.errors import UserError


def main(arguments: list[str] | None = None) -> None:
    """Run the command that the arguments name."""
    from jaxrl_llm.bench import depth, update

    bench = tyro.extras.SubcommandApp()
    bench.command(name="update")(update.main)
    bench.command(name="compile")(depth.main)
    app = tyro.extras.SubcommandApp()
    app.command(bench, name="bench", help="Time the parts of a step on this machine.")
    try:
        app.cli(prog="jaxrl-llm", description=__doc__, args=arguments)
    except UserError as error:
        print("jaxrl-llm: " + " ".join(str(error).split()), file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt as error:
        raise SystemExit(130) from error
