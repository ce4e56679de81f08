"""The results of both benchmarks as Markdown tables, JSON and a bar chart."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..markdown import markdown_table
from ..plotting import figure_file
from .measurements import DecodingMeasurement, Measurement, TrainingMeasurement, family, precision

#: A palette for the colour-blind (Okabe and Ito 2008).
COLORS = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73", "#f0e442", "#cc79a7")

Figures = dict[str, Any]


def ratio(measurements: Sequence[Measurement], peer: Measurement) -> Figures | None:
    """Speed and peak memory of this package over a peer's, for the same setting and precision if that was measured.

    Otherwise the fastest engine of this package is compared. None for an engine of this package, or without one.
    """
    candidates = [one for one in measurements if family(one.engine) == "ours" and one.setting == peer.setting]
    if family(peer.engine) == "ours" or not candidates:
        return None
    same = [one for one in candidates if precision(one.engine) == precision(peer.engine)]
    ours = max(same or candidates, key=lambda one: one.tokens_per_second)
    speed = ours.tokens_per_second / peer.tokens_per_second
    memory = ours.peak_mib / peer.peak_mib if ours.peak_mib and peer.peak_mib else None
    return {**peer.setting, "ours": ours.engine, "peer": peer.engine, "speed": speed, "memory": memory}


def process_scaling(measurements: Sequence[TrainingMeasurement]) -> list[Figures]:
    """The speed of several processes over the speed of one, for each engine."""
    alone = {one.engine: one.tokens_per_second for one in measurements if one.processes == 1}
    return [
        {"engine": one.engine, "processes": one.processes, "times": one.tokens_per_second / alone[one.engine]}
        for one in measurements
        if one.processes > 1 and one.engine in alone
    ]


def as_json(measurements: Sequence[Any]) -> Figures:
    """All figures of a benchmark."""
    figures: Figures = {
        "measurements": [one.as_dict() for one in measurements],
        "ratios": list(filter(None, (ratio(measurements, peer) for peer in measurements))),
    }
    if isinstance(measurements[0], TrainingMeasurement):
        figures["scaling"] = process_scaling(measurements)
    return figures


def decoding_report(measurements: Sequence[DecodingMeasurement], caches: Mapping[str, int], cache_beams: int) -> str:
    """All figures of the decoding benchmark as Markdown tables."""
    columns: dict[str, Callable[[Any], str]] = {
        "engine": lambda one: one.engine,
        "batch": lambda one: str(one.batch_size),
        "beams": lambda one: str(one.num_beams),
        **_speed_columns(measurements),
        "ms per sentence": lambda one: f"{one.ms_per_sentence:.1f}",
        "peak MiB": lambda one: _number(one.peak_mib, ",.0f"),
        "same output": lambda one: f"{one.same_output:.1%}",
        "BLEU": lambda one: _number(one.bleu, ".2f"),
    }
    tables = [_table(measurements, columns)]
    if caches:
        ours: dict[str, Any] = {engine: caches.get(f"ours_{precision(engine)}") for engine in caches}
        columns = {
            "engine": str,
            f"KV caches, MiB, {cache_beams} beams": lambda engine: f"{caches[engine] / 2**20:,.1f}",
            "ours / this": lambda engine: f"{ours[engine] / caches[engine]:.2f}" if ours[engine] else "",
        }
        tables.append(_table(list(caches), columns))
    return "\n\n".join(tables)


def training_report(measurements: Sequence[TrainingMeasurement]) -> str:
    """All figures of the training benchmark as Markdown tables."""
    columns: dict[str, Callable[[Any], str]] = {
        "engine": lambda one: one.engine,
        "processes": lambda one: str(one.processes),
        **_speed_columns(measurements),
        "padding": lambda one: f"{one.padding:.1%}",
        "target tokens per update": lambda one: f"{sum(one.target_tokens) / len(one.seconds) / one.updates:,.0f}",
        "peak MiB": lambda one: _number(one.peak_mib, ",.0f"),
        "peak MiB of the update": lambda one: _number(one.step_mib, ",.0f"),
        "ours / this, peak": lambda one: _number((ratio(measurements, one) or {}).get("memory"), ".2f"),
    }
    tables = [_table(measurements, columns)]
    if several := process_scaling(measurements):
        columns = {
            "engine": lambda one: one["engine"],
            "processes": lambda one: str(one["processes"]),
            "times the target tokens/s of one": lambda one: f"{one['times']:.2f}",
        }
        tables.append(_table(several, columns))
    return "\n\n".join(tables)


def _speed_columns(measurements: Sequence[Measurement]) -> dict[str, Callable[[Any], str]]:
    def compared(one: Measurement) -> str:
        figures = ratio(measurements, one)
        return "" if figures is None else f"{figures['speed']:.2f} ({figures['ours']})"

    return {
        "target tokens/s": lambda one: f"{one.tokens_per_second:,.0f}",
        "spread": lambda one: f"{one.spread:.0%}",
        "ours / this": compared,
    }


def _table(items: Sequence[Any], columns: Mapping[str, Callable[[Any], str]]) -> str:
    return markdown_table(list(columns), [[column(item) for column in columns.values()] for item in items])


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def plot(measurements: Sequence[Any], path: str | Path) -> Path:
    """Draw a panel per setting with a bar per engine: median target tokens per second, and the range of the rounds."""
    engines, titles = (list(dict.fromkeys(getattr(one, name) for one in measurements)) for name in ("engine", "title"))
    size = (2.5 + 2.2 * len(titles), 1.5 + 0.35 * len(engines))
    with figure_file(path, figsize=size, layout="constrained") as figure:
        axes = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
        for one in measurements:
            index, rate = engines.index(one.engine), one.tokens_per_second
            error = [[rate - min(one.rates)], [max(one.rates) - rate]]
            color = COLORS[index % len(COLORS)]
            axes[titles.index(one.title)].barh(index, rate, xerr=error, color=color, ecolor="0.3", capsize=2)
        for axis, title in zip(axes, titles, strict=True):
            axis.set_title(title, fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
            axis.locator_params(axis="x", nbins=4)
        axes[0].set_yticks(range(len(engines)), engines)
        axes[0].invert_yaxis()
        figure.supxlabel("target tokens per second, without padding", fontsize=10)
    return Path(path)
