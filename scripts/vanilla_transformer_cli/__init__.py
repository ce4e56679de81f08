"""The console command `vanilla-transformer`.

A package beside `hf_vanilla_transformer`, whose import takes seconds, because it imports torch and transformers;
`--help` and wrong arguments need neither.
"""
