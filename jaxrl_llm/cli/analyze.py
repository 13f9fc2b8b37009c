"""`jaxrl-llm analyze`: which tokens a run's updates come from, and which they move."""

from pathlib import Path

from jaxrl_llm import desk
from jaxrl_llm.cli.opened import DataFolder, opened
from jaxrl_llm.errors import UserError, cannot_write
from jaxrl_llm.learning import update
from jaxrl_llm.runs import folder, terminal


def main(
    run: Path,
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
    out: Path | None = None,
    data: DataFolder = folder.DATA,
) -> None:
    """Measure a run's policy as arXiv:2505.12929 does, on batches that it samples now.

    Updates are tried on a copy, with the run's optimizer. It executes the folder's config.py: analyze only
    runs whose author you trust.

    Args:
        run: the folder or URL of a run.
        step: which checkpoint (default: the best).
        prompts: of a batch, from the training examples, each answered as often as in training (default: the
            config's).
        batches: each of other prompts. Figures are their mean, whiskers the least and the most of them: one batch
            tells little.
        tokens: how many are looked at one by one.
        alpha: of Advantage Reweighting, where it is tried.
        eta: of Lopti, where it is tried.
        seed: of the responses and the choice of tokens.
        fresh: the optimizer begins anew, so that what an update does is not the momentum of those before.
        out: the folder of analysis.json and the figures (default: RUN/analysis).
        data: where data sets are kept.
    """
    from jaxrl_llm.research import analysis, analysis_report

    if prompts < 0 or tokens < 1 or batches < 1:
        raise UserError(
            f"--prompts {prompts} --batches {batches} --tokens {tokens}: they are counts, the last two from 1 on"
        )
    run = folder.at_hand(run)
    console, target = terminal.plain(), desk.at_hand(out or run / "analysis")
    with opened(run, data, step) as (config, parts, sampler, chosen):
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(target, error) from error
        with console.status("sampling") as status:
            state = folder.state(run, parts, config.optimizer, chosen)
            if fresh:
                state = update.init_state(state.params, config.optimizer)
            reference = folder.reference(run, parts)
            found = {"run": desk.named(run), "step": chosen, "alpha": alpha, "eta": eta}
            found |= {"seed": seed, "batches": batches}
            found |= analysis.measure(
                analysis.Subject(config, parts, state, reference, alpha, eta),
                sampler,
                prompts=prompts or config.prompts,
                batches=batches,
                tokens=tokens,
                seed=seed,
                say=status.update if console.is_terminal else console.print,
            )
    console.print(analysis_report.table(found))
    analysis_report.write(found, target)
    desk.store(target)
    console.print(f"written to {desk.named(target)}")
