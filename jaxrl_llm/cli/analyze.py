"""`jaxrl-llm analyze`: which tokens a run's updates come from, and which they move."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from jaxrl_llm import storage
from jaxrl_llm.cli.open_run import open_run
from jaxrl_llm.errors import UserError, flags_at_least
from jaxrl_llm.learning import update
from jaxrl_llm.tasks.task import Supervised
from jaxrl_llm.training import terminal
from jaxrl_llm.training.components import DATA
from jaxrl_llm.training.folder import RunFolder


@dataclass(frozen=True)
class Options:
    """The checkpoint, the responses, and the two methods that are tried."""

    step: int | None = None
    """which checkpoint; if not given, the best"""
    prompts: int = 0
    """training prompts of a batch, each answered as often as in training; if not given, the config's
    number"""
    batches: int = 4
    """how many, each of other prompts. Figures are means over them, whiskers go from the smallest to
    the largest value: one batch tells little"""
    tokens: int = 256
    """how many tokens to compute a gradient of their own for"""
    alpha: float = 0.3
    """of Advantage Reweighting, where it is tried"""
    eta: float = 0.5
    """of Lopti, where it is tried"""
    seed: int = 0
    """of the responses and the choice of tokens"""
    fresh: bool = False
    """start with a new optimizer state, so that an update shows no earlier momentum"""
    out: str | None = None
    """the folder of analysis.json and the figures; if not given, RUN/analysis"""
    data_folder: str = DATA
    """where data sets are kept"""


def main(run: str, /, options: Annotated[Options, tyro.conf.arg(name="")] = Options()) -> None:
    """Measure a run's policy as arXiv:2505.12929 does, on responses that it samples now.

    Updates are tried on a copy, with the run's optimizer. It executes the folder's config.py:
    analyze only runs whose author you trust.

    Args:
        run: the folder or URL of a run.
    """
    from jaxrl_llm.research import analysis, analysis_report

    prompts, batches, tokens = options.prompts, options.batches, options.tokens
    flags_at_least(0, prompts=prompts)
    flags_at_least(1, batches=batches, tokens=tokens)
    folder, console = RunFolder(run), terminal.plain()
    target = folder.path / "analysis" if options.out is None else storage.local(options.out)
    with open_run(run, options.data_folder, options.step) as (components, sampler, chosen):
        if isinstance(components.task, Supervised):
            raise UserError(f"{run} imitates rows: analyze reads runs of reinforcement")
        if components.shape.lora is not None:
            raise UserError(f"{run} trains adapters: analyze reads runs that train all weights")
        target.mkdir(parents=True, exist_ok=True)
        with console.status("sampling") as status:
            state = folder.state(components, chosen)
            if options.fresh:
                state = update.init_state(state.params, components.config.optimizer)
            reference = folder.initial_params(components)
            figures = {"run": run, "step": chosen, "alpha": options.alpha, "eta": options.eta}
            figures |= {"seed": options.seed, "batches": batches}
            figures |= analysis.measure(
                analysis.Subject(components, state, reference, options.alpha, options.eta),
                sampler,
                prompts=prompts or components.config.prompts,
                batches=batches,
                tokens=tokens,
                seed=options.seed,
                say=status.update if console.is_terminal else console.print,
            )
    console.print(analysis_report.table(figures))
    analysis_report.write(figures, target)
    storage.push(target)
    console.print(f"written to {storage.shown(target)}")
