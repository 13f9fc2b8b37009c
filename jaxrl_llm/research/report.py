"""`report`: what a run or a study has made, as one HTML file to read, to print and to send.

It has no script. All text goes through `tag`, which writes out what is no plain text.
"""

import base64
import heapq
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, tostring

import numpy as np

from jaxrl_llm import storage
from jaxrl_llm.errors import UserError
from jaxrl_llm.research import analysis_report, page, study_report
from jaxrl_llm.research.statistics import mean
from jaxrl_llm.training import clock, curves, journal, record, tokens
from jaxrl_llm.training.journal import REINFORCE, WARM_START, Record
from jaxrl_llm.training.tables import percent
from jaxrl_llm.training.terminal import duration

CHARTS = {
    "reward": curves.SMALL["reward"],
    "eval/score": curves.MEASURED["eval/score"],
    "accuracy": "accuracy of the sampled responses",
    "entropy": curves.SMALL["entropy"],
    "kl_reference": "KL to the reference, nats a token",
    "kl_teacher": "KL to the teacher, nats a token",
    "length": curves.SMALL["length"],
    "clip": "share of tokens without gradient",
    "grad_norm": "norm of the gradient",
    "mismatch_mean": "sampler's log-probs against the trainer's, nats a token",
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 170, 46, 14, 8, 20  # of a chart, in pixels
FIGURES = ("length", "truncated", "ungraded")  # of each evaluation
SHOWN, RECENT = 2, 10  # responses of a kind; kept steps from which the best and worst come
# all control characters but tab and line feed, marks of direction and of no width, surrogates
_SPECIAL = re.compile(
    "[\0-\b\v-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
Part = Element | str


def html(folder: Path) -> str:
    """The file about a run or a study; a UserError if the folder is neither, or is damaged."""
    study = not (folder / record.NAME).exists() and (folder / study_report.NAME).exists()
    title, parts = (_study if study else _run)(folder)
    template = resources.files("jaxrl_llm.research").joinpath("report.html").read_text()
    whole = tag("title", title), tag("main", tag("h1", title), *parts)
    said = "\n".join(tostring(part, encoding="unicode", method="html") for part in whole)
    return template.replace("REPORT", said)


def tag(name: str, /, *inside: Part, **given: object) -> Element:
    """An element. In names of attributes `_` stands for `-`; one at the end is left out.

    Whatever would act on the reader instead of being read is written out, as ⟨U+202E⟩.
    """
    plain = lambda text: _SPECIAL.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", str(text))
    element = Element(name, {k.rstrip("_").replace("_", "-"): plain(v) for k, v in given.items()})
    for part in inside:
        if isinstance(part, Element):
            element.append(part)
        elif len(element):
            element[-1].tail = (element[-1].tail or "") + plain(part)
        else:
            element.text = (element.text or "") + plain(part)
    return element


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[Part]]) -> Element:
    """A table, whose first column names the rows."""
    inside = [tag("caption", caption)]
    if any(head):
        inside.append(tag("tr", *(tag("th", x, scope="col") for x in head)))
    for name, *cells in rows:
        inside.append(tag("tr", tag("th", name, scope="row"), *(tag("td", x) for x in cells)))
    whole = tag("table", *inside, class_="wide" if len(head) > 10 else "")
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=caption)


def chart(
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    band: Sequence[tuple[float, float, float]] = (),
    begin: float | None = None,
) -> Element:
    """Curves by name, a band of (x, low, high), a dotted line at `begin`; with the ends as text."""
    points = [p for line in lines.values() for p in line]
    points += [(x, y) for x, *ends in band for y in ends]
    (x0, x1), (y0, y1) = ((min(some), max(some)) for some in zip(*points, strict=True))
    if y0 == y1:
        y0, y1 = y0 - max(abs(y0), 1.0) / 2, y1 + max(abs(y1), 1.0) / 2
    across = lambda x: round(LEFT + (WIDTH - LEFT - RIGHT) * (x - x0) / ((x1 - x0) or 1), 1)
    up = lambda y: round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - y0) / (y1 - y0), 1)
    path = lambda some: " ".join(f"{across(x)},{up(y)}" for x, y in some)
    drawn = []
    for y in _ticks(y0, y1):
        drawn.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=up(y), y2=up(y), class_="grid"))
        drawn.append(tag("text", f"{y:g}", x=LEFT - 4, y=up(y) + 3, text_anchor="end"))
    here = {"y": HEIGHT - 6, "text_anchor": "middle"}
    drawn += [tag("text", f"{x:g}", x=across(x), **here) for x in _ticks(x0, x1)]
    if begin is not None:
        x = across(begin)
        drawn.append(tag("line", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM, class_="begin"))
    if band:
        edge = [(x, low) for x, low, _ in band] + [(x, high) for x, _, high in band[::-1]]
        drawn.append(tag("polygon", points=path(edge), class_="band"))
    caption: list[Part] = [tag("b", title)]
    for i, (name, line) in enumerate(lines.items()):
        drawn.append(tag("polyline", points=path(line), class_=f"curve l{i % 4}"))
        if len(line) < 30:
            drawn += [tag("circle", cx=across(x), cy=up(y), r=2) for x, y in line]
        key = tag("line", x1=0, x2=26, y1=4, y2=4, class_=f"curve l{i % 4}")
        ends = f" {name} {line[0][1]:.3g} to {line[-1][1]:.3g}"
        caption += [" · ", tag("svg", key, viewBox="0 0 26 8", class_="key"), ends]
    picture = tag("svg", *drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title)
    return tag("figure", tag("figcaption", *caption), picture)


def _ticks(low: float, high: float) -> list[float]:
    """A few round numbers between the ends."""
    from matplotlib.ticker import MaxNLocator  # slow to import

    found = MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(low, high)
    return [y for y in map(float, found) if low <= y <= high]


def _run(folder: Path) -> tuple[str, list[Part]]:
    run, records = record.read(folder), journal.read(folder)
    analysed = folder / "analysis" / analysis_report.NAME
    parts = [_summary(records), *_curves(records), *_evaluations(records), *_time(records)]
    parts += _responses(folder, max((r["step"] for r in records), default=0))
    if analysed.exists():
        step, rows = _or_none(analysed, lambda found: (found["step"], analysis_report.rows(found)))
        parts += [tag("h2", "Analysis"), table(f"of step {step}", (), rows)]
        parts += _pictures(sorted(analysed.parent.glob("*.png")))
    return Path(storage.as_url(folder.absolute())).name, [*parts, *_provenance(run)]


def _summary(records: Sequence[Record]) -> Element:
    """How far the run is, what reinforcement did to accuracy, and what alarmed."""
    ours = [r for r in records if r["phase"] == REINFORCE]
    learning, begins = journal.learning(records)
    measured = journal.evaluations(learning)
    steps, tested = [r for r in ours if "updates" in r], [r for r in ours if "test/accuracy" in r]
    ended = max((r["step"] for r in ours if {"test/step", "test/accuracy"} & {*r}), default=-1)
    state = "finished" if ended >= max((r["step"] for r in steps), default=0) else "not finished"
    imitated = sum("loss" in r for r in records if r["phase"] == WARM_START)
    of = f"{len(steps)} steps of reinforcement" if steps else f"{imitated} supervised steps"
    sentences = [f"{of}, {state}."]
    if losses := [r for r in records if journal.LOSS in r]:
        least = min(losses, key=lambda r: r[journal.LOSS])
        sentences += [
            f"Validation loss: {losses[0][journal.LOSS]:.4f} at step {losses[0]['step']}, at best "
            f"{least[journal.LOSS]:.4f} at step {least['step']}."
        ]
    sentences += [
        f"Test loss: {r['test/loss']:.4f} at step {r['test/step']}."
        for r in ours
        if "test/loss" in r
    ]
    if measured:
        scores = journal.scores(learning)
        best = max(measured[1:], key=lambda r: (scores[r["step"]], r["step"]), default=None)
        sentences += [f"Validation accuracy: {_measured(measured[0], 'eval')} before {begins}"]
        sentences[-1] += (
            f", at best {_measured(best, 'eval')} at step {best['step']}." if best else "."
        )
        if best and not any(r["eval/accuracy"] for r in measured):  # a reward with degrees
            rewards = (
                f"{scores[measured[0]['step']][1]:.3g} before, {scores[best['step']][1]:.3g} then"
            )
            sentences += [f"No response was correct; mean reward: {rewards}."]
    for r in tested:
        sentences += [
            f"Test accuracy: {_measured(r, 'test')} at step {r.get('test/step', r['step']):.0f}."
        ]
    sentences += ["Percent, with 95% intervals."] if len(sentences) > 1 else []
    alarmed = [(kind, r["step"]) for r in ours for kind in r if kind.startswith("alarm/")]
    for kind in dict(alarmed):
        at = [step for k, step in alarmed if k == kind]
        sentences += [f"Alarm ({kind[6:]}) at {len(at)} steps, from {at[0]} to {at[-1]}."]
    return tag("p", " ".join(sentences))


def _measured(r: Record, of: str, name: str = "accuracy") -> str:
    """A share in percent, with its interval where the record has one."""
    value, low, high = (r.get(f"{of}/{name}{end}") for end in ("", "_low", "_high"))
    if value is None:
        return ""
    return f"{100 * value:.1f}" if low is None or high is None else percent(value, (low, high))


def _curves(records: Sequence[Record]) -> Sequence[Part]:
    drawn = []
    measured = journal.evaluations(records)
    if measured:
        begin = min((r["step"] for r in records if r["phase"] == REINFORCE), default=None)
        warm = any(r["phase"] == WARM_START for r in records)
        line = [(r["step"], r["eval/accuracy"]) for r in measured]
        ends = ("eval/accuracy_low", "eval/accuracy_high")
        band = [(r["step"], *(r[end] for end in ends)) for r in measured if {*ends} <= {*r}]
        title = "validation accuracy, greedy, with 95% intervals"
        drawn.append(chart(title, {"": line}, band, begin if warm else None))
    if losses := [(r["step"], r[journal.LOSS]) for r in records if journal.LOSS in r]:
        drawn.append(chart(curves.MEASURED[journal.LOSS], {"": losses}))
    for name, title in CHARTS.items():
        if lines := curves.series(records, name):
            drawn.append(chart(title, {k[len(name) + 1 :]: x for k, x in lines.items()}))
    if not drawn:
        return []
    said = "By step, from the first value to the last; a dotted line is where reinforcement begins."
    return [tag("h2", "Curves"), tag("p", said, class_="said"), tag("div", *drawn, class_="charts")]


def _evaluations(records: Sequence[Record]) -> Sequence[Part]:
    """A row an evaluation, and the groups of the last one."""
    known = lambda r, of: {f"{of}/{x}" for x in ("accuracy", "examples", *FIGURES)} <= r.keys()
    evaluations = [(r, of) for r in records for of in ("eval", "test") if known(r, of)]
    losses = [(r, of) for r in records for of in ("eval", "test") if f"{of}/loss" in r]
    parts: list[Part] = [tag("h2", "Evaluations")]
    if losses:
        named = {"eval": "validation", "test": "test"}
        rows = [
            (f"{r.get(f'{of}/step', r['step'])}", named[of], f"{r[f'{of}/loss']:.4f}")
            for r, of in losses
        ]
        rows = [*dict.fromkeys(rows)]  # a phase ends and the next begins with one
        parts += [table("Loss on rows not learned from", ["step", "rows of", "loss"], rows)]
    if not evaluations:
        return parts if losses else [*parts, tag("p", "There was none yet.")]
    keys = [k for r, _ in evaluations for k in r if re.fullmatch(r"(eval|test)/(avg|pass)@\d+", k)]
    extra = list(dict.fromkeys(k.split("/")[1] for k in keys))
    cell = lambda x: "" if x is None else f"{100 * x:.1f}"
    rows = []
    for r, of in evaluations:
        name = "test" if of == "test" else f"validation, {r['phase'].replace('_', ' ')}"
        row = [f"{r.get(f'{of}/step', r['step']):.0f}", name, f"{r[f'{of}/examples']:.0f}"]
        row += [_measured(r, of, name) for name in ("accuracy", *extra)]
        row += [
            f"{r[f'{of}/length']:.1f}",
            cell(r[f"{of}/truncated"]),
            f"{r[f'{of}/ungraded']:.0f}",
        ]
        rows.append(row)
    head = ["step", "examples of", "graded", "greedy, % (95% interval)"]
    head += [*(f"{name}, % (95% interval)" for name in extra), "length", "truncated, %", "ungraded"]
    parts += [table("Accuracy on examples not learned from", head, rows)]
    last, of = evaluations[-1]
    groups = [k.split("/", 2)[2] for k in last if k.startswith(f"{of}/accuracy/")]
    names = ["accuracy", *extra]
    rows = [[g, *(cell(last.get(f"{of}/{name}/{g}")) for name in names)] for g in groups]
    head = ["group", "greedy", *extra]
    return [*parts, table("The last of them by group, in percent", head, rows)] if groups else parts


def _time(records: Sequence[Record]) -> Sequence[Part]:
    spent = clock.spent(records)
    if not (total := sum(spent.values())):
        return []
    steps = sum(x for name, x in spent.items() if name not in clock.OUTSIDE)
    rows = []
    for name in sorted(filter(spent.get, spent), key=lambda name: -spent[name]):
        share = f"{100 * spent[name] / total:.1f}%"
        bar = tag("div", tag("span", style=f"width: {share}"), class_="bar")
        rows.append([clock.NAMES.get(name, name), f"{spent[name]:,.1f}", share, bar])
    said = f"{duration(total)} to the end of the last step; goodput, the share of steps: {steps / total:.1%}"
    return [tag("h2", "Time"), table(said, ["phase", "seconds", "share", ""], rows)]


def _responses(folder: Path, last: int) -> list[Part]:
    """The best and worst responses of the last steps, and those that an update moved most."""
    steps = [step for step in tokens.steps(folder) if step <= last]
    parts: list[Part] = [tag("h2", "Responses")]
    if not steps:
        return [*parts, tag("p", "The run has kept no tokens (keep_tokens).")]
    rewards, sizes = {}, {}  # of different responses
    for step in steps:
        found = tokens.read(folder, step)
        for i, (r, (row, moved)) in enumerate(zip(found.responses, _rows(found), strict=True)):
            key = hash((r["prompt"], row.tobytes()))
            sizes[step, key] = _size(moved), step, i
            if step in steps[-RECENT:] and r["graded"]:
                rewards[key] = r["reward"], step, i
    order = [at for _, *at in sorted(rewards.values())]
    count = min(SHOWN, len(order) // 2)
    for title, chosen in (
        (f"Best of the last {RECENT} kept steps", order[::-1][: max(count, 1)]),
        (f"Worst of the last {RECENT} kept steps", order[:count]),
        (
            "Moved most, a token, by the update of their step",
            [at for _, *at in heapq.nlargest(SHOWN, sizes.values())],
        ),
    ):
        parts += [tag("h3", title)] if chosen else []
        parts += [_response(*page.written(folder, step), i) for step, i in chosen]
    said = "Blue tokens became likelier by the step's update, orange ones less likely; the deepest colour is the"
    said += " largest change in the response. What is in italics was given by the environment."
    return [*parts, tag("p", said, class_="said")]


def _rows(step: tokens.Step) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """The tokens of each response, and the change of their log-probs; NaN where they are given."""
    column = np.full(len(step.sampled), np.nan)
    moved = step.numbers["moved"]
    column[step.sampled] = np.where(np.isfinite(moved), moved, np.nan)
    ends = np.cumsum([r["tokens"] for r in step.responses])[:-1]
    return zip(np.split(step.tokens, ends), np.split(column, ends), strict=True)


def _size(moved: np.ndarray) -> float:
    return mean(np.abs(moved[np.isfinite(moved)])) or 0.0


def _response(step: tokens.Step, texts: Sequence[str], i: int) -> Element:
    r = step.responses[i]
    start = sum(one["tokens"] for one in step.responses[:i])
    _, moved = [*_rows(step)][i]
    known = np.nan_to_num(moved)
    inside = []
    for at, x in enumerate(known / max(np.abs(known).max(initial=0.0), 1e-9), start):
        shade = f"background: rgb(var(--{'up' if x > 0 else 'down'}) / {abs(x) / 2:.2f})"
        styled = {"style": shade} if abs(x) > 0.02 else {}
        inside.append(tag("span" if step.sampled[at] else "i", texts[at] or "·", **styled))
    verdict = ("correct" if r["correct"] else "wrong") if r["graded"] else "ungraded"
    text = f"step {step.step}: reward {r['reward']:g}, {verdict}, {r['tokens']} tokens"
    text += f" in {len(turns)} turns" if len(turns := r.get("turns", [])) > 1 else ""
    if len(turns) > 1 and (each := r.get("turn_rewards")):
        text += f" of reward {', '.join(f'{x:g}' for x in each)}"
    text += "" if r["finished"] else ", cut at the limit"
    text += f"; its tokens moved by {_size(moved):.3g} on average"
    return tag(
        "article",
        tag("header", text, class_="said"),
        tag("div", r["prompt"], class_="text"),
        tag("div", *inside, class_="text response"),
    )


def _provenance(run: record.Run) -> Sequence[Part]:
    """The run's provenance: flags, checksums, and its sessions."""
    text = lambda x: x if isinstance(x, str) else json.dumps(x, ensure_ascii=False)
    about = {"config": run["config"] or "made by a program", "id": run["id"]}
    about |= {"warm start": run["init_from"]} if run["init_from"] else {}
    about |= {f"SHA-256 of {name}": x for name, x in run.get("sums", {}).items()} | run["given"]
    flags, rows = [[name, text(x)] for name, x in run["flags"].items()], []
    for s in run["sessions"]:
        code = f"{s['code']['version']} {s['code'].get('commit', '')[:12]}".strip()
        code += ", changed since" if s["code"].get("dirty") else ""
        libraries = ", ".join(f"{name} {version}" for name, version in s["versions"].items())
        rows.append([s["at"], s["host"], s["machine"], s["devices"], code, libraries])
    head = ["begun", "host", "machine", "devices", "jaxrl_llm", "libraries"]
    return [
        tag("h2", "What was run"),
        *([table("Flags", (), flags)] if flags else []),
        table("Where it comes from", (), [[name, text(x)] for name, x in about.items()]),
        table("Sessions: the start, and each resume", head, rows),
    ]


def _study(folder: Path) -> tuple[str, list[Part]]:
    read = lambda x: (
        x["title"],
        x["text"],
        x["state"],
        [*study_report.tables(x)],
        study_report.reading(x),
    )
    title, text, state, tables, reading = _or_none(folder / study_report.NAME, read)
    parts: list[Part] = [tag("p", *_bold(x)) for x in (*text.split("\n\n"), state) if x]
    for panel, head, rows in tables:
        cells = [[tag("span", *_bold(cell)) for cell in row] for row in rows]
        parts.append(table(panel or "Results", head, cells))
    parts.append(tag("p", *_bold(reading), class_="said"))
    return title, [*parts, *_pictures(map(folder.joinpath, study_report.PICTURES))]


def _bold(text: str) -> list[Part]:
    """Text of which `**this**` is bold."""
    pieces = text.split("**")
    return [tag("b", x) if i % 2 and i + 1 < len(pieces) else x for i, x in enumerate(pieces)]


def _pictures(paths: Iterable[Path]) -> Sequence[Part]:
    data = lambda path: f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return [
        tag("img", src=data(path), alt=path.stem.replace("_", " "), class_="picture")
        for path in paths
        if path.exists()
    ]


def _or_none(path: Path, read: Callable[[Any], Any]) -> Any:
    """`read` of the JSON of a file; a UserError if its content is not what it should be."""
    try:
        return read(json.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read: move it away, or make it anew") from error
