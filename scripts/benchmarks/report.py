"""The figures of an engine, collected round by round, and their Markdown table."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_vanilla_transformer.utils.markdown import markdown_table

#: Format of each additional column of the table.
FORMATS = {
    "ms per sentence": ".1f",
    "same output": ".1%",
    "BLEU": ".2f",
    "KV caches, MiB": ",.1f",
    "padding": ".1%",
    "peak MiB of the update": ",.0f",
}


def family(engine: str) -> str:
    """The library of an engine: its name up to the first `_`."""
    return engine.partition("_")[0]


def precision(engine: str) -> str:
    """The precision of an engine: its name from the last `_` on."""
    return engine.rpartition("_")[2]


@dataclass
class Measurement:
    """One engine under one setting. The lists have one item per round and grow while the benchmark runs."""

    engine: str
    setting: dict[str, int | str]  # equal for engines that are compared with each other
    more: dict[str, Any] = field(default_factory=dict)  # additional figures
    seconds: list[float] = field(default_factory=list)
    target_tokens: list[int] = field(default_factory=list)  # without padding
    peak_mib: float | None = None  # of the process with its model, or of torch on the GPU

    @property
    def rates(self) -> list[float]:
        """Target tokens per second."""
        return [
            tokens / seconds
            for tokens, seconds in zip(self.target_tokens, self.seconds, strict=True)
        ]

    @property
    def tokens_per_second(self) -> float:
        """The median rate."""
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """(fastest rate - slowest rate) / median."""
        return (max(self.rates) - min(self.rates)) / self.tokens_per_second

    def add(self, seconds: float, target_tokens: int, peak_mib: float | None) -> None:
        """Add a round."""
        self.seconds.append(seconds)
        self.target_tokens.append(target_tokens)
        self.peak_mib = peak_mib

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return asdict(self) | {
            name: getattr(self, name) for name in ("rates", "tokens_per_second", "spread")
        }


def table(measurements: Sequence[Measurement]) -> str:
    """A Markdown table with a row for each measurement."""
    alone = {
        (one.engine, one.setting.get("preset")): one.tokens_per_second
        for one in measurements
        if one.setting.get("processes") == 1
    }
    more = [name for name in FORMATS if any(one.more.get(name) is not None for one in measurements)]
    rows = []
    for one in measurements:
        ours = _compared(measurements, one)
        rate = one.tokens_per_second
        row = {
            "engine": one.engine,
            **one.setting,
            "target tokens/s": f"{rate:,.0f}",
            "spread": f"{one.spread:.0%}",
        }
        row["ours / this"] = f"{ours.tokens_per_second / rate:.2f} ({ours.engine})" if ours else ""
        row["peak MiB"] = _number(one.peak_mib, ",.0f")
        row["ours / this, peak"] = (
            f"{ours.peak_mib / one.peak_mib:.2f}" if ours and one.peak_mib else ""
        )
        if "processes" in one.setting:
            single = alone.get((one.engine, one.setting.get("preset")))
            row["times one process"] = f"{rate / single:.2f}" if single else ""
        rows.append(row | {name: _number(one.more.get(name), FORMATS[name]) for name in more})
    return markdown_table(list(rows[0]), [[str(cell) for cell in row.values()] for row in rows])


def _compared(measurements: Sequence[Measurement], peer: Measurement) -> Any:
    """The measurement of this package with the setting of a peer, in the same precision or else the fastest."""
    candidates = [
        one for one in measurements if family(one.engine) == "ours" and one.setting == peer.setting
    ]
    same = [one for one in candidates if precision(one.engine) == precision(peer.engine)]
    fastest = max(same or candidates, key=lambda one: one.tokens_per_second, default=None)
    return None if family(peer.engine) == "ours" else fastest


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
