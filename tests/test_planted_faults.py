"""Planted faults: mistakes that a port of this model has had, or easily could have, each of which a test must notice.

A fault replaces a piece of one function in a copy of the package. The tests that it names must then fail. Functions
are found by their qualified name and compared as `ast.unparse` writes them, so that comments, line breaks and code
elsewhere may change.
"""

import ast
import json
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Fault(NamedTuple):
    module: str  # without the suffix of the bundle's files
    function: str  # qualified name of a function, or the name of a constant
    right: str  # exactly once in the function
    wrong: str
    tests: str  # files in tests/, and perhaps -k and an expression


MODEL = "test_modeling.py"
PROMISES = "test_promises.py"
PAPER = "test_paper_equations.py"
LOSS = "test_loss.py"
SEARCH = "test_beam_search.py"
PACKED = "inference/test_packed_decoder.py"
LINEAR = "inference/test_linear.py"
OPTIMIZE = "inference/test_optimize.py"
COMPILED = "inference/test_compiled.py"
TRAINER = "training/test_trainer.py"
RESUME = "training/test_resume.py"

FAULTS = {
    # The model
    "encoder ignores the source mask": Fault(
        "layers",
        "VanillaTransformerEncoder.forward",
        "create_bidirectional_mask(self.config, inputs_embeds, attention_mask)",
        "None",
        f"{PROMISES} -k rest_of_the_batch",
    ),
    "cross-attention sees padding": Fault(
        "layers",
        "VanillaTransformerDecoder.forward",
        "inputs_embeds, encoder_attention_mask, encoder_hidden_states)",
        "inputs_embeds, None, encoder_hidden_states)",
        f"{PROMISES} -k rest_of_the_batch",
    ),
    "causal mask is off by one": Fault(
        "layers",
        "VanillaTransformerDecoder.forward",
        "create_causal_mask(",
        "__import__('functools').partial(create_causal_mask, or_mask_function=lambda b, h, q, k: k == q + 1)(",
        f"{MODEL} -k later",
    ),
    "sines and cosines are swapped": Fault(
        "layers",
        "sinusoidal_positions",
        "encoding[..., 0::2] = sines",
        "encoding[..., 0::2] = cosines",
        f"{PAPER} -k positions",
    ),
    "embeddings are not scaled by sqrt(d_model)": Fault(
        "layers",
        "VanillaTransformerStack.__init__",
        "math.sqrt(config.d_model) if config.scale_embedding else 1.0",
        "1.0",
        f"{PAPER} -k scale",
    ),
    "attention scores are not scaled": Fault(
        "layers",
        "VanillaTransformerAttention.__init__",
        "self.scaling = ",
        "self.scaling = 1.0 or ",
        f"{PAPER} -k attention",
    ),
    "output layer is tied to the source embedding": Fault(
        "modeling",
        "VanillaTransformerForConditionalGeneration.tied_weights",
        "source if shared else target",
        "source",
        f"{MODEL} -k save_and_load",
    ),
    "dropout is active in evaluation": Fault(
        "layers",
        "VanillaTransformerLayer.add_and_norm",
        "sublayer(x), p=self.dropout, training=self.training",
        "sublayer(x), p=self.dropout, training=True",
        f"{MODEL} -k dropout",
    ),
    "layer norm is inside the residual": Fault(
        "layers",
        "VanillaTransformerLayer.add_and_norm",
        "layer_norm(add_dropout(x, sublayer(x), p=self.dropout, training=self.training))",
        "x + layer_norm(sublayer(x))",
        f"{PAPER} -k layer",
    ),
    "pre-norm is ignored": Fault(
        "layers",
        "VanillaTransformerLayer.__init__",
        "self.pre_norm = config.layer_norm_position == 'pre'",
        "self.pre_norm = False",
        f"{PAPER} -k layer",
    ),
    "pre-norm reads the residual": Fault(
        "layers",
        "VanillaTransformerLayer.add_and_norm",
        "add_dropout(x, sublayer(layer_norm(x))",
        "add_dropout(layer_norm(x), sublayer(layer_norm(x))",
        f"{PAPER} -k layer",
    ),
    "cache position is off by one": Fault(
        "layers",
        "VanillaTransformerDecoder.forward",
        "device=inputs_embeds.device) + past",
        "device=inputs_embeds.device) + max(past - 1, 0)",
        f"{MODEL} -k cached",
    ),
    "cross-attention cache is extended at each step": Fault(
        "layers",
        "VanillaTransformerAttention._project_source",
        "past_key_values.is_updated.get(self.layer_idx)",
        "False",
        f"{MODEL} -k cached",
    ),
    "padding is counted in positions": Fault(
        "layers",
        "positions_from_mask",
        "attention_mask.long().cumsum(dim=-1)",
        "torch.ones_like(attention_mask).long().cumsum(dim=-1)",
        f"{PAPER} -k padding",
    ),
    # The loss
    "decoder reads the token that it is to predict": Fault(
        "loss", "shift_right", "labels.roll(1, dims=-1)", "labels.clone()", f"{PAPER} -k 'place or shift'"
    ),
    "labels are modified": Fault(
        "loss",
        "shift_right",
        "labels.roll(1, dims=-1)",
        "labels.copy_(labels.roll(1, dims=-1))",
        f"{MODEL} -k 'caller or modify'",
    ),
    "loss is a mean of means": Fault(
        "loss",
        "fused_translation_loss",
        "(labels, num_items_in_batch)",
        "(labels, None)",
        f"{PROMISES} -k gradients_do_not_depend",
    ),
    "labels are smoothed in evaluation": Fault(
        "modeling",
        "VanillaTransformerForConditionalGeneration._losses",
        "self.config.label_smoothing if self.training else 0.0",
        "self.config.label_smoothing",
        f"{LOSS} -k training",
    ),
    "gradient of the states lacks smoothing": Fault(
        "loss", "_FusedObjective.forward", "sub_(u[:, None, None] * mean_weight)", "sub_(0)", f"{LOSS} -k fused"
    ),
    "rows of the rounding have a gradient": Fault(
        "loss", "_FusedObjective.forward", "logits[:, len(positions):] = 0", "pass", f"{LOSS} -k fused"
    ),
    "gradient of the matrix lacks smoothing": Fault(
        "loss",
        "_FusedObjective.forward",
        "(sum_tokens / -len(weight)).repeat",
        "(0 * sum_tokens).repeat",
        f"{LOSS} -k fused",
    ),
    # Consistency training
    "label smoothing of a fused objective lacks a derivative": Fault(
        "loss",
        "_FusedObjective.forward",
        ".sub_(u[:, None, None] * mean_weight)",
        "",
        "training/test_consistency.py -k 'papers or formula'",
    ),
    "KL divergence lacks the derivative of its mean": Fault(
        "training/objectives/consistency",
        "_differentiate",
        "1 + r - f * mean",
        "1 + r",
        "training/test_consistency.py -k formula",
    ),
    "second half of a batch begins one pair late": Fault(
        "training/objectives/consistency",
        "halves",
        "slice(middle, None)",
        "slice(middle + 1, None)",
        "training/test_consistency.py -k halves",
    ),
    # The optimizer
    "Muon takes the momentum without Nesterov's step": Fault(
        "training/muon",
        "MuonAdamW._step_matrices",
        "weight.grad.lerp(momentum, MOMENTUM)",
        "momentum",
        "training/test_muon.py -k formula",
    ),
    "Muon's learning rate follows the shorter side": Fault(
        "training/muon", "MuonAdamW._step_matrices", "max(shape)", "min(shape)", "training/test_muon.py -k formula"
    ),
    # The search
    "cache ignores the parents of beams": Fault(
        "generation",
        "take_slots",
        "visible.gather(1, parents[..., None].expand(-1, -1, visible.shape[2]))",
        "visible.expand(-1, parents.shape[1], -1)",
        f"{SEARCH} -k slots",
    ),
    "hypotheses ignore the parents of beams": Fault(
        "search",
        "_append",
        "state.tokens.gather(1, parents[..., None].expand(-1, -1, state.tokens.shape[2]))",
        "state.tokens.expand(-1, parents.shape[1], -1)",
        f"{SEARCH} -k beam_search_equals",
    ),
    "slot is reused while a beam sees it": Fault(
        "generation", "take_slots", "(~visible.any(dim=1))", "(~visible[:, 0])", f"{SEARCH} -k slots"
    ),
    "capacity is cut below visible slots": Fault(
        "generation",
        "BeamCacheSlots.reserve",
        "capacity = -(-(self.bound + beams * self.steps_at_once) // SLOTS) * SLOTS",
        "capacity = SLOTS",
        f"{SEARCH} -k slots",
    ),
    "module decoder ignores the source mask": Fault(
        "generation", "ModuleDecoder._set_mask", "bool(visible.all())", "True", f"{SEARCH} -k padding"
    ),
    "tokens behind the last block are not searched": Fault(
        "search", "topk", "torch.arange(whole, size)", "torch.arange(0)", "test_cache_slots.py -k topk"
    ),
    "refilled row has the position of older rows": Fault(
        "search",
        "BeamState.positions",
        "torch.minimum(self.lengths, self.limits - 1) - 1",
        "self.lengths.amax().expand_as(self.lengths) - 1",
        f"{SEARCH} -k refill",
    ),
    "refilled row sees the cache of an older sentence": Fault(
        "generation",
        "BeamCacheSlots.replace",
        "replace_rows(self.visible, rows, theirs, 2)",
        "replace_rows(self.visible, rows[:0], theirs[:0], 2)",
        f"{SEARCH} -k refill",
    ),
    "refill loses the cache's bound": Fault(
        "generation", "BeamCacheSlots.replace", "max(self.bound, other.bound)", "other.bound", f"{SEARCH} -k refill"
    ),
    "greedy search sees no cache slots after a refill": Fault(
        "generation",
        "ModuleDecoder.replace",
        "other.states, 1), False",
        "other.states, 1), True",
        f"{SEARCH} -k refill",
    ),
    "refill takes the result of another sentence": Fault(
        "search",
        "BeamSearch.join",
        "zip(free, batch.keys,",
        "zip(free[::-1], batch.keys,",
        f"{SEARCH} -k refill",
    ),
    "limit is that of another sentence": Fault(
        "search",
        "BeamSearch._start",
        "(batch.source_lengths + self.over)",
        "(batch.source_lengths.flip(0) + self.over)",
        f"{SEARCH} -k limit",
    ),
    "length penalty lacks the 5": Fault(
        "search", "LengthPenalty.__call__", "(5 + lengths) / 6", "lengths / 6", f"{SEARCH} -k 'penalty or papers'"
    ),
    "length penalty is off by one": Fault(
        "search", "BeamSearch._start", "- given\n", "- given + 1\n", f"{SEARCH} -k papers"
    ),
    "search ends while a longer hypothesis could win": Fault(
        "search",
        "SearchConfig.extend",
        "state.limits if self.can_grow else length",
        "length",
        f"{SEARCH} -k papers",
    ),
    "search ends before all returned hypotheses are found": Fault(
        "search",
        "SearchConfig.extend",
        "state.enough[:, None] - 1",
        "0 * state.enough[:, None]",
        f"{SEARCH} -k 'papers or return'",
    ),
    "ensemble multiplies probabilities": Fault(
        "inference/ensemble",
        "EnsembleDecoder.step",
        "logits.logsumexp(dim=0) - math.log(len(self.decoders))",
        "logits.mean(dim=0)",
        f"{SEARCH} -k ensemble",
    ),
    "translations end after 20 more tokens": Fault(
        "generation", "MAX_LENGTH_OVER_SOURCE", "50", "20", "test_generation.py -k limit"
    ),
    # The engine
    "packed decoder ignores the source mask": Fault(
        "inference/packed_decoder", "PackedDecoder._hold_source", "not bool(self.visible.all())", "False", PACKED
    ),
    "packed decoder writes into the cache of another sentence": Fault(
        "inference/packed_decoder", "PackedWeights.forward", "slots + first", "slots + first.flip(0)", PACKED
    ),
    "packed decoder adds the position of the last token": Fault(
        "inference/packed_decoder",
        "PackedWeights.forward",
        "encodings[positions]",
        "encodings[(positions - 1).clamp(min=0)]",
        PACKED,
    ),
    "fused product forgets its ReLU": Fault(
        "inference/linear", "PrepackedLinear.linear_relu", "'relu'", "'none'", LINEAR
    ),
    "int8 scales are one for all outputs": Fault(
        "inference/linear",
        "quantize_per_row",
        "matrix.float().abs().amax(dim=1)",
        "matrix.float().abs().amax().repeat(len(matrix))",
        LINEAR,
    ),
    "int8 scales of rows are swapped": Fault(
        "inference/linear", "DynamicInt8Linear.forward", "* scales[:, None]", "* scales.flip(0)[:, None]", LINEAR
    ),
    "engine keeps weights that were written to": Fault(
        "inference/optimize",
        "_state",
        "version(weight)",
        "0",
        f"{OPTIMIZE} -k changes",
    ),
    "engine notices a change and keeps what it packed": Fault(
        "inference/optimize",
        "InferenceEngine.weights",
        "self.packed = {}",
        "pass",
        f"{OPTIMIZE} -k changes",
    ),
    "engine ignores adapters": Fault(
        "inference/optimize",
        "_is_known",
        "name.endswith('_vanilla_transformer') and",
        "True or",
        f"{OPTIMIZE} -k 'modules or adapter'",
    ),
    "compiled step is that of other search settings": Fault(
        "inference/compiled",
        "CompiledWeights.step",
        "return self.steps[advance]",
        "return next(iter(self.steps.values()))",
        f"{COMPILED} -k search",
    ),
    # What users do to a model
    "logits processors see the rows of other sentences": Fault(
        "search",
        "BeamSearch._compact",
        "(not self.fixed_rows) and",
        "",
        f"{SEARCH} -k processor",
    ),
    "forced end token is forced at the limit of the batch": Fault(
        "search", "SearchConfig.force_eos", "== state.limits", "== state.limits.amax()", f"{SEARCH} -k forced"
    ),
    "prefix tuning is ignored": Fault(
        "generation",
        "_uncovered",
        "getattr(model.prepare_inputs_for_generation, '__func__', None) is not prepare",
        "False",
        "test_plan_search.py -k 'prepare or prefix or tuning or covered'",
    ),
    "labels of the trainer change the search": Fault(
        "modeling",
        "VanillaTransformerForConditionalGeneration.generate",
        "kwargs.pop('labels', None)",
        "None",
        "test_trainer_stock.py -k predict_with_generate",
    ),
    "engine ignores training mode of a submodule": Fault(
        "inference/optimize",
        "not_optimizable",
        "if module.training",
        "if False",
        f"{OPTIMIZE} -k 'modules or training'",
    ),
    "engine ignores the steps of fused optimizers": Fault(
        "inference/optimize", "_count_fused_step", "group.get('fused')", "False", f"{OPTIMIZE} -k changes"
    ),
    "compiled code is shared by dtypes": Fault(
        "inference/compiled", "CompiledModule.code", "tensor.dtype", "None", f"{COMPILED} -k dtype"
    ),
    # What users do to a run
    "every epoch has the order of the first": Fault(
        "training/resumable_trainer",
        "ResumableTrainer._run_epoch",
        "order.set_epoch(epoch)",
        "order.set_epoch(0)",
        f"{TRAINER} -k 'once or identical or bit_for_bit'",
    ),
    "resumed run begins the data anew": Fault(
        "training/resumable_trainer",
        "ResumableTrainer._start_or_resume",
        "self._resume_position = saved.position",
        "pass",
        f"{TRAINER} -k 'identical or bit_for_bit'",
    ),
    "resuming with another batch size is not refused": Fault(
        "training/checkpoints",
        "require_same",
        "saved[name] != now[name]",
        "False",
        f"{TRAINER} -k refused",
    ),
    "run continues from an older checkpoint in its folder": Fault(
        "training/checkpoints",
        "require_last",
        "checkpoint.resolve() != last.resolve()",
        "False",
        f"{RESUME} -k older",
    ),
    "finished run is trained further": Fault(
        "training/resumable_trainer",
        "ResumableTrainer._training_is_over",
        "self.state.global_step >= self.state.max_steps",
        "False",
        f"{RESUME} -k finished_run",
    ),
    "early stopping forgets the evaluations before a resume": Fault(
        "training/resumable_trainer",
        "ResumableTrainer._load_callback_state",
        "setattr(callback, attribute, value)",
        "pass",
        f"{RESUME} -k early_stopping_counts",
    ),
    "stream by pairs begins its pass anew": Fault(
        "training/resumable_trainer",
        "ResumableTrainer._init_training_state",
        "position['updates'] * self.args.gradient_accumulation_steps",
        "0",
        f"{RESUME} -k later_pass",
    ),
    "precision is measured again by a resumed run": Fault(
        "training/precision",
        "resolve_precision",
        "checkpoint is not None",
        "False",
        f"{RESUME} -k measured_once",
    ),
    "new run starts in a folder with files": Fault(
        "training/run_folder",
        "require_new_folder",
        "if names:",
        "if False:",
        "training/test_run_folder.py -k 'empty or named'",
    ),
    "interrupted run saves nothing": Fault(
        "training/callbacks",
        "StopWithCheckpoint.on_step_end",
        "control.should_training_stop = control.should_save = True",
        "control.should_training_stop = True",
        "training/test_callbacks.py -k limit",
    ),
    "interrupted evaluation is not made later": Fault(
        "training/resumable_trainer",
        "ResumableTrainer._evaluate_if_due",
        "self._resumed_from is None",
        "True",
        "training/test_signals.py -k 'interrupted_evaluation and steps'",
    ),
    "last checkpoints are the last by name": Fault(
        "training/checkpoints",
        "complete_checkpoints",
        "int(match[1])",
        "match[1]",
        "training/test_checkpoints.py -k complete",
    ),
    "checkpoint limit deletes the best checkpoint": Fault(
        "training/resumable_trainer",
        "ResumableTrainer._save_checkpoint",
        "best and str(Path(best).resolve())",
        "None",
        f"{TRAINER} -k best",
    ),
    "resumed stream repeats the updates of its window": Fault(
        "data/token_batches",
        "StreamingTokenBatches.__iter__",
        "start['update']",
        "0",
        "data/test_token_batches.py -k resume",
    ),
}


def file_of(fault: Fault) -> str:
    return f"{fault.module}.py" if "/" in fault.module else f"{fault.module}_vanilla_transformer.py"


def plant(source: str, fault: Fault) -> str:
    """The text of a module with a fault in it. Its function and its text must be there exactly once."""
    node: Any = ast.parse(source)
    for name in fault.function.split("."):
        found = [each for each in node.body if name in names_of(each)]
        assert len(found) == 1, f"{len(found)} times {name} of {fault.function} in {file_of(fault)}"
        node = found[0]
    right = ast.unparse(node)
    assert right.count(fault.right) == 1, f"{right.count(fault.right)} times {fault.right!r} in\n{right}"
    wrong = right.replace(fault.right, fault.wrong)
    assert ast.unparse(ast.parse(wrong)) != right
    lines = source.splitlines(keepends=True)
    first = min(each.lineno for each in (node, *getattr(node, "decorator_list", ())))
    wrong = textwrap.indent(f"{wrong}\n", " " * node.col_offset)
    return "".join([*lines[: first - 1], wrong, *lines[node.end_lineno :]])


def names_of(statement: ast.AST) -> list[str]:
    """The names that a definition or an assignment binds."""
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return [statement.name] if isinstance(statement, ast.FunctionDef | ast.ClassDef) else []


# Imports the libraries (this takes longer than most tests), and forks for each run of pytest.
RUNNER = """
import json, os, signal, sys
import accelerate, datasets, hypothesis, pytest, torch
from transformers import MarianMTModel, Seq2SeqTrainer

for line in sys.stdin:
    folder, arguments = json.loads(line)
    child = os.fork()
    if not child:
        signal.alarm(600)  # a fault may never end
        os.chdir(folder)
        os.environ["PYTHONPATH"] = folder
        sys.path.insert(0, folder)
        for stream in (1, 2):
            os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        status = pytest.main(arguments)
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

Outcome = tuple[int, str]  # exit status of pytest, and its output
RunTests = Callable[[Path, list[str]], Outcome]


@pytest.fixture(scope="module")
def run_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunTests]:
    """Runs pytest in a copy of the repository."""
    command = [sys.executable, "-c", RUNNER]
    folder = tmp_path_factory.mktemp("runner")
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdin is not None and runner.stdout is not None

        def run(copy: Path, arguments: list[str]) -> Outcome:
            flags = ["-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
            print(json.dumps([str(copy), [*flags, *arguments]]), file=runner.stdin, flush=True)
            status = int(runner.stdout.readline())
            return status, (copy / "output.txt").read_text(encoding="utf-8", errors="replace")

        yield run
        runner.stdin.close()


@pytest.fixture
def copy(repository: Path, tmp_path: Path) -> Path:
    """The package, its tests and the settings of pytest."""
    for name in ("hf_vanilla_transformer", "tests"):
        shutil.copytree(repository / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repository / "pyproject.toml", tmp_path)
    return tmp_path


def selection(fault: Fault) -> tuple[list[str], list[str]]:
    """Test files, and -k with its expression."""
    arguments = shlex.split(fault.tests)
    end = arguments.index("-k") if "-k" in arguments else len(arguments)
    return [f"tests/{name}" for name in arguments[:end]], arguments[end:]


@pytest.mark.slow  # it pins source text: a rename must not break the fast tests
@pytest.mark.parametrize("name", FAULTS)
def test_fault_can_be_planted(name: str, repository: Path) -> None:
    source = (repository / "hf_vanilla_transformer" / file_of(FAULTS[name])).read_text(encoding="utf-8")
    compile(plant(source, FAULTS[name]), name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_noticed(name: str, copy: Path, run_tests: RunTests) -> None:
    file = copy / "hf_vanilla_transformer" / file_of(FAULTS[name])
    file.write_text(plant(file.read_text(encoding="utf-8"), FAULTS[name]), encoding="utf-8")
    files, expression = selection(FAULTS[name])
    status, output = run_tests(copy, files + expression)
    # 1: a test failed. Anything else, errors of collection too, is a mistake in the fault.
    assert status == 1 and "error" not in output.splitlines()[-1], f"{status}: {output[-2000:]}"
    print(next((line for line in output.splitlines() if line.startswith("FAILED")), "").split(" - ")[0])


@pytest.mark.slow
def test_right_code_passes(copy: Path, run_tests: RunTests) -> None:
    selected: dict[str, list[str]] = {}  # file -> expressions. An empty one selects all
    for fault in FAULTS.values():
        files, expression = selection(fault)
        for file in files:
            selected.setdefault(file, []).append(" ".join(expression[1:]))
    whole = [file for file, expressions in selected.items() if "" in expressions]
    runs = [whole] + [
        [file, "-k", " or ".join(f"({each})" for each in sorted(set(expressions)))]
        for file, expressions in selected.items()
        if file not in whole
    ]
    for arguments in runs:
        status, output = run_tests(copy, arguments)
        assert status == 0, output[-2000:]
