"""The progress of a phase on the terminal."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxrl_llm.runs.journal import Journal

_SHOWN = {
    "reward": "reward {:.2f}",
    "accuracy": "accuracy {:.0%}",
    "loss": "loss {:.3f}",
    "length": "length {:.0f}",
    "kl_reference": "KL {:.4f}",
    "time/tokens_per_second": "{:,.0f} tokens/s",
    "time/step": "{:.2f} s a step",
}


@contextmanager
def shown(
    journal: Journal, phase: str, steps: range, done: int
) -> Iterator[Callable[[int, Mapping[str, Any]], None]]:
    """Yields the function that says how far the phase is, which has all of `steps` and starts with some done."""
    progress, title = journal.progress, phase.replace("_", " ")
    bar = progress.add_task(title, total=len(steps), completed=done, figures="")

    def advance(number: int, values: Mapping[str, Any]) -> None:
        here = number - steps.start
        known = [text.format(float(values[n])) for n, text in _SHOWN.items() if n in values]
        progress.update(bar, completed=here, figures=" | ".join(known))
        if not progress.console.is_terminal and here % max(1, len(steps) // 20) == 0:
            journal.say(f"{here}/{len(steps)} {' | '.join([title, *known])}")

    with progress:
        yield advance
    progress.remove_task(bar)
