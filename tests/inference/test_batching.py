"""Batches keep their limits, and searches get every sentence once."""

import pytest

from hf_vanilla_transformer.inference import workers
from hf_vanilla_transformer.inference.batching import EncodedSentence, length_batches, search_jobs


@pytest.mark.parametrize(("batch_size", "max_tokens"), [(1, 100), (5, 1), (5, 40), (64, 40), (64, 10_000)])
def test_length_batches_hold_all_sentences_within_both_limits(batch_size, max_tokens):
    lengths = {index + 7: (index * 37) % 50 + 1 for index in range(100)}
    batches = list(length_batches(lengths, batch_size, max_tokens))
    assert sorted(index for batch in batches for index in batch) == sorted(lengths)
    sizes = [(len(batch), max(lengths[index] for index in batch)) for batch in batches]
    assert all(count <= batch_size and (count == 1 or count * longest <= max_tokens) for count, longest in sizes)
    ordered = [lengths[index] for batch in batches for index in batch]
    assert ordered == sorted(ordered, reverse=True)
    for (count, longest), following in zip(sizes, batches[1:], strict=False):  # no batch could have held one more
        assert following and (count == batch_size or (count + 1) * longest > max_tokens)


@pytest.mark.parametrize("refill", [False, True])
def test_search_jobs_hold_every_sentence_once_and_prefixes_of_one_length(monkeypatch, refill):
    monkeypatch.setattr(workers, "MIN_SENTENCES", 4)
    sentences = {
        i: EncodedSentence(source=[5] * (40 if i == 30 else 1 + i % 7), prefix=[7] * (2 * (i % 5 == 4)))
        for i in range(50)
    }
    jobs = search_jobs(sentences, batch_size=4, max_tokens=60, refill=refill, workers=3)
    assert sorted(i for job in jobs for i in job.indices) == list(sentences)
    assert all(len({len(sentences[i].prefix) for i in job.indices}) == 1 for job in jobs)
    assert jobs[0].indices == [30]  # too long for company, and first
    sizes = [len(job.indices) for job in jobs]
    assert sizes.count(13) == 3 if refill else max(sizes) == 4
    assert all(job.batch_size == min(4, len(job.indices)) for job in jobs)
