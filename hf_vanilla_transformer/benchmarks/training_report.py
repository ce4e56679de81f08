"""What a benchmark of training has found, as Markdown tables and a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .harness import draw_panels, family, markdown, precision
from .training import Measurement


@dataclass
class Ratio:
    """This package over a peer in the same precision and number of processes."""

    processes: int
    ours: str
    peer: str
    times: float  # target tokens per second
    memory: float | None  # peak


@dataclass
class Scaling:
    """How many times the target tokens per second of one process several have."""

    engine: str
    processes: int
    times: float


def ratios(found: Sequence[Measurement]) -> list[Ratio]:
    """Ours against each peer."""
    ours = {(one.processes, precision(one.engine)): one for one in found if family(one.engine) == "ours"}
    compared = []
    for peer in found:
        own = ours.get((peer.processes, precision(peer.engine)))
        if own is None or own is peer:
            continue
        memory = own.peak_mib / peer.peak_mib if own.peak_mib and peer.peak_mib else None
        times = own.tokens_per_second / peer.tokens_per_second
        compared.append(Ratio(peer.processes, own.engine, peer.engine, times, memory))
    return compared


def scaling(found: Sequence[Measurement]) -> list[Scaling]:
    """Each engine in several processes against itself in one."""
    alone = {one.engine: one.tokens_per_second for one in found if one.processes == 1}
    return [
        Scaling(one.engine, one.processes, one.tokens_per_second / alone[one.engine])
        for one in found
        if one.processes > 1 and one.engine in alone
    ]


def report(found: Sequence[Measurement]) -> str:
    """Everything as Markdown."""
    parts = [_table(found)]
    if several := scaling(found):
        rows = [[one.engine, str(one.processes), f"{one.times:.2f}"] for one in several]
        parts.append(markdown(["engine", "processes", "times the target tokens/s of one"], rows))
    return "\n\n".join(parts)


def _table(found: Sequence[Measurement]) -> str:
    compared = {(one.processes, one.peer): one for one in ratios(found)}
    rows = []
    for one in found:
        ratio = compared.get((one.processes, one.engine))
        rows.append(
            [
                one.engine,
                str(one.processes),
                f"{one.tokens_per_second:,.0f}",
                f"{one.spread:.0%}",
                "" if ratio is None else f"{ratio.times:.2f}",
                f"{one.padding:.1%}",
                f"{sum(one.target_tokens) / len(one.target_tokens) / one.updates:,.0f}",
                "" if one.peak_mib is None else f"{one.peak_mib:,.0f}",
                "" if one.step_mib is None else f"{one.step_mib:,.0f}",
                "" if ratio is None or ratio.memory is None else f"{ratio.memory:.2f}",
            ]
        )
    head = "engine|processes|target tokens/s|spread|ours / this|padding|target tokens an update|peak MiB"
    return markdown([*head.split("|"), "of which in the update", "ours / this, peak"], rows)


def plot(found: Sequence[Measurement], path: str | Path) -> Path:
    """Draw target tokens per second: a panel a number of processes, a bar an engine, from the slowest to the fastest
    round.

    Raises:
        UserError: no matplotlib, or a kind of picture that it does not know.
    """
    panels: dict[str, dict[str, Sequence[float]]] = {}
    for one in found:
        panels.setdefault(f"{one.processes} process{'es' if one.processes > 1 else ''}", {})[one.engine] = one.rates
    return draw_panels(panels, "target tokens per second, without padding", path)
