"""n-best lists as candidates with probabilities.

Several hypotheses can mean the same: two spellings of a molecule, two cases of a word. A normaliser tells which do.
They are one candidate, whose probability is their sum. An input can also have several spellings, each with its own
n-best list.

Candidates are ranked by the sum of 1 / place over the lists of the spellings, and then by probability (Zhong et al.
2022, https://doi.org/10.1039/D2SC02763A, with α = 1). With one spelling this is the order of the scores, in which a
candidate has the place of its best hypothesis. `evaluate --n_best` counts in the same order.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..corpora.readers import lines_of
from ..utils.errors import UserError, check_at_least_one
from ..utils.normalization import FormatPlace, Normalizer, n_best_places
from .hypothesis import Hypothesis
from .line_warnings import LineWarnings
from .text_io import on_one_line

if TYPE_CHECKING:
    from .translator import Translator

#: Formats of n-best lists. "moses" is `i ||| text ||| score` of Moses, Marian and fairseq.
FORMATS = ("moses", "tsv", "jsonl")
_MOSES_LINE = re.compile(r"\s*(\d+) \|\|\| (.*?)(?: \|\|\| .*)?")
_TSV_LINE = re.compile(r"(\d+)\t(\d+)\t([^\t]*)\t[^\t]*\t[^\t]*(?:\t[^\t]*)?")


@dataclass(frozen=True)
class Candidate:
    """One of the answers to an input."""

    #: normalised, or as the model wrote it if the normaliser refused it
    text: str
    #: of its best hypothesis, as in `Hypothesis`. None after sampling
    score: float | None
    #: its share of the probability of all candidates of the input. The shares add up to 1
    probability: float
    #: whether the normaliser took it. None without one: nobody has checked it
    valid: bool | None = None
    #: symbols of the input that the model does not know. None if its vocabulary is not closed
    unknown: tuple[str, ...] | None = None


def merge_candidates(
    lists: Sequence[Sequence[Hypothesis]],
    normalize: Normalizer | None = None,
    counts: LineWarnings | None = None,
) -> list[Candidate]:
    """Return the candidates of one input, ranked as the head of this module says.

    Args:
        lists: the hypotheses of each spelling of the input, best first. Every spelling counts the same, but for a
            blank line, which is none.
        normalize: returns the text that stands for all of its meaning. None, or an exception, means that a text is
            invalid. An invalid text stays a candidate of its own.
        counts: counts the texts and the invalid ones.
    """
    searched = [each for each in lists if each[0].log_probability is not None]
    lists = searched or lists
    weights: dict[FormatPlace, Fraction] = defaultdict(Fraction)
    members: dict[FormatPlace, list[tuple[float | None, float]]] = defaultdict(list)
    for hypotheses in lists:
        shares = probability_shares(hypotheses)
        places = n_best_places([one.text for one in hypotheses], normalize)
        for place, (key, rows) in enumerate(places.items(), start=1):
            weights[key] += Fraction(1, place)
            members[key] += [(hypotheses[row].score, shares[row]) for row in rows]
    symbols = [each for one, *_ in lists for each in one.unknown or ()]
    unknown = None if lists[0][0].unknown is None else tuple(dict.fromkeys(symbols))
    candidates = []
    for (text, valid), joined in members.items():
        scores = [score for score, _ in joined if score is not None]
        probability = sum(share for _, share in joined) / len(lists)
        score = max(scores, default=None)
        candidates.append(Candidate(text, score, probability, valid, unknown))
        if counts is not None:
            counts.hypotheses += len(joined)
            counts.invalid += len(joined) * (valid is False)
    return sorted(
        candidates,
        key=lambda one: (weights[one.text, one.valid], one.probability),
        reverse=True,
    )


def probability_shares(hypotheses: Sequence[Hypothesis]) -> list[float]:
    """The probability of each hypothesis, divided by that of all of them.

    Hypotheses without a log-probability, such as a blank line's, count the same.
    """
    log_probabilities = [hypothesis.log_probability for hypothesis in hypotheses]
    known = [log_p for log_p in log_probabilities if log_p is not None]
    if len(known) < len(hypotheses):
        return [1 / len(hypotheses)] * len(hypotheses)
    highest = max(known)
    weights = [math.exp(log_p - highest) for log_p in known]
    total = sum(weights)
    return [weight / total for weight in weights]


def translate_candidates(
    translator: "Translator",
    sentences: Iterable[str],
    n_best: int,
    *,
    normalize: Normalizer | None = None,
    spellings: int = 1,
    **settings: Any,
) -> Iterator[list[Candidate]]:
    """Return the candidates of each input, ranked as the head of this module says.

    Args:
        translator: searches with its model.
        sentences: inputs. With `spellings` = M, M lines in turn are spellings of one input.
        n_best: candidates of an input, at most, and hypotheses of its line, at most as many as beams. With
            `spellings` each line has as many hypotheses as beams.
        normalize: makes texts of the same meaning equal. See `merge_candidates`.
        spellings: lines of each input (test-time augmentation). They are read as they are written.
        settings: as in `Translator.translate_nbest`.

    Raises:
        UserError: what that raises, and as early, or an input with fewer lines than `spellings`.
    """
    check_at_least_one(spellings=spellings, n_best=n_best)
    results: Iterator[list[Hypothesis]]
    of_line = n_best
    if spellings > 1:
        settings["in_form"] = False
        if not settings.get("do_sample"):
            of_line = settings.get("num_beams") or translator.model.generation_config.num_beams or 1
    if settings.get("do_sample"):
        # Sampling gives neither scores nor an order.
        settings["probabilities"] = True
        sampled = translator.translate_nbest(sentences, of_line, **settings)
        results = (sorted(each, key=_log_probability, reverse=True) for each in sampled)
    else:
        results = translator.translate_nbest(sentences, of_line, **settings)
    return _grouped(results, normalize, n_best, spellings, translator.line_warnings)


def _log_probability(hypothesis: Hypothesis) -> float:
    return hypothesis.log_probability or 0.0  # None for a blank line


def _grouped(
    results: Iterator[list[Hypothesis]],
    normalize: Normalizer | None,
    n_best: int,
    spellings: int,
    counts: LineWarnings | None,
) -> Iterator[list[Candidate]]:
    warnings = LineWarnings() if counts is None else counts
    while lists := list(islice(results, spellings)):
        if len(lists) < spellings:
            raise UserError(
                f"spellings: the last input has {len(lists)} lines of {spellings}; give as many for each"
            )
        yield merge_candidates(lists, normalize, warnings)[:n_best]
    if counts is None:
        warnings.warn()


def candidate_lines(
    candidates: Sequence[Candidate], number: int, file_format: str
) -> Iterator[str]:
    """Write the candidates of an input as lines.

    Args:
        candidates: of `translate_candidates`.
        number: of the input, from 1.
        file_format: "tsv" gives a line for each candidate: the number of the input, the rank from 1, the text, the
            score and the probability. "jsonl" gives one line for the input, with a list of candidates. Both have the
            symbols of the input that the model does not know, if its vocabulary is closed: between spaces as the last
            column, as a list `unknown`.
    """
    unknown = candidates[0].unknown
    if file_format == "jsonl":
        rows = [
            {
                "text": one.text,
                "score": one.score,
                "probability": round(one.probability, 5),
                "valid": one.valid,
            }
            for one in candidates
        ]
        of_input = {} if unknown is None else {"unknown": unknown}
        row = {"line": number, **of_input, "candidates": rows}
        yield json.dumps(row, ensure_ascii=False)
        return
    last = "" if unknown is None else "\t" + _cell(" ".join(unknown))
    for rank, one in enumerate(candidates, start=1):
        score = "" if one.score is None else f"{one.score:.4f}"
        yield f"{number}\t{rank}\t{_cell(one.text)}\t{score}\t{one.probability:.5f}{last}"


def _cell(text: str) -> str:
    return on_one_line(text).replace("\t", " ")  # a model can generate any character


def read_n_best(path: str | Path, inputs: int) -> list[list[str]]:
    """Read the texts of n-best lists, best first, from a file in one of `FORMATS`.

    Args:
        path: the file. Each line tells its format.
        inputs: the number of lists.

    Raises:
        UserError: a line of another format or of an input that does not exist, a rank that an input has twice, or an
            input without a list.
    """
    lists: list[dict[int, str]] = [{} for _ in range(inputs)]
    for number, line in enumerate(lines_of(Path(path)), start=1):
        row, texts = _parsed_line(line)
        if not texts:
            raise UserError(
                f"{path}, line {number}: it is no line of an n-best list, which predict --n_best writes"
            )
        if not 0 <= row < inputs:
            raise UserError(f"{path}, line {number}: a list of line {row + 1} of {inputs} lines")
        for rank, text in texts:
            rank = len(lists[row]) + 1 if rank is None else rank
            if rank in lists[row]:
                raise UserError(
                    f"{path}, line {number}: line {row + 1} has rank {rank} twice: give one list for each line"
                )
            lists[row][rank] = text
    if {} in lists:
        raise UserError(f"{path}: line {lists.index({}) + 1} of {inputs} lines has no list")
    return [[text for _, text in sorted(texts.items())] for texts in lists]


def _parsed_line(line: str) -> tuple[int, list[tuple[int | None, str]]]:
    """The number of the input, from 0, and texts of its list with their ranks, if the format has ranks.

    Without texts if the line has none of the formats.
    """
    if match := _MOSES_LINE.fullmatch(line):
        return int(match[1]), [(None, match[2])]
    if match := _TSV_LINE.fullmatch(line):
        return int(match[1]) - 1, [(int(match[2]), match[3])]
    try:
        row = json.loads(line)
        texts = [str(one["text"]) for one in row["candidates"]]
        return int(row["line"]) - 1, list(enumerate(texts, start=1))
    except (ValueError, KeyError, TypeError):
        return 0, []
