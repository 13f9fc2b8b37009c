"""`bench`: its tables, and one line with exit code 2 for what is wrong."""

import shlex

import pytest

from jaxrl_llm.cli.main import main

SMALL = shlex.split("bench update --rows 2 --prompt-length 8 --response-length 24 --repeats 1")


def test_bench_update_prints_the_table(capsys):
    main([*SMALL, "--microbatches", "1"])
    out = capsys.readouterr().out
    assert "plain GRPO" in out
    assert "Lopti (2 stages)" in out


@pytest.mark.slow
def test_bench_compile_prints_the_table(capsys):
    main(["bench", "compile", "--layers", "1", "2", "--repeats", "1"])
    assert "x 1 layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SMALL, "--microbatches", "3"], "2 rows do not divide into 3 micro-batches"),
        (["bench", "update", "/nowhere"], "no model folder /nowhere"),
        (["plot", "/nothing/here"], "there is no folder /nothing/here"),
        (["bench", "accelerator", "--models", "nothing"], "known are small, Qwen2.5-0.5B"),
        (
            [*SMALL, "--microbatches", "1", "--peer-python", "python"],
            "the peer needs a model folder",
        ),
    ],
)
def test_what_is_wrong_is_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_unknown_flag_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "update", "--repeat", "1"])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert "Unrecognized options: --repeat; " in captured.err
    assert "--repeats" in captured.err
