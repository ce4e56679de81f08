"""The console command `vanilla-transformer`.

A package next to `hf_vanilla_transformer`, because importing that takes seconds for torch and transformers. `--help`
and wrong arguments need neither.
"""
