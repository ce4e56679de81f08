"""The tests of Hugging Face that the models of this package skip or fail, each with its reason.

The list is kept for the transformers that scripts/constraints.txt names for Python 3.11 and newer. A key is a pattern
for "Class.test". run.py complains about a test that is missing here, and about a pattern that is no longer needed.

What the source distribution lacks, and so cannot be run at all, has a stand-in in hf_tests/: the tests of `generate`
and of exporting. The tests of this project cover both.
"""

import transformers
from packaging.version import Version

from hf_vanilla_transformer.arguments_vanilla_transformer import CACHE

# There is something to hold, and it does not.
DOES_NOT_HOLD: dict[str, str] = {
    "OptionsTests.test_inputs_embeds_matches_input_ids": (
        "the test embeds the target's tokens with the source's matrix; here the target has its own"
    ),
    "OptionsTests.test_resize_embeddings_untied": (
        "where the target has a matrix of its own, it is resized by resize_decoder_token_embeddings"
    ),
}

# There is nothing to test, whatever the machine.
DOES_NOT_APPLY: dict[str, str] = {
    "*.test_*rope*": "positions are sinusoids that are added, not rotations",
    "*.test_attn_implementation_composite_models": "a model of one configuration is not composite",
    "*.test_can_set_attention_dynamically_composite_model": "a model of one configuration is not composite",
    "*.test_internal_model_config_and_subconfig_are_same": "a model of one configuration is not composite",
    "*.test_sdpa_can_dispatch_composite_models": "a model of one configuration is not composite",
    "*.test_can_load_from_already_mapped_keys": "no weight is renamed between file and model",
    "*.test_reverse_loading_mapping": "no weight is renamed between file and model",
    "*.test_causal_lm_loss_honors_shift_labels": "there is no language model without an encoder",
    "EncoderTests.test_encoder_decoder_loss_no_double_shift": "an encoder has no tokens to score",
    "ClassifierTests.test_encoder_decoder_loss_no_double_shift": "a classifier has no tokens to score",
    "ModelTests.test_can_capture_specific_layers_hidden_states": "the test knows no hidden states of two stacks",
    "OptionsTests.test_can_capture_specific_layers_hidden_states": "the test knows no hidden states of two stacks",
    "*.test_eager_matches_batched_and_grouped_inference_*": "there are no experts",
    "*.test_moe_*": "there are no experts",
    "*.test_output_router_logits_from_config": "there are no experts",
    "FsdpTests.*expert*": "there are no experts",
    "*.test_keep_in_fp32_modules*": "no module must stay in float32; what must is computed so",
    "*.test_resize_position_vector_embeddings": "the sinusoids are computed, for any position; there is no table",
    "*.test_sliding_window_mask": "every token attends to every other, or to every earlier one",
    "*.test_torch_compile_for_training": "the test is for language models that are given position_ids",
}

# It needs a GPU, several of them, or another library. With these it may run.
NEEDS_ANOTHER_MACHINE: dict[str, str] = {
    "*.test_can_load_with_*device*": "a GPU",
    "*.test_cpu_offload": "a GPU",
    "*.test_disk_offload_*": "a GPU",
    "*.test_flex_attention_with_grads": "a GPU",
    "*.test_sdpa_can_compile_dynamic": "a GPU",
    "*.test_sdpa_can_dispatch_on_flash": "a GPU",
    "*.test_flash_attn_*": "a GPU and a library of flash attention",
    "*.test_kernels_can_load_without_crashing": "a GPU and the kernels library",
    "*.test_model_parallelism": "several GPUs",
    "*_with_deepspeed*": "a GPU and DeepSpeed",
    "TensorParallelTests.test_tp_generation_quantized": "torchao",
}

# transformers 5.24 named the cache anew.
if CACHE == "cache":
    old_name = "both names of the cache are arguments, so that code for either version runs, and none is deprecated"
    DOES_NOT_HOLD |= {
        f"{tests}.test_bc_cache_name_forward": old_name for tests in ("ModelTests", "OptionsTests")
    }
    no_cache = "an encoder has no cache"
    DOES_NOT_APPLY |= {
        f"{tests}.test_bc_cache_name_forward": no_cache
        for tests in ("EncoderTests", "ClassifierTests")
    }

# transformers 5.20 is the last for Python 3.10.
if Version(transformers.__version__) < Version("5.21"):
    plan = "transformers adds an entry for the embedding of a decoder-only model, which shards nothing here"
    DOES_NOT_HOLD |= {
        f"{tests}.test_tp_plan_matches_params": plan
        for tests in ("ModelTests", "EncoderTests", "ClassifierTests")
    }
    DOES_NOT_APPLY |= {
        "*.test_can_init_all_missing_weights": "the test is for models with a date, and no model can ask for it yet",
        "TensorParallelTests.test_ep_*": "there are no experts",
    }
