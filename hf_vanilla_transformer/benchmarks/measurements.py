"""The figures of an engine, collected round by round."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar


def family(engine: str) -> str:
    """The library of an engine: its name up to the first `_`."""
    return engine.partition("_")[0]


def precision(engine: str) -> str:
    """The precision of an engine: its name from the last `_` on."""
    return engine.rpartition("_")[2]


@dataclass(kw_only=True)
class Measurement:
    """One engine under one setting. The lists have one item per round and grow while the benchmark runs."""

    engine: str
    seconds: list[float] = field(default_factory=list)
    target_tokens: list[int] = field(default_factory=list)  # without padding
    peak_mib: float | None = None  # of the process with its model, or of torch on the GPU

    SETTING: ClassVar[tuple[str, ...]] = ()  # fields that are equal for engines that are compared with each other

    @property
    def setting(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.SETTING}

    @property
    def rates(self) -> list[float]:
        """Target tokens per second."""
        return [tokens / seconds for tokens, seconds in zip(self.target_tokens, self.seconds, strict=True)]

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
        return asdict(self) | {name: getattr(self, name) for name in ("rates", "tokens_per_second", "spread")}


@dataclass(kw_only=True)
class DecodingMeasurement(Measurement):
    """One engine under one setting. The end-of-sentence token counts as a token."""

    batch_size: int
    num_beams: int
    sentences: int
    same_output: float  # share of sentences with the same tokens as the first engine's
    bleu: float | None = None
    bleu_signature: str | None = None

    SETTING = ("batch_size", "num_beams")

    @property
    def title(self) -> str:
        batch = "one sentence at a time" if self.batch_size == 1 else f"{self.batch_size} sentences"
        return f"{batch}\n{'greedy' if self.num_beams == 1 else f'{self.num_beams} beams'}"

    @property
    def ms_per_sentence(self) -> float:
        """Milliseconds per sentence in the median round."""
        return 1000 * statistics.median(self.seconds) / self.sentences


@dataclass
class Turn:
    """The turn of one process of a training engine."""

    seconds: float
    target_tokens: int  # without padding
    tokens: int  # of both sides, without padding
    padded_tokens: int  # of both sides, with padding
    peak_mib: float | None
    step_mib: float | None  # the peak above the memory before the first measured update: without weights and moments


@dataclass(kw_only=True)
class TrainingMeasurement(Measurement):
    """One engine in a number of processes, with the memory of the largest process."""

    processes: int
    updates: int  # per round
    tokens: int = 0  # of both sides and all rounds, without padding
    padded_tokens: int = 0
    step_mib: float | None = None

    SETTING = ("processes",)

    @property
    def title(self) -> str:
        return f"{self.processes} process{'es' if self.processes > 1 else ''}"

    @property
    def padding(self) -> float:
        """The share of padding in the tokens of both sides."""
        return 1 - self.tokens / self.padded_tokens

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | {"padding": self.padding}

    def add_turns(self, turns: Sequence[Turn]) -> None:
        """Add a round, with the turn of each process."""
        peak, self.step_mib = (
            max((size for turn in turns if (size := getattr(turn, name)) is not None), default=None)
            for name in ("peak_mib", "step_mib")
        )
        self.add(max(turn.seconds for turn in turns), sum(turn.target_tokens for turn in turns), peak)
        self.tokens += sum(turn.tokens for turn in turns)
        self.padded_tokens += sum(turn.padded_tokens for turn in turns)
