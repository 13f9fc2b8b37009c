"""`jaxrl-llm study`: run a grid of variants and seeds, resumable at any moment, and report."""

from pathlib import Path

from jaxrl_llm.training.components import DATA


def main(
    file: Path,
    /,
    *,
    out: str | None = None,
    jobs: int = 0,
    threads: int = 1,
    seeds: tuple[int, ...] = (),
    report: bool = False,
    data_folder: str = DATA,
) -> None:
    """Make the runs of a study file that are not finished yet, and report.

    Args:
        file: a Python file that defines `study`.
        out: the study's folder; if not given, runs/studies/ and the name of the file.
        jobs: how many runs at a time; 0 for one where there is a GPU or TPU, else as many as there are cores for.
            Several share a GPU's memory evenly.
        threads: cores of each run, the same for all of a study.
        seeds: instead of those of the study.
        report: make no run, only report on the finished ones.
        data_folder: where data sets are kept.
    """
    from jaxrl_llm.research import runner

    runner.run(file, out, jobs=jobs, threads=threads, seeds=seeds, report=report, data=data_folder)
