"""In the place of the module from which `ConfigTester` takes the fields that every configuration must accept."""

# The fields of `PreTrainedConfig` itself, each with another value than its default.
config_common_kwargs = {
    "architectures": ["VanillaTransformerModel"],
    "chunk_size_feed_forward": 5,
    "dtype": "float16",
    "id2label": {0: "even", 1: "odd"},
    "label2id": {"even": 0, "odd": 1},
    "output_attentions": True,
    "output_hidden_states": True,
    "problem_type": "regression",
    "return_dict": False,
}
