"""`PackedDecoder`, step by step, against the model's modules."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.decoding_vanilla_transformer import EncodedSource, ModuleDecoder
from hf_vanilla_transformer.engine import c_kernels, linear, packed_decoder
from hf_vanilla_transformer.engine.packed_decoder import OutputRows, PackedDecoder
from hf_vanilla_transformer.engine.packed_weights import PackedWeights, fold_biases
from hf_vanilla_transformer.inference import optimize_for_inference
from hf_vanilla_transformer.search_vanilla_transformer import BeamState, Decoder
from tests.model_helpers import PAD, START, TYING_MODES, assert_near, padded, sentences, tiny_model

Model = VanillaTransformerForConditionalGeneration

OPTIONS: list[dict[str, Any]] = [
    *(
        {"share_encoder_decoder_embeddings": share, "tie_word_embeddings": tie}
        for share, tie in TYING_MODES
    ),
    *(
        {"position_encoding_type": kind}
        for kind in ("learned", "sinusoidal_split", "sinusoidal_fairseq")
    ),
    {
        "activation_function": "silu",
        "lm_head_bias": True,
        "final_layer_norm": True,
    },
    {"layer_norm_position": "pre"},
    {
        "attention_bias": False,
        "scale_embedding": False,
        "layer_norm_eps": 1e-3,
    },
    {"head_dim": 6, "value_head_dim": 10},
    {
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 20,
        "d_model": 36,
        "decoder_layers": 3,
    },
    {"decoder_vocab_size": 50, "share_encoder_decoder_embeddings": False},
]


every_kind = pytest.mark.parametrize("fields", OPTIONS, ids=lambda fields: ",".join(fields))


def sources(*lengths: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random sentences, and what of them is no padding."""
    ids = padded(sentences(list(lengths), seed=seed))
    return ids, ids.ne(PAD).long()


def encoded(
    model: Model,
    lengths: list[int],
    seed: int = 0,
) -> EncodedSource:
    """Random sentences, encoded by the modules."""
    ids, mask = sources(*lengths, seed=seed)
    return EncodedSource(model.get_encoder()(ids, mask).last_hidden_state, mask)


def decoders(
    model: Model,
    lengths: list[int],
    seed: int = 0,
) -> tuple[PackedDecoder, ModuleDecoder]:
    source = encoded(model, lengths, seed)
    weights = PackedWeights(model, model.dtype, None)
    return PackedDecoder(weights, source), ModuleDecoder(model, source)


class Walk:
    """A search whose tokens and parents are drawn at random."""

    def __init__(
        self,
        decoder: Decoder,
        batch: int,
        beams: int,
        prefix: int = 1,
        capacity: int = 60,
        seed: int = 0,
    ):
        self.decoder = decoder
        self.beams = beams
        self.draw = torch.Generator().manual_seed(seed)
        tokens = self.random_tokens(batch, prefix)
        tokens[:, 0] = START
        if prefix > 1:
            decoder.prefill(tokens[:, :-1])
        limits = torch.full((batch,), capacity)
        self.state = BeamState.start(
            tokens,
            limits,
            torch.ones(capacity + 1),
            torch.full_like(limits, beams - 1),
            decoder.initial_beams,
            beams,
        )

    def random_tokens(self, *shape: int) -> Tensor:
        return torch.randint(4, 40, shape, generator=self.draw)

    def steps(self, count: int) -> list[Tensor]:
        """The logits (B, K, V) of so many steps."""
        found = []
        for _ in range(count):
            logits = self.decoder.logits(self.state)
            found.append(logits.expand(-1, self.beams, -1))
            batch, running = self.state.next_tokens.shape
            self.state = self.state._replace(
                next_tokens=self.random_tokens(batch, self.beams),
                parents=torch.randint(running, (batch, self.beams), generator=self.draw),
                lengths=self.state.lengths + 1,
            )
        return found

    def select(self, rows: list[int]) -> None:
        self.state = self.state.select(torch.tensor(rows))
        self.decoder.select(torch.tensor(rows))

    def replace(
        self,
        rows: list[int],
        other: "Walk",
    ) -> None:
        """Other sentences begin. All beams of a new one go on from its only one."""
        index = torch.tensor(rows)
        self.decoder.replace(index, other.decoder)
        new = other.state
        self.state = self.state._replace(
            lengths=self.state.lengths.index_copy(0, index, new.lengths),
            next_tokens=self.state.next_tokens.index_copy(
                0, index, new.next_tokens.expand(-1, self.beams)
            ),
            parents=self.state.parents.index_fill(0, index, 0),
        )


Search = Callable[[Decoder], list[Tensor]]


def assert_as_by_modules(
    model: Model,
    lengths: list[int],
    search: Search,
) -> None:
    """The logits of a search of sentences of these lengths."""
    assert_same_walk(*map(search, decoders(model, lengths)))


def assert_same_walk(
    ours: list[Tensor],
    theirs: list[Tensor],
    tolerance: float = 1e-5,
) -> None:
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_near(mine, other, tolerance, f"step {step}")


@pytest.fixture
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """With one thread the functions in C compute few rows, with three those of torch."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    return request.param


in_c = pytest.mark.parametrize("threads", [1, 3], indirect=True)
by_torch = pytest.mark.parametrize("threads", [3], indirect=True)


@every_kind
@in_c
@torch.no_grad()
def test_packed_decoder_computes_every_kind_of_model(fields: dict[str, Any], threads: int) -> None:
    def search(decoder: Decoder) -> list[Tensor]:
        walk = Walk(decoder, 3, beams=4, prefix=2)
        before = walk.steps(5)
        walk.select([0, 2])
        return before + walk.steps(4)

    assert_as_by_modules(tiny_model(3, **fields), [5, 2, 7], search)


@every_kind
@by_torch  # in C the weights are as they are
@torch.no_grad()
def test_folded_biases_change_no_logits(
    fields: dict[str, Any],
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "_can_prepack", lambda weight: False)
    model = tiny_model(3, **fields)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    packed, modules = decoders(model, [5, 2, 7])
    fold_biases(packed.weights)
    folded = {layer.fc2.bias is None for layer in packed.weights.layers}
    assert folded == {fields.get("layer_norm_position") != "pre"}
    ours = Walk(packed, 3, beams=4, prefix=2).steps(5)
    theirs = Walk(modules, 3, beams=4, prefix=2).steps(5)
    assert_same_walk(ours, theirs, 1e-4)


@pytest.mark.parametrize("least", [0, 2**19])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("prefix", [1, 4])
@pytest.mark.parametrize("lengths", [[4], [3, 3, 3], [1, 9, 4]])
@in_c
@torch.no_grad()
def test_packed_decoder_computes_every_batch(
    beams: int,
    prefix: int,
    lengths: list[int],
    least: int,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "_LEAST_PREPACKED", least)
    assert_as_by_modules(
        tiny_model(1),
        lengths,
        lambda decoder: Walk(decoder, len(lengths), beams, prefix).steps(8),
    )


@pytest.mark.parametrize(
    "fields", [*OPTIONS[:2], {"head_dim": 6, "value_head_dim": 10}], ids=",".join
)
@pytest.mark.parametrize("has_compiler", [True, False])
@torch.no_grad()
def test_wide_searches_compute_with_and_without_a_compiler(
    fields: dict[str, Any],
    has_compiler: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_compiler:
        monkeypatch.setattr(c_kernels, "library", lambda: None)
    elif c_kernels.library() is None:
        pytest.skip("needs the C functions")
    model = tiny_model(3, **fields)
    found = []
    early = decoders(model, [5, 2, 7])
    late = decoders(model, [9], seed=1)
    for decoder, other in zip(early, late, strict=True):
        walk = Walk(decoder, 3, beams=packed_decoder.WIDE + 1, prefix=2)
        logits = walk.steps(24)
        walk.select([0, 2])
        logits += walk.steps(8)
        walk.replace([1], Walk(other, 1, beams=walk.beams, prefix=2, seed=1))
        found.append(logits + walk.steps(24))
    assert_same_walk(*found)


@torch.no_grad()
def test_one_sentence_of_a_wide_search_has_a_cache_of_its_own() -> None:
    def search(decoder: Decoder) -> list[Tensor]:
        walk = Walk(decoder, 3, beams=packed_decoder.WIDE)
        walk.steps(3)
        walk.select([1])
        return walk.steps(8)

    assert_as_by_modules(tiny_model(1), [5, 2, 7], search)


@torch.no_grad()
def test_caches_of_wide_searches_grow_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_decoder, "kernels_compute", lambda device, dtype: True)
    decoder, _ = decoders(tiny_model(1), [5, 2])
    parents = torch.zeros(2, 50, dtype=torch.long)
    sizes = set()
    for _ in range(20):
        decoder.take_rows(parents)
        decoder.slots.visible.fill_(True)  # as if every beam saw all slots, so that none is free
        capacity = decoder.slots.visible.shape[2]
        room = decoder.self_kv[0].shape[1]
        assert capacity <= room <= 2 * capacity
        sizes.add(room)
        parents = torch.arange(50).expand(2, -1)
    assert capacity >= 1000
    assert len(sizes) < 8


@torch.no_grad()
def test_replaced_rows_compute_what_they_do_alone() -> None:
    model = tiny_model(1)
    early = decoders(model, [5, 2])
    late = decoders(model, [9], seed=1)
    only = decoders(model, [9], seed=1)
    for now, later, alone in zip(early, late, only, strict=True):
        walk = Walk(now, 2, beams=2)
        walk.steps(7)
        walk.replace([1], Walk(later, 1, beams=2))
        single = Walk(alone, 1, beams=2)
        for step in range(5):
            (together,) = walk.steps(1)
            (one,) = single.steps(1)
            assert_near(together[1], one[0])
            single.state = single.state._replace(
                next_tokens=walk.state.next_tokens[1:],
                parents=walk.state.parents[1:] * min(step, 1),  # alone, one beam runs at first
            )


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-12),
        (torch.bfloat16, 0.1),
        (torch.float16, 0.02),
    ],
)
@in_c
@torch.no_grad()
def test_packed_decoder_computes_in_the_models_dtype(
    dtype: torch.dtype,
    tolerance: float,
    threads: int,
) -> None:
    packed, modules = decoders(tiny_model(2).to(dtype), [5, 2, 7])
    ours = Walk(packed, 3, 4).steps(8)
    theirs = Walk(modules, 3, 4).steps(8)
    computes_in_c = threads == 1 and dtype == torch.bfloat16 and c_kernels.library() is not None
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == (torch.float32 if computes_in_c else dtype)
        assert (mine - other).abs().max() < tolerance


@by_torch  # in C all logits are in float32
@torch.no_grad()
def test_packed_decoder_computes_in_autocasts_dtype(threads: int) -> None:
    model = optimize_for_inference(tiny_model(2))
    source = encoded(model, [5, 2])

    def logits() -> list[Tensor]:
        return Walk(model.make_decoder(source, 3), 2, 3).steps(6)

    full = logits()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = logits()
    for a, b in zip(full, half, strict=True):
        assert (a.dtype, b.dtype) == (torch.float32, torch.bfloat16)
        assert (a - b).abs().max() < 0.1
    assert_same_walk(logits(), full, 0.0)


@torch.no_grad()
def test_fully_masked_sources_do_not_attend_to_their_neighbours() -> None:
    found = []
    for others in (1.0, 9.0):
        states = torch.full((4, 16, 32), others)
        states[2] = 1.0
        mask = torch.ones(4, 16)
        mask[2] = 0
        weights = PackedWeights(tiny_model(1), torch.float32, None)
        decoder = PackedDecoder(weights, EncodedSource(states, mask))
        found.append(Walk(decoder, 4, 4).steps(4))
    for first, second in zip(*found, strict=True):
        assert_near(first[2], second[2], 1e-6)
        assert not first[1].equal(second[1])


@torch.no_grad()
def test_caches_hold_each_sentence_once() -> None:
    packed, modules = decoders(tiny_model(), [5, 2, 7])
    for decoder in (packed, modules):
        Walk(decoder, 3, beams=6).steps(4)
        assert (
            decoder.slots.visible.shape[2] == 16
        )  # of 1 + 3 · 6 tokens, some of which no beam has in its past
    caches = modules.cache.self_attention_cache, modules.cache.cross_attention_cache
    layers = [layer for cache in caches for layer in cache.layers]
    by_modules = [each for layer in layers for each in (layer.keys, layer.values)]
    for tensors in ([*packed.self_kv, *packed.cross_kv], by_modules):
        # layers, keys and values, width, bytes, sentences, positions of source and target
        nbytes = sum(tensor.nbytes for tensor in tensors)
        assert nbytes == 2 * 2 * 32 * 4 * 3 * (7 + 16)


@torch.no_grad()
def test_source_padding_of_sentences_that_left_is_cut() -> None:
    decoder, _ = decoders(tiny_model(), [5, 2, 9])
    decoder.select(torch.tensor([0, 1]))
    assert [kv.shape[:2] for kv in decoder.cross_kv] == [(2, 5)] * 2
    assert decoder.source_mask is not None
    decoder.select(torch.tensor([0]))
    assert decoder.source_mask is None, "nothing is masked, so the fastest kernels can run"


@pytest.mark.parametrize("kind", ["sinusoidal", "sinusoidal_fairseq", "learned"])
@torch.no_grad()
def test_position_encodings_grow_with_the_longest_hypothesis(kind: str) -> None:
    model = tiny_model(position_encoding_type=kind, max_position_embeddings=200)
    weights = PackedWeights(model, torch.float32, None)
    for count in (3, 64, 150, 7):
        encodings = weights.position_encodings(count)[1:]  # by the number of tokens
        assert len(encodings) > count
        nothing = torch.zeros(1, count, 32)
        expected = model.get_decoder().embed(nothing, torch.arange(count)[None])
        assert_near(encodings[:count], expected[0], 1e-6)


@torch.no_grad()
def test_position_encodings_are_computed_once() -> None:
    position_encodings = PackedWeights(tiny_model(), torch.float32, None).position_encodings
    encodings = position_encodings(3)
    longest = len(encodings) - 2
    for count in (1, 3, longest):
        assert position_encodings(count) is encodings
    assert len(position_encodings(longest + 1)) > longest + 2


def test_rows_of_an_output_layer_give_the_best_of_all_candidates() -> None:
    """With fewer beams than candidates, and hidden rows."""
    tokens = torch.tensor([3, 1, 8, 6, 0, 5])
    logits = torch.randn(2, 3, len(tokens))  # (B, K, n)
    hidden = torch.zeros(2, 1, len(tokens), dtype=torch.bool)
    hidden[1, 0, 2] = True
    whole = torch.full((2, 3, 9), -torch.inf)
    whole[..., tokens] = logits.masked_fill(hidden, -torch.inf)
    expected = whole.log_softmax(dim=-1).topk(5)

    config = SimpleNamespace(
        num_candidates=5,
        num_beams=3,
        extend=lambda state, log_probs, index, penalties: (log_probs, index),
    )
    rows = OutputRows(head=None, ids=tokens, hidden=hidden, size=9)
    log_probs, index = rows.advance(None, logits, config, None)
    torch.testing.assert_close(log_probs, expected.values)
    assert index.equal(expected.indices)


@pytest.mark.parametrize(("device", "trims"), [("cpu", True), ("meta", False)])
def test_only_a_cpu_knows_the_lengths_of_sources_at_once(device: str, trims: bool) -> None:
    visible = torch.ones(1, 2, dtype=torch.bool, device=device)
    assert PackedDecoder._trims(SimpleNamespace(), visible) is trims
