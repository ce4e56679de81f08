"""`optimize_for_inference`: it notices changes of the model, can be undone, and refuses unsupported models."""

import copy
import gc
import pickle
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_vanilla_transformer.decoding_vanilla_transformer import ModuleDecoder
from hf_vanilla_transformer.engine import linear, optimize, packed_weights
from hf_vanilla_transformer.engine.c_kernels import library
from hf_vanilla_transformer.engine.linear import int8_error
from hf_vanilla_transformer.engine.optimize import not_optimizable
from hf_vanilla_transformer.engine.packed_decoder import PackedDecoder
from hf_vanilla_transformer.inference import deoptimize, optimize_for_inference
from hf_vanilla_transformer.layers_vanilla_transformer import VanillaTransformerDecoderLayer
from tests.engine.model_changes import (
    CHANGES,
    TEMPORARY_CHANGES,
    Change,
    assert_as_by_modules,
    by_modules,
    decoder_weight,
    hook_module,
    inject_adapter,
    resident_bytes,
    train_decoder,
    translate,
    write_in_place,
)
from tests.engine.test_packed_decoder import every_kind, sources
from tests.model_helpers import EOS, PAD, assert_near, tiny_model
from tests.search_helpers import AS_DICT, Model, varied_model

needs_int8 = pytest.mark.skipif(
    int8_error(torch.device("cpu"), torch.float32) is not None,
    reason="dynamic int8 needs an x86 CPU",
)


def optimized_model(**fields: Any) -> Model:
    return optimize_for_inference(varied_model(**fields))


@needs_int8  # weights are packed on an x86 CPU
@torch.no_grad()
def test_packed_encoder_computes_the_modules_states(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear, packed_weights):
        monkeypatch.setattr(module, "mkl_is_slow", lambda: True)
    monkeypatch.setattr(linear, "_LEAST_PREPACKED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # few rows are not computed in C
    model = optimized_model(vocab_size=40)
    ids, mask = sources(5, 9, 1)
    modules = model.get_encoder()
    for _ in range(2):
        assert_near(model.encode(ids, mask).states, modules(ids, mask).last_hidden_state, 1e-5)
        packed = model.inference_engine.weights(model).encoder
        assert isinstance(packed.layers[0].fc1, linear.PrepackedLinear)
        assert packed.embed_tokens is modules.embed_tokens
        modules.layers[1].fc2.weight[3] += 1.0  # packed anew


@pytest.mark.skipif(library() is None, reason="needs the C functions")
@every_kind
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@torch.no_grad()
def test_few_tokens_are_encoded_in_c_as_by_the_modules(
    fields: dict[str, Any],
    dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    model = optimize_for_inference(tiny_model(3, **fields).to(dtype))
    ids, _ = sources(5, 9, 1)
    for given in (ids, ids.flip(1)):  # padding on either side
        mask = given.ne(PAD).long()
        states = model.encode(given, mask).states
        assert states.dtype == dtype
        exact = model.get_encoder()(given, mask).last_hidden_state
        assert (states - exact)[mask == 1].abs().max() < tolerance * exact.abs().max()
    weights = model.inference_engine.weights(model, for_encoder=True)
    has_relu = fields.get("activation_function", "relu") == "relu"
    assert (weights.few_rows is not None) == has_relu


# A second time they change nothing.
ONCE = {
    "load_other_weights",
    "assign_other_weights",
    "replace_activation",
    "replace_module",
    "round_to_bfloat16",
    "remove_layer",
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changes_give_todays_translation(change: str, decoders: list[type]) -> None:
    model = optimized_model()
    before = assert_as_by_modules(model)
    for _ in range(1 if change in ONCE else 2):  # once more, when the packed weights are new
        CHANGES[change](model)
        after = assert_as_by_modules(model)
        assert not after.allclose(before, atol=1e-4), "the change had no effect"
        before = after
    if change not in ("merge_adapter", "remove_layer"):
        assert ModuleDecoder not in decoders[-2::-2], "the engine still decodes"


@pytest.mark.parametrize("cast", [Model.half, Model.double, Model.bfloat16])
@torch.no_grad()
def test_casts_give_todays_dtype(cast: Change, decoders: list[type]) -> None:
    model = optimized_model()
    translate(model)
    cast(model)
    assert_as_by_modules(
        model,
        tolerance=0.1,
        prefix_allowed_tokens_fn=lambda row, ids: [5 + len(ids)],
    )
    assert decoders == [PackedDecoder, PackedDecoder, ModuleDecoder]
    assert list(model.inference_engine.packed) == [model.dtype]


@torch.no_grad()
def test_unchanged_weights_are_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []
    original = optimize.PackedWeights
    monkeypatch.setattr(
        optimize, "PackedWeights", lambda *args: packed.append(1) or original(*args)
    )
    model = optimized_model()
    for _ in range(3):
        translate(model)
        model.state_dict()["lm_head.weight"].sum()  # reads
        decoder_weight(model).data_ptr()  # an address
        decoder_weight(model).numpy()
    assert packed == [1]
    decoder_weight(model).add_(1)
    translate(model)
    assert packed == [1, 1]


@pytest.mark.parametrize("change", TEMPORARY_CHANGES)
@torch.no_grad()
def test_modules_that_compute_more_decode_themselves(change: str, decoders: list[type]) -> None:
    model = optimized_model()
    before = translate(model)[1]
    undo = TEMPORARY_CHANGES[change](model)
    try:
        torch.manual_seed(0)
        tokens, scores = translate(model)
        torch.manual_seed(0)
        expected, its_scores = by_modules(model)
    finally:
        undo()
    assert decoders[-2:] == [ModuleDecoder, ModuleDecoder]
    assert tokens == expected
    assert_near(scores, its_scores)  # the encoder may add in another order
    assert not scores.allclose(before, atol=1e-4)
    if change != "inject_adapter":
        assert_near(translate(model)[1], before)
        assert decoders[-1] is not ModuleDecoder


def look_inside(model: Model) -> None:
    ids = torch.tensor([[5, 6, EOS]])
    model(input_ids=ids, labels=ids, output_attentions=True)


def train_with_checkpointing(model: Model) -> None:
    model.gradient_checkpointing_enable()
    ids = torch.tensor([[5, 6, EOS]])
    with torch.enable_grad():
        model.train()(input_ids=ids, labels=ids).loss.backward()
    model.eval()


@pytest.mark.parametrize("use", [look_inside, train_with_checkpointing])
@torch.no_grad()
def test_hooks_that_transformers_leaves_behind_change_nothing(
    use: Change, decoders: list[type]
) -> None:
    """Before the model is optimized, and after."""
    model = varied_model()
    use(model)
    assert any(module._forward_hooks for module in model.modules())
    assert_as_by_modules(optimize_for_inference(model))
    used = optimized_model()
    look_inside(used)
    assert_as_by_modules(used)
    assert decoders == [PackedDecoder, ModuleDecoder] * 2


@torch.no_grad()
def test_weights_are_left_where_they_are() -> None:
    """Also in memory that torch does not own, such as a mapped file or a NumPy array."""
    model = varied_model()
    array = decoder_weight(model).numpy().copy()
    decoder_weight(model).data = torch.from_numpy(array)
    addresses = [weight.data_ptr() for weight in model.parameters()]
    translate(optimize_for_inference(model))
    assert [weight.data_ptr() for weight in model.parameters()] == addresses
    array[2] += 1.0
    assert_as_by_modules(optimize_for_inference(model))


@torch.no_grad()
def test_model_made_in_inference_mode_is_optimized() -> None:
    with torch.inference_mode():
        model = optimized_model()
    assert_as_by_modules(model)


# Undone


def assert_not_optimized(model: Model, decoders: list[type]) -> list[list[int]]:
    """The tokens of a translation come back."""
    assert model.inference_engine is None
    decoders.clear()
    tokens, _ = translate(model.eval())
    assert decoders == [ModuleDecoder]
    return tokens


@pytest.mark.parametrize("undo", [deoptimize, Model.train, lambda model: model.train().eval()])
def test_engine_is_undone(undo: Change, decoders: list[type]) -> None:
    model = optimized_model()
    expected, _ = translate(model)
    assert undo(model) is model
    assert assert_not_optimized(model, decoders) == expected
    assert translate(optimize_for_inference(model))[0] == expected
    assert decoders[-1] is PackedDecoder


def test_eval_keeps_the_engine(decoders: list[type]) -> None:
    translate(optimized_model().eval())
    assert decoders == [PackedDecoder]


def test_copied_and_saved_models_have_no_engine(tmp_path: Path, decoders: list[type]) -> None:
    model = optimized_model()
    expected, _ = translate(model)
    model.save_pretrained(tmp_path / "model")
    torch.save(model, tmp_path / "model.pt")
    for other in (
        copy.deepcopy(model),
        copy.copy(model).train().eval(),
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
        Model.from_pretrained(tmp_path / "model"),
    ):
        assert assert_not_optimized(other, decoders) == expected
    assert not [name for name in model.state_dict() if "engine" in name]
    assert translate(model)[0] == expected
    assert decoders[-1] is PackedDecoder


@torch.no_grad()
def test_writes_to_a_copy_leave_the_model_as_it_was() -> None:
    model = optimized_model()
    other = optimize_for_inference(copy.deepcopy(model))
    expected = translate(model)[1]
    write_in_place(other)
    assert not translate(other)[1].equal(expected)
    assert translate(model)[1].equal(expected)
    write_in_place(model)
    write_in_place(model)
    assert_as_by_modules(model)
    assert_as_by_modules(other)


# Refused


def wrapped(model: Model) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2)).eval()


def offloaded(model: Model) -> Model:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(model)


def on_meta(model: Model) -> Model:
    return model.to("meta")


def with_another_layer(model: Model) -> Model:
    """A new module is in training mode, as those of quantisation are."""
    fc1 = model.model.decoder.layers[0].fc1
    model.model.decoder.layers[0].fc1 = type("Own", (nn.Linear,), {})(*fc1.weight.shape[::-1])
    return model


def after(change: Change) -> Change:
    """The changed model."""
    return lambda model: [model, change(model)][0]


REFUSALS = [
    (Model.train, {}, r"model: .*model\.eval\(\)"),
    (after(train_decoder), {}, r"model\.decoder .*model\.eval\(\)"),
    (with_another_layer, {}, r"fc1 is a .*\.Own; merge adapters"),
    (after(inject_adapter), {}, "self_attn.q_proj .*peft.tuners.lora.layer.Linear"),
    (wrapped, {}, "model: PeftModel"),
    (on_meta, {}, "model: .*sharded"),
    (offloaded, {}, "hooks.*offloaded"),
    (after(hook_module), {}, "model.decoder.layers.1.fc1 "),
    (
        after(lambda model: model.set_attn_implementation("eager")),
        {},
        "attn_implementation='eager'",
    ),
    (after(Model.eval), {"quantization": "int4"}, "quantization: 'int4'"),
    (Model.half, {"quantization": "int8"}, "quantization: 'int8'.* torch.float16"),
]


@pytest.mark.parametrize(("change", "settings", "message"), REFUSALS)
def test_refusals_are_one_line_and_change_nothing(
    change: Change,
    settings: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hf_vanilla_transformer.engine.linear.platform.machine", lambda: "x86_64")
    model = change(varied_model())
    with pytest.raises(ValueError, match=message):
        optimize_for_inference(model, **settings)
    assert getattr(model, "inference_engine", None) is None
    if change is not on_meta:
        assert len(translate(model)[0]) == 2


@pytest.mark.parametrize(
    ("where", "name", "value", "message"),
    [
        (
            ALL_ATTENTION_FUNCTIONS._global_mapping,
            "sdpa",
            lambda *_: None,
            "attn_implementation='sdpa'",
        ),
        (
            VanillaTransformerDecoderLayer,
            "feed_forward",
            lambda self, x: x,
            r"feed_forward of decoder\.layers\.0",
        ),
    ],
    ids=["attention", "method"],
)
def test_functions_that_replace_those_of_torch_and_of_a_class_are_refused(
    where: Any,
    name: str,
    value: Callable[..., Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace = monkeypatch.setitem if isinstance(where, dict) else monkeypatch.setattr
    replace(where, name, value)
    with pytest.raises(ValueError, match=f"model: it has {message}"):
        optimize_for_inference(tiny_model())


def without_second_head(attention: nn.Module) -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, name, nn.Linear(32, 8))
    attention.out_proj = nn.Linear(8, 32)


def with_own_attention(attention: nn.Module) -> None:
    attention.config = copy.copy(attention.config)
    attention.config._attn_implementation = "own"


ALTERATIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "heads of cross-attention": (
        lambda model: without_second_head(model.decoder.layers[0].cross_attn),
        "another model.decoder.layers.0.cross_attn.q_proj",
    ),
    "heads of the last layer": (
        lambda model: without_second_head(model.decoder.layers[-1].self_attn),
        "another model.decoder.layers.1.self_attn.q_proj",
    ),
    "heads of the encoder": (
        lambda model: without_second_head(model.encoder.layers[0].self_attn),
        "another model.encoder.layers.0.self_attn.q_proj",
    ),
    "norm without weights": (
        lambda model: setattr(
            model.decoder.layers[0],
            "self_attn_layer_norm",
            nn.LayerNorm(32, elementwise_affine=False),
        ),
        "another model.decoder.layers.0.self_attn_layer_norm",
    ),
    "norm removed": (
        lambda model: setattr(model.encoder.layers[1], "final_layer_norm", nn.Identity()),
        "another model.encoder.layers.1.final_layer_norm",
    ),
    "network removed": (
        lambda model: [
            setattr(model.decoder.layers[0], fc, nn.Identity()) for fc in ("fc1", "fc2")
        ],
        "another model.decoder.layers.0.fc1",
    ),
    "network without units": (
        lambda model: [
            setattr(model.encoder.layers[0], "fc1", nn.Linear(32, 0)),
            setattr(model.encoder.layers[0], "fc2", nn.Linear(0, 32)),
        ],
        "another model.encoder.layers.0.fc1",
    ),
    "no layers": (
        lambda model: setattr(model.encoder, "layers", nn.ModuleList()),
        "no model.encoder.layers.0",
    ),
    "short embeddings": (
        lambda model: setattr(model.decoder.embed_tokens, "max_norm", 1.0),
        "another model.decoder.embed_tokens",
    ),
    "order of norms": (
        lambda model: setattr(model.decoder.layers[0], "pre_norm", True),
        "another model.decoder.layers.0",
    ),
    "attention of one layer": (
        lambda model: with_own_attention(model.encoder.layers[1].self_attn),
        "attn_implementation='own'",
    ),
}


def own_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> Any:
    """The mean of all values."""
    mean = value.mean(dim=2, keepdim=True).expand(*query.shape[:3], -1)
    return mean.transpose(1, 2), None


@pytest.mark.parametrize("name", ALTERATIONS)
@torch.no_grad()
def test_modules_of_another_kind_shape_or_setting_decode_themselves(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "own", own_attention)
    alter, reason = ALTERATIONS[name]
    model = varied_model(tie_word_embeddings=False)
    alter(model.model)
    model.eval()
    message = re.escape(f"model: it has {reason}")
    with pytest.raises(ValueError, match=message):
        optimize_for_inference(model)
    translate(model)  # `max_norm` writes to the weights
    model.inference_engine = optimize.InferenceEngine(None)  # as if it had been altered later
    assert_as_by_modules(model)


def test_layers_of_a_checkpoints_code_are_not_the_packages() -> None:
    """Its files have the package's names, and somebody may have changed them."""
    model = tiny_model()
    assert not_optimizable(model) is None
    layer = model.model.encoder.layers[0]
    home = "transformers_modules.checkpoint.layers_vanilla_transformer"
    layer.__class__ = type("EncoderLayer", (type(layer),), {"__module__": home})
    assert home in (not_optimizable(model) or "")


# Dynamic int8


@needs_int8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_int8_translations_are_as_probable(dtype: torch.dtype) -> None:
    plain = tiny_model(
        2,
        d_model=64,
        tie_word_embeddings=False,
        lm_head_bias=True,
    )
    plain.lm_head.bias[
        [PAD, 0, EOS]
    ] = -1e4  # no hypothesis ends: a tiny model's ends hang by a hair
    int8 = optimize_for_inference(copy.deepcopy(plain).to(dtype), "int8")
    for lengths in ([5], [6, 3, 8, 1, 5]):
        ids, mask = sources(*lengths)
        inputs = {"input_ids": ids, "attention_mask": mask}
        full, found = (
            model.generate(
                **inputs,
                **AS_DICT,
                max_new_tokens=8,
                num_beams=8,
            )
            for model in (plain, int8)
        )
        assert not found.sequences_scores.equal(full.sequences_scores)
        best = paper_score(plain, inputs, full.sequences)
        score = paper_score(plain, inputs, found.sequences)
        assert (best - score).abs().max() < 0.2
        assert (found.sequences_scores - score).abs().max() < 0.2, (
            "the search's own score is nearly the model's"
        )


def paper_score(
    model: Model,
    inputs: dict[str, Tensor],
    tokens: Tensor,
) -> Tensor:
    """The score of each translation (B, T), by the modules: log P / ((5 + length) / 6)^0.6."""
    logits = model(**inputs, decoder_input_ids=tokens[:, :-1]).logits
    log_probs = logits.float().log_softmax(dim=-1).gather(-1, tokens[:, 1:, None])
    length = tokens.shape[1] - 1
    return log_probs.sum(dim=(1, 2)) / ((5 + length) / 6) ** 0.6


@needs_int8
@torch.no_grad()
def test_int8_weights_that_change_are_quantized_again() -> None:
    model = optimize_for_inference(varied_model(), "int8")
    before = translate(model)[1]
    write_in_place(model)
    fresh = optimize_for_inference(copy.deepcopy(model), "int8")
    found = translate(model)[1]
    assert found.equal(translate(fresh)[1])
    assert not found.equal(before)


# Several threads, several models, memory


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """The results of `work` for each number. All start at once."""
    gate = threading.Barrier(count)

    def run(index: int) -> Any:
        gate.wait()
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@pytest.mark.slow
def test_threads_translate_with_one_model() -> None:
    limits = [3, 20, 9, 35]

    def work(model: Model, index: int) -> list[Any]:
        return [
            translate(model, [length], max_new_tokens=limits[index])[0] for length in (9, 2, 6, 4)
        ]

    plain = varied_model(end=-1e4)
    model = optimized_model(end=-1e4)
    seen = []
    for _ in range(2):
        expected = [work(plain, index) for index in range(4)]
        assert in_threads(4, lambda index: work(model, index)) == expected
        seen.append(expected)
        with torch.no_grad():  # all of them find other weights
            decoder_weight(model).mul_(-1)
            decoder_weight(plain).mul_(-1)
    assert seen[0] != seen[1]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
@torch.no_grad()
def test_deleted_models_give_their_memory_back() -> None:
    def once(changes: int) -> int:
        model = optimized_model(vocab_size=4000, d_model=256, decoder_ffn_dim=2048)
        for _ in range(changes):
            write_in_place(model)
            translate(model, max_new_tokens=2)
        nbytes = sum(weight.nbytes for weight in model.parameters())
        del model
        gc.collect()
        return nbytes

    nbytes = once(1)
    before = resident_bytes()
    for _ in range(3):
        once(2)
    assert resident_bytes() - before < nbytes / 2
