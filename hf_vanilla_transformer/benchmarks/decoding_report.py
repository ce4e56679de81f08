"""What a benchmark of decoding has found, as Markdown tables and a picture."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

from .decoding import Measurement
from .harness import draw_panels, family, markdown, precision, spread


@dataclass
class Ratio:
    """How many times the target tokens per second of a peer an engine of ours writes, under one setting."""

    order: str
    batch_size: int
    num_beams: int
    ours: str
    peer: str
    times: float


@dataclass
class Scaling:
    """How many times the seconds a batch takes when it has four times as many beams in all."""

    engine: str
    order: str
    smaller: tuple[int, int]  # sentences and beams of each
    larger: tuple[int, int]
    times: float


def ratios(found: Sequence[Measurement]) -> list[Ratio]:
    """Ours against each peer of the same precision; against one that has none of ours, the fastest of ours."""
    compared = []
    for peer in found:
        same = [one for one in found if one.setting == peer.setting and family(one.engine) == "ours"]
        if family(peer.engine) == "ours" or not same:
            continue
        equal = [one for one in same if precision(one.engine) == precision(peer.engine)]
        ours = max(equal or same, key=lambda one: one.tokens_per_second)
        times = ours.tokens_per_second / peer.tokens_per_second
        compared.append(Ratio(*peer.setting, ours.engine, peer.engine, times))
    return compared


def scaling(found: Sequence[Measurement]) -> list[Scaling]:
    """All pairs of settings of an engine of which one has four times the sentences or four times the beams."""
    pairs = []
    for a, b in permutations(found, 2):
        sizes, beams = (a.batch_size, b.batch_size), (a.num_beams, b.num_beams)
        four = {(1, 4), (4, 1)} & {(sizes[1] / sizes[0], beams[1] / beams[0])}
        if four and (a.engine, a.order) == (b.engine, b.order):
            times = b.seconds_per_batch / a.seconds_per_batch
            pairs.append(Scaling(a.engine, a.order, (sizes[0], beams[0]), (sizes[1], beams[1]), times))
    return pairs


def report(found: Sequence[Measurement], caches: Mapping[str, int], cache_beams: int) -> str:
    """Everything as Markdown."""
    parts = [_speed_table(found)]
    if pairs := scaling(found):
        parts.append(_scaling_table(pairs))
    if caches:
        parts.append(_cache_table(caches, cache_beams))
    return "\n\n".join(parts)


def plot(found: Sequence[Measurement], path: str | Path) -> Path:
    """Draw target tokens per second: a panel a setting, a bar an engine, from the slowest to the fastest round.

    Raises:
        UserError: no matplotlib, or a kind of picture that it does not know.
    """
    panels: dict[str, dict[str, Sequence[float]]] = {}
    for one in found:
        rates = [one.target_tokens / seconds for seconds in one.seconds]
        panels.setdefault(_setting_name(one.setting), {})[one.engine] = rates
    return draw_panels(panels, "target tokens per second", path)


def _speed_table(found: Sequence[Measurement]) -> str:
    times = {(one.order, one.batch_size, one.num_beams, one.peer): one for one in ratios(found)}
    rows = []
    for one in found:
        median = statistics.median(one.seconds)
        ratio = times.get((*one.setting, one.engine))
        rows.append(
            [
                one.engine,
                one.order,
                str(one.batch_size),
                str(one.num_beams),
                f"{one.tokens_per_second:,.0f}",
                f"{spread(one.seconds):.0%}",
                f"{1000 * median / one.sentences:.1f}",
                "" if ratio is None else f"{ratio.times:.2f} ({ratio.ours})",
                "" if one.peak_mib is None else f"{one.peak_mib:,.0f}",
                f"{one.same_output:.1%}",
                "" if one.bleu is None else f"{one.bleu:.2f}",
            ]
        )
    head = "engine|order|batch|beams|target tokens/s|spread|ms a sentence|ours / this|peak MiB|same output|BLEU"
    return markdown(head.split("|"), rows)


def _scaling_table(pairs: Sequence[Scaling]) -> str:
    rows = [
        [one.engine, one.order, "{} × {}".format(*one.smaller), "{} × {}".format(*one.larger), f"{one.times:.2f}"]
        for one in pairs
    ]
    return markdown(["engine", "order", "batch × beams", "four times", "times the seconds a batch"], rows)


def _cache_table(caches: Mapping[str, int], beams: int) -> str:
    rows = []
    for engine, size in caches.items():
        ours = caches.get(f"ours_{precision(engine)}")
        rows.append([engine, f"{size / 2**20:,.1f}", "" if ours is None else f"{ours / size:.2f}"])
    return markdown(["engine", f"caches, MiB, {beams} beams", "ours / this"], rows)


def _setting_name(setting: tuple[str, int, int]) -> str:
    order, size, beams = setting
    together = "one sentence alone" if size == 1 else f"{size} sentences, {order}"
    return f"{together}\n{'greedy' if beams == 1 else f'{beams} beams'}"
