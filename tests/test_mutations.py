"""Planted faults: the tests of the model must notice each of them.

Every fault is one that a port of this model has really had, or easily could. The package and its tests are copied, one
line is changed, and the tests have to fail.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

# Those that look at numbers, the quickest first.
JUDGES = [
    "test_paper_equations.py",
    "test_loss.py",
    "test_modeling.py",
    "test_parity_torch.py",
    "test_parity_marian.py",
    "test_parity_fsmt.py",
    "test_generation.py",
    "test_products.py",
    "test_decoding.py",
    "test_beam_search.py",
    "test_promises.py",
    "test_sentence_search.py",
    "test_compiled.py",
]

# Who is asked first about a file.
EXPERTS = {
    "compiled": ["test_compiled.py"],
    "decoding": ["test_decoding.py", "test_beam_search.py", "test_compiled.py"],
    "search": ["test_beam_search.py"],
    "sentence": ["test_sentence_search.py", "test_compiled.py"],
    "products": ["test_products.py", "test_decoding.py"],
    "generation": ["test_generation.py", "test_beam_search.py"],
}


class Fault(NamedTuple):
    file: str
    right: str
    wrong: str


FAULTS = {
    "source mask ignored": Fault(
        "stacks",
        "mask = create_bidirectional_mask(self.config, inputs_embeds, attention_mask)",
        "mask = None",
    ),
    "cross-attention sees padding": Fault(
        "stacks",
        "self.config, inputs_embeds, encoder_attention_mask, encoder_hidden_states",
        "self.config, inputs_embeds, None, encoder_hidden_states",
    ),
    "causal mask off by one": Fault(
        "stacks",
        "create_causal_mask(self.config, inputs_embeds, attention_mask, cache)",
        "create_causal_mask(\n            self.config, inputs_embeds, attention_mask, cache,\n"
        "            or_mask_function=lambda b, h, q, k: k == q + 1,\n        )",
    ),
    "sines and cosines swapped": Fault("layers", "encoding[..., 0::2] = sines", "encoding[..., 0::2] = cosines"),
    "no sqrt(d_model)": Fault("stacks", "math.sqrt(config.d_model) if config.scale_embedding else 1.0", "1.0"),
    "scores not scaled": Fault("layers", "self.scaling = self.head_dim**-0.5", "self.scaling = 1.0"),
    "output layer tied to the source's embedding": Fault(
        "modeling", 'pairs["lm_head.weight"] = source if shared else target', 'pairs["lm_head.weight"] = source'
    ),
    "dropout in evaluation": Fault(
        "layers",
        "sublayer_of_x, p=self.dropout, training=self.training",
        "sublayer_of_x, p=self.dropout, training=True",
    ),
    "loss is a mean of means": Fault("loss", "if num_items_in_batch is None:", "if True:"),
    "cache position off by one": Fault(
        "stacks",
        "torch.arange(length, device=inputs_embeds.device) + past)",
        "torch.arange(length, device=inputs_embeds.device) + max(past - 1, 0))",
    ),
    "cross-attention cache filled anew at each step": Fault(
        "layers", "if past_key_values.is_updated.get(self.layer_idx):", "if False:"
    ),
    "normalisation inside the residual": Fault(
        "layers",
        "return layer_norm(add_dropout(x, sublayer_of_x, p=self.dropout, training=self.training))",
        "return x + layer_norm(dropout(sublayer_of_x, p=self.dropout, training=self.training))",
    ),
    "decoder reads the word that it shall write": Fault(
        "loss", "shifted = labels.roll(1, dims=-1)", "shifted = labels.clone()"
    ),
    "padding counted in positions": Fault(
        "layers",
        "return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)",
        "return (attention_mask.long() >= 0).long().cumsum(dim=-1) - 1",
    ),
    "smoothing in evaluation": Fault(
        "modeling", "self.config.label_smoothing if self.training else 0.0", "self.config.label_smoothing"
    ),
    "smoothing left out of the fused gradient": Fault("loss", "grad_tokens -= smoothing * mean_weight", "pass"),
    "smoothing left out of the matrix's gradient": Fault("loss", "(-smoothing / vocab_size)).repeat", "0.0).repeat"),
    "labels written into": Fault(
        "loss", "shifted = labels.roll(1, dims=-1)", "shifted = labels.copy_(labels.roll(1, dims=-1))"
    ),
    "beams see each other's words": Fault(
        "decoding",
        "seen = self.seen.gather(1, parents[..., None].expand(-1, -1, size))",
        "seen = self.seen.expand(-1, beams, -1)",
    ),
    "a beam's past is written over": Fault(
        "decoding", "free = (~seen.any(dim=1)).cumsum(dim=1)", "free = (~seen[:, 0]).cumsum(dim=1)"
    ),
    "a step sees padding of the source": Fault(
        "decoding",
        "return None if bool(shown.all()) else _added(shown, self.decoder.dtype)[:, None]",
        "return None",
    ),
    "sentences that are attended to together see each other": Fault(
        "decoding",
        "groups.new_full((count, together, beams, together, places), -torch.inf)",
        "groups.new_zeros(count, together, beams, together, places)",
    ),
    "a step has the position of the word before": Fault(
        "decoding",
        "[positions][:, None]",
        "[(positions - 1).clamp(min=0)][:, None]",
    ),
    "beams of one sentence see each other's words": Fault("sentence", "mask[parents].scatter", "mask.scatter"),
    "a past of one sentence is written over": Fault(
        "sentence", "taken = reduce(or_, self.seen)", "taken = self.seen[0]"
    ),
    "a sentence alone ends while a longer hypothesis could win": Fault(
        "sentence",
        "self.score.best_penalty(length - self.prefix_length, longest, self.early_stopping)",
        "self.score.penalty(length - self.prefix_length)",
    ),
    "a sentence that comes later is read from the wrong position": Fault(
        "search",
        "torch.minimum(self.open.lengths, self.open.limits) - 1",
        "self.open.lengths.amax().expand_as(self.open.lengths) - 1",
    ),
    "what an older sentence saw is shown to a later one": Fault(
        "decoding",
        "self.seen[rows] = begun",
        "self.seen[rows] |= begun",
    ),
    "a step computes with old weights": Fault("decoding", "or not made[kind][1].equal(numbers)", "or False"),
    "a program keeps old weights": Fault("decoding", "weight._version if compiled", "0 if compiled"),
    "programs of two models are one": Fault("compiled", "module.forward = types.MethodType", "types.MethodType"),
    "a step forgets an adapter": Fault("decoding", "return known and not hooks and", "return not hooks and"),
    "a product forgets its ReLU": Fault("products", 'self.bias, "relu"', 'self.bias, "none"'),
    "all outputs share one scale of 8 bits": Fault(
        "products", "matrix.float().abs().amax(dim=1)", "matrix.float().abs().amax().repeat(len(matrix))"
    ),
    "length penalty without the 5": Fault("search", "((5 + length) / 6) ** self.alpha", "(length / 6) ** self.alpha"),
    "search ends while a longer hypothesis could win": Fault(
        "search", "self.penalty(longest if may_grow and self.alpha > 0 else length)", "self.penalty(length)"
    ),
    "translations end after 20 words": Fault(
        "generation", "MAX_LENGTH_OVER_SOURCE = 50", "MAX_LENGTH_OVER_SOURCE = 20"
    ),
}


def outcome(copy: Path, changed: str = "") -> subprocess.CompletedProcess[str]:
    """What pytest says of a copy of the repository, of which perhaps one file was changed."""
    judges = [*EXPERTS.get(changed, []), *(name for name in JUDGES if name not in EXPERTS.get(changed, []))]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
    command += [f"tests/{name}" for name in judges if (copy / "tests" / name).exists()]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=1200)


@pytest.fixture
def copy(repository: Path, tmp_path: Path) -> Path:
    """The package, its tests and the settings of pytest in a folder of their own."""
    for name in ("hf_vanilla_transformer", "tests"):
        shutil.copytree(repository / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repository / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", FAULTS)
def test_fault_stands_where_it_is_planted(name: str, repository: Path) -> None:
    fault = FAULTS[name]
    file = repository / "hf_vanilla_transformer" / f"{fault.file}_vanilla_transformer.py"
    assert file.read_text(encoding="utf-8").count(fault.right) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_noticed(name: str, copy: Path) -> None:
    fault = FAULTS[name]
    file = copy / "hf_vanilla_transformer" / f"{fault.file}_vanilla_transformer.py"
    file.write_text(file.read_text(encoding="utf-8").replace(fault.right, fault.wrong), encoding="utf-8")
    result = outcome(copy, fault.file)
    # 1: a test failed. Anything else, a syntax error too, is a fault of the fault.
    assert result.returncode == 1, result.stdout[-2000:] + result.stderr[-2000:]
    assert "error" not in result.stdout.splitlines()[-1], result.stdout[-2000:]
    print(next((line for line in result.stdout.splitlines() if line.startswith("FAILED")), "").split(" - ")[0])


@pytest.mark.slow
def test_right_code_passes(copy: Path) -> None:
    result = outcome(copy)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
