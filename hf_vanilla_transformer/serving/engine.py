"""Threads that translate the sentences of all requests together.

The engine has the model and the queue. It knows token ids only, because tokenizers are not thread-safe. They have a
thread of their own.
"""

import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ..engine.c_kernels import library
from ..engine.continuous import ContinuousSearch, FoundHypothesis
from ..engine.optimize import optimize_if_possible
from ..engine.shortlist import with_shortlist
from ..inference.batching import MAX_TOKENS
from ..inference.translator import Translator, check_search
from ..inference.workers import worker_count
from ..utils.errors import check_at_least_one

logger = logging.getLogger(__name__)

Outcome: TypeAlias = list[FoundHypothesis] | Exception


class QueueFull(Exception):
    """The queue has no capacity for the sentences of a request."""


@dataclass(eq=False)
class QueuedSentence:
    """A sentence of a request, and the future of its translations."""

    source: list[int]
    n_best: int
    turn: int  # sentences are taken in the order of their turns
    prefix: list[int]  # that the translation starts with
    future: "Future[list[FoundHypothesis]]" = field(default_factory=Future)


class Engine:
    """Translates sentences in continuous batches, in one thread per worker.

    Args:
        translator: its model translates, in evaluation mode from now on.
        batch_size: most sentences in the batch of a worker. A worker that runs out of a GPU's memory halves its own.
        max_tokens_per_batch: most source tokens in it, padding included.
        max_queue: most sentences that wait.
        settings: arguments of `generate`, such as `num_beams`.

    Raises:
        UserError: a number is below 1, or `ContinuousSearch` does not support the settings.
    """

    def __init__(
        self,
        translator: Translator,
        *,
        batch_size: int = 64,
        max_tokens_per_batch: int = MAX_TOKENS,
        max_queue: int = 1024,
        **settings: Any,
    ):
        check_at_least_one(
            batch_size=batch_size, max_tokens_per_batch=max_tokens_per_batch, max_queue=max_queue
        )
        check_search({"batch_size": batch_size, **settings})
        self.model = translator.model.eval()
        self.max_queue = max_queue
        optimize_if_possible(self.model)
        if self.model.device.type == "cpu":
            library()  # the first request should not wait for a compiler
        workers = translator.workers or worker_count(self.model)
        model = (
            self.model
            if translator.shortlist is None
            else with_shortlist(self.model, translator.shortlist)
        )
        self._searches = [
            ContinuousSearch(
                model,
                batch_size,
                max_tokens_per_batch,
                translator.directions.prefix_length,
                **settings,
            )
            for _ in range(workers)
        ]
        self.num_beams = self._searches[0].search.config.num_beams
        self._changed = threading.Condition()  # guards everything below
        self._waiting: list[QueuedSentence] = []  # sorted by their turns
        self._turn = 0  # of the sentence that was taken last
        self._running = [0] * workers  # sentences, by worker
        self._closing = False
        self.translated = 0
        share = max(1, torch.get_num_threads() // workers)
        self._threads = [
            threading.Thread(
                target=self._work, args=(worker, share), name=f"translate-{worker}", daemon=True
            )
            for worker in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def log_probability(self, hypothesis: FoundHypothesis, given: int = 0) -> float | None:
        """The natural logarithm of the probability of a hypothesis. None after greedy search.

        Its first `given` tokens were forced, and do not count.
        """
        if hypothesis.score is None:
            return None
        penalty = self._searches[0].search.penalty
        return penalty.log_probability(hypothesis.score, len(hypothesis.tokens) - given)

    @property
    def waiting(self) -> int:
        """Sentences in the queue, without those that were cancelled."""
        with self._changed:
            return sum(not sentence.future.cancelled() for sentence in self._waiting)

    @property
    def running(self) -> int:
        """Sentences in the batches."""
        return sum(self._running)

    @property
    def alive(self) -> bool:
        """Whether every thread can translate."""
        return all(thread.is_alive() for thread in self._threads)

    @property
    def ready(self) -> bool:
        """Whether a sentence would be translated: the engine lives, is not closing, and its queue is not full."""
        return self.alive and not self._closing and self.waiting < self.max_queue

    def submit(
        self, sources: Iterable[list[int]], n_best: int = 1, prefix: Sequence[int] = ()
    ) -> list["Future[list[FoundHypothesis]]"]:
        """Put the sentences of a request into the queue, all or none of them.

        Args:
            sources: token ids.
            n_best: hypotheses of each sentence, at most `num_beams`.
            prefix: the first token ids of all translations, as many in every request.

        Returns:
            A future for each sentence. It can be cancelled at any time.

        Raises:
            QueueFull: the sentences do not fit, or the engine is closing.
        """
        with self._changed:
            # Each request has one sentence per turn, so that a small one does not wait for all of a large one.
            sentences = [
                QueuedSentence(source, n_best, turn, list(prefix))
                for turn, source in enumerate(sources, self._turn)
            ]
            if len(self._waiting) + len(sentences) > self.max_queue:
                self._waiting = [
                    sentence for sentence in self._waiting if not sentence.future.cancelled()
                ]
            if self._closing or len(self._waiting) + len(sentences) > self.max_queue:
                raise QueueFull
            self._waiting = sorted([*self._waiting, *sentences], key=lambda sentence: sentence.turn)
            self._changed.notify_all()
        return [sentence.future for sentence in sentences]

    def close(self) -> None:
        """Translate the submitted sentences, then end the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self, worker: int, threads: int) -> None:
        """Run the loop of one thread: sentences join its batch, and leave it when they are done."""
        torch.set_num_threads(threads)
        search = self._searches[worker]
        while True:
            with self._changed:
                while not self._waiting and not search:
                    if self._closing:
                        return
                    self._changed.wait()
                joining = self._next_sentences(worker, search)
            search.drop({key for key in search.keys if key.future.cancelled()})
            try:
                results = [*_join(search, joining), *search.step()]
            except torch.OutOfMemoryError as error:
                results = self._halve(worker, search, joining, error)
            except Exception as error:  # a bug: only these requests fail
                logger.exception("translation failed")
                results = [(sentence, error) for sentence in {*joining, *search.keys}]
                search.clear()
            with self._changed:
                # Before the futures resolve, so that a client finds its answer counted.
                self._running[worker] = len(search)
                self.translated += sum(not isinstance(result, Exception) for _, result in results)
            for sentence, result in results:
                _resolve(sentence, result)

    def _halve(
        self,
        worker: int,
        search: ContinuousSearch,
        joining: list[QueuedSentence],
        error: torch.OutOfMemoryError,
    ) -> list[tuple[QueuedSentence, Outcome]]:
        """Put the sentences of a batch without memory back into the queue, and halve the batches of this worker.

        Return the error of a sentence that was alone.
        """
        sentences = [*dict.fromkeys([*joining, *search.keys])]
        search.clear()
        if len(sentences) <= 1:
            logger.error("%s has no memory for a sentence", self.model.device, exc_info=error)
            return [(sentence, error) for sentence in sentences]
        search.batch_size = len(sentences) // 2
        logger.warning(
            "%s has no memory for %d sentences at once: worker %d translates %d from now on",
            self.model.device,
            len(sentences),
            worker,
            search.batch_size,
        )
        with self._changed:
            self._waiting = sorted([*sentences, *self._waiting], key=lambda sentence: sentence.turn)
        return []

    def _next_sentences(self, worker: int, search: ContinuousSearch) -> list[QueuedSentence]:
        """Take the sentences from this worker's share of the queue that fit into its batch."""
        if not self._waiting or not search.wants(len(self._waiting)):
            return []
        everything = len(self._waiting) + sum(self._running)
        share = -(-everything // len(self._running))
        taken: list[QueuedSentence] = []
        while self._waiting and len(search) + len(taken) < share:
            if not self._waiting[0].future.cancelled():
                if not search.fits([sentence.source for sentence in (*taken, self._waiting[0])]):
                    break
                taken.append(self._waiting[0])
            self._turn = self._waiting.pop(0).turn
        self._running[worker] = len(search) + len(taken)
        return taken


def _join(
    search: ContinuousSearch, sentences: list[QueuedSentence]
) -> list[tuple[QueuedSentence, Outcome]]:
    """Start sentences. Return those that cannot start, with their errors."""
    rows = [(sentence, sentence.source, sentence.n_best, sentence.prefix) for sentence in sentences]
    failed: dict[QueuedSentence, Outcome] = {}
    try:
        search.join(rows)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        for row in rows:
            try:
                search.prepare([row])
            except Exception as error:
                logger.exception("a sentence cannot start")
                failed[row[0]] = error
        search.join([row for row in rows if row[0] not in failed])
    return [*failed.items()]


def _resolve(sentence: QueuedSentence, result: Outcome) -> None:
    if not sentence.future.set_running_or_notify_cancel():
        return
    if isinstance(result, Exception):
        sentence.future.set_exception(result)
    else:
        sentence.future.set_result(result)
