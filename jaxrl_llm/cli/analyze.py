"""`jaxrl-llm analyze`: which tokens a run's updates come from, and which they move."""

from jaxrl_llm import storage
from jaxrl_llm.cli import parse
from jaxrl_llm.cli.opened import DataFolder, opened
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import update
from jaxrl_llm.training import terminal
from jaxrl_llm.training.components import DATA
from jaxrl_llm.training.folder import RunFolder


def run(words: list[str]) -> None:
    """Parse the words after `analyze` and run `main`."""
    parse.call(main, words, "analyze")


def main(
    run: str,
    /,
    *,
    step: int | None = None,
    prompts: int = 0,
    batches: int = 4,
    tokens: int = 256,
    alpha: float = 0.3,
    eta: float = 0.5,
    seed: int = 0,
    fresh: bool = False,
    out: str | None = None,
    data_folder: DataFolder = DATA,
) -> None:
    """Measure a run's policy as arXiv:2505.12929 does, on responses that it samples now.

    Updates are tried on a copy, with the run's optimizer. It executes the folder's config.py:
    analyze only runs whose author you trust.

    Args:
        run: the folder or URL of a run.
        step: which checkpoint; if not given, the best.
        prompts: training prompts of a batch, each answered as often as in training; if not given, the
            config's number.
        batches: how many, each of other prompts. Figures are means over them, whiskers go from
            the smallest to the largest value: one batch tells little.
        tokens: how many tokens to compute a gradient of their own for.
        alpha: of Advantage Reweighting, where it is tried.
        eta: of Lopti, where it is tried.
        seed: of the responses and the choice of tokens.
        fresh: start with a new optimizer state, so that an update shows no earlier momentum.
        out: the folder of analysis.json and the figures; if not given, RUN/analysis.
        data_folder: where data sets are kept.
    """
    from jaxrl_llm.research import analysis, analysis_report

    if prompts < 0 or tokens < 1 or batches < 1:
        raise UserError(
            f"--prompts {prompts} --batches {batches} --tokens {tokens}: they are counts, the last two from 1 on"
        )
    folder, console = RunFolder(run), terminal.plain()
    target = folder.path / "analysis" if out is None else storage.local(out)
    with opened(run, data_folder, step) as (components, sampler, chosen):
        if components.shape.lora is not None:
            raise UserError(f"{run} trains adapters: analyze reads runs that train all weights")
        target.mkdir(parents=True, exist_ok=True)
        with console.status("sampling") as status:
            state = folder.state(components, chosen)
            if fresh:
                state = update.init_state(state.params, components.config.optimizer)
            reference = folder.initial_params(components)
            found = {"run": run, "step": chosen, "alpha": alpha, "eta": eta}
            found |= {"seed": seed, "batches": batches}
            found |= analysis.measure(
                analysis.Subject(components, state, reference, alpha, eta),
                sampler,
                prompts=prompts or components.config.prompts,
                batches=batches,
                tokens=tokens,
                seed=seed,
                say=status.update if console.is_terminal else console.print,
            )
    console.print(analysis_report.table(found))
    analysis_report.write(found, target)
    storage.push(target)
    console.print(f"written to {storage.display_path(target)}")
