"""The values of options with which a toolkit's model is the same as ours, and those with which a search is the same.

They were read in the same versions of the toolkits as those of test_toolkit_options.py, whose tests have the others.
"""

from typing import Any

import pytest

from hf_vanilla_transformer.interop import eole, fairseq, marian_npz, opennmt
from hf_vanilla_transformer.interop.options import Options, Unsupported
from tests.model_helpers import error_of

OFF = (False, 0, None, "")
FAIRSEQ = dict.fromkeys(
    [
        "layernorm_embedding",
        "no_token_positional_embeddings",
        "adaptive_input",
        "adaptive_softmax_cutoff",
        "no_decoder_final_norm",
        "no_cross_attention",
        "cross_self_attention",
        "layer_wise_attention",
        "encoder_layers_to_keep",
        "decoder_layers_to_keep",
        "base_layers",
        "char_inputs",
        "quant_noise_scalar",
        "encoder_xformers_att_config",
        "decoder_xformers_att_config",
    ],
    OFF,
)
FAIRSEQ_TASKS = {"num_experts": OFF, "lang_pairs": (None, "")}
MARIAN = {
    "type": ("transformer",),
    "transformer-postprocess-emb": ("", "d"),
    "transformer-decoder-autoreg": ("self-attention",),
    "transformer-no-projection": (False,),
    "transformer-ffn-depth": (2,),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-aan-only": (False,),
    "transformer-tied-layers": ([],),
    "ulr": (False,),
    "lemma-dim-emb": (0,),
    "input-types": ([],),
    "input-reorder": ([],),
    "right-left": (False,),
    "transformer-disable-position-embeddings": (False,),
    "transformer-pool": (False,),
}
OPENNMT = {
    "encoder_type": ("transformer",),
    "decoder_type": ("transformer",),
    "layer_norm": ("standard",),
    "position_encoding": (True,),
    "position_encoding_type": ("SinusoidalInterleaved",),
    "max_relative_positions": (0,),
    "relative_positions_buckets": (0,),
    "self_attn_type": ("scaled-dot", "scaled-dot-flash"),
    "parallel_residual": (False,),
    "multiquery": (False,),
    "num_kv": (0,),
    "sliding_window": (0,),
    "num_experts": (0,),
    "aan_useffn": (False,),
    "copy_attn": (False,),
    "generator_function": ("softmax",),
    "full_context_alignment": (False,),
    "lambda_coverage": (0, 0.0),
    "feat_merge": ("concat", "sum", "mlp"),
}
EOLE_STACK = {
    "layer_norm": ("standard", "standardFP32"),
    "mlp_activation_fn": ("relu", "gelu", "quick_gelu", "silu", "gelu-tanh"),
    "parallel_residual": (False,),
    "ffn_layernorm": (False,),
    "query_norm": (False,),
    "key_norm": (False,),
    "value_norm": (False,),
    "q_gating": (False,),
    "attn_scaling": (None,),
    "relative_positions_buckets": (0,),
    "sliding_window": (0,),
    "num_experts": (0,),
}
EOLE = {
    "": {
        "architecture": ("transformer", "custom"),
        "generator_function": ("softmax",),
        "add_estimator": (False,),
    },
    "embeddings": {
        "embedding_type": ("standard",),
        "position_encoding_type": ("SinusoidalInterleaved", "Learned"),
        "position_shift": (0, None),
        "normalize": (False, None),
    },
    "encoder": {
        "encoder_type": ("transformer",),
        "encoder_layer_style": ("standard",),
        "final_encoder_layer_norm": (True,),
        **EOLE_STACK,
    },
    "decoder": {
        "decoder_type": ("transformer",),
        "layer_types": (None,),
        "num_mtp_heads": (0,),
        **EOLE_STACK,
    },
}
# the package's table, ours, and what counts as missing
ARCHITECTURES: dict[str, tuple[Unsupported, dict[str, tuple], tuple]] = {
    "fairseq": (fairseq.REFUSED, FAIRSEQ, (None, "")),
    "fairseq's tasks": (fairseq.REFUSED_TASKS, FAIRSEQ_TASKS, (None, "")),
    "marian-npz": (marian_npz.REFUSED, MARIAN, (None, "")),
    "opennmt": (opennmt.REFUSED, OPENNMT, (None, "")),
    **{f"eole {section}": (eole.REFUSED[section], table, ()) for section, table in EOLE.items()},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_options_of_our_architecture_are_accepted_and_no_others(name: str) -> None:
    refused, accepted, missing = ARCHITECTURES[name]
    assert refused.keys() == accepted.keys()
    Options({}).refuse(refused, missing)
    for option, values in accepted.items():
        for value in values:
            Options({option: value}).refuse(refused, missing)
        for value in (-1, 1, 3, True, False, None, "", "other", ["x"]):
            if value not in (*values, *missing):
                assert error_of(Options({option: value}).refuse, refused, missing).startswith(
                    f"{option}="
                )


NEUTRAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fairseq": (
        fairseq.DROPPED,
        {
            "max_len_a": 0,
            "unkpen": 0,
            "match_source_len": False,
            "no_early_stop": False,
            "prefix_size": 0,
            "sampling": False,
            "diverse_beam_groups": -1,
            "diversity_rate": -1.0,
            "temperature": 1.0,
            "lm_weight": 0.0,
            "constraints": False,
            "replace_unk": False,
            "iter_decode_with_beam": 1,
            "decoding_format": "",
            "retain_dropout": False,
        },
    ),
    "marian-npz": (
        marian_npz.DROPPED,
        {
            "word-penalty": 0,
            "max-length-factor": 3,
            "max-length": 1000,
            "max-length-crop": False,
            "shortlist": [],
            "output-sampling": [],
            "output-approx-knn": [],
            "force-decode": False,
            "no-spm-encode": False,
        },
    ),
    "eole": (
        eole.DROPPED,
        {
            "ratio": 0,
            "top_k": 0,
            "top_p": 0,
            "coverage_penalty": "none",
            "max_length_ratio": 2,
            "replace_unk": False,
            "ignore_when_blocking": [],
            "optional_eos": [],
        },
    ),
}


@pytest.mark.parametrize("toolkit", NEUTRAL)
def test_options_of_a_search_are_dropped_with_a_note_unless_they_do_nothing(toolkit: str) -> None:
    dropped, neutral = NEUTRAL[toolkit]
    assert Options(neutral).dropped(dropped) == []
    assert Options({}).dropped(dropped) == []
    (note,) = Options(dict.fromkeys(neutral, 77)).dropped(dropped)
    assert note == f"`generate` has no {', '.join(neutral)}, so it is dropped"


def test_transforms_of_text_are_those_of_the_toolkits() -> None:
    """The others drop or corrupt training data: filtertoolong, switchout, tokendrop and so on."""
    assert sorted(opennmt.TRANSFORMS) == [
        "bpe",
        "docify",
        "inferfeats",
        "inlinetags",
        "insert_mask_before_placeholder",
        "normalize",
        "onmt_tokenize",
        "prefix",
        "sentencepiece",
        "suffix",
        "terminology",
        "uppercase",
    ]
