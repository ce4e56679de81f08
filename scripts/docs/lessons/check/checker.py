"""Compare a class with the paper: find the choices that let `Reference` compute the same numbers."""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_vanilla_transformer.utils.errors import UserError

from . import subject
from .conventions import own_convention
from .mistakes import MISTAKES, Mistake
from .objectives import check_loss, check_shift
from .parts import check_part, part_of
from .place import Places, local_mistakes
from .reference import Reference
from .report import TOLERANCE, UNKNOWN, Report, choices, notes_of, relative_difference
from .roles import Roles, roles_of
from .steps import output_of_steps
from .subject import Call
from .trace import Trace

_OUTPUTS = {
    "logits": lambda logits: logits,
    "log-probabilities": lambda logits: logits.log_softmax(-1),
    "probabilities": lambda logits: logits.softmax(-1),
    "log-probabilities over positions": lambda logits: logits.log_softmax(1),
}
_OUTPUT_MISTAKES = {
    "probabilities": Mistake(
        "output",
        "§3.4",
        "probabilities",
        "the model ends in a softmax, and cross-entropy computes another one",
    ),
    "log-probabilities over positions": Mistake(
        "output",
        "§3.4",
        "dim=1",
        "the softmax of the output runs over positions, not over the vocabulary",
    ),
}
_TIED = Mistake(
    "tying", "§3.4", "source", "the output layer has the table of the source, not of the target"
)
_PRE = Mistake(
    "norm position", "§3.1", "post", "an argument asks for pre-norm, and the layers are post-norm"
)
_DROPPED_MASK = Mistake(
    "masks",
    "§3.2.3",
    "dropout",
    "dropout reads a mask: in training it hides other keys at random",
)
_CACHED = Mistake(
    "cached step",
    "§3.1",
    None,
    "token by token the logits are not those of the whole target",
)
_PADDED = Mistake(
    "positions",
    "§3.5",
    "padding",
    "padding on the left of a source moves the positions of its tokens",
)
_NOT_A_NUMBER = Mistake(
    "mask value",
    "§3.2.3",
    "nan",
    "the output has NaN, as from a softmax over scores that are all -inf: a position that may see no key, such as the "
    "first one under a causal mask without its diagonal, or a softmax over heads or queries",
)
_COPIES = "the layers of a stack are one object, as in [layer] * N: use copy.deepcopy"
_IN_TRAINING = (
    "the causal mask exists in training mode alone: call eval() only to decode token by token"
)
_NOT_STEPPED = "decoding token by token was not compared: no module takes the target and a state"
_RESTARTED = "token by token, each token of the target gets position 0, because positions count the tokens of one call"
_REPEATED = Mistake(
    "heads",
    "§3.2.2",
    "one map",
    "one projection (d_k, d_k) serves every head: each head has its own",
)

# An operation of ATen -> an activation that it may be part of.
_OF_OPERATION = (
    ("gelu", "gelu"),
    ("gelu", "gelu by tanh"),
    ("erf", "gelu"),
    ("tanh", "gelu by tanh"),
    ("silu", "silu"),
    ("sigmoid", "silu"),
)

_MASKS = {
    "visible": "masks: 1 or True shows a key",
    "number": "masks: 1 shows a key",
    "hidden": "masks: 1 or True hides a key",
    "added": "masks: 0 shows a key and -inf hides it, and they are added to the scores",
}


def check(build: Any, given: Mapping[str, Any], roles: Mapping[str, str] | None = None) -> Report:
    """Build a model, or a part of one, and compare its output with the paper's for the same random weights.

    Args:
        build: a class or a function that returns an `nn.Module`. A whole model has two vocabularies, or its `forward`
            takes source and target. Otherwise the name may tell a part, such as `PositionalEncoding`,
            `MultiHeadAttention`, `LayerNorm`, `EncoderLayer`, `loss` or `shift_right`.
        given: arguments for it that the names of its parameters do not explain.
        roles: names of modules by role, if they are not found: "output_layer" -> "generator.proj".

    Raises:
        UserError: it cannot be built, called or understood. The message names the argument that is needed.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # It zeroes padding, in nested tensors without a shape.
    torch.backends.mha.set_fastpath_enabled(False)
    torch.manual_seed(0)
    try:
        if subject.is_whole_model(build):
            return check_model(build, given, roles or {})
        for words, check_objective in (
            (r"loss|smooth|criterion", check_loss),
            (r"shift", check_shift),
        ):
            if re.search(words, build.__name__, re.IGNORECASE):
                return check_objective(build, given)
        part = part_of(build.__name__)
        return check_part(build, given, *part) if part else check_model(build, given, roles or {})
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


@dataclass
class _Subject:
    """A model with the calls that work, their outputs, and the weights that a trace of the first call found."""

    model: nn.Module
    source: Tensor
    target: Tensor
    calls: list[Call]
    outputs: list[Tensor]
    roles: Roles
    norms: dict[str, tuple[Any, ...]]


@torch.no_grad()
def check_model(build: Any, given: Mapping[str, Any], roles: Mapping[str, str]) -> Report:
    """As `check`, for an encoder and decoder."""
    arguments = subject.constructor_arguments(build, given)
    model = subject.built(build, arguments)
    if subject.shared_layers(model):
        return Report([Mistake("layers", "§3.1", "shared", _COPIES)], float("inf"), [])
    subject.require_parameters(model)
    report = _checked(build, model, arguments, roles)
    if any((each.place, each.option) == ("causal mask", "none") for each in report.mistakes):
        subject.switch_off_dropout(model)
        with contextlib.suppress(UserError):
            # It has dropout that is no module, or cannot be called.
            trained = _checked(build, model.train(), arguments, roles)
            if len(trained.mistakes) < len(report.mistakes):
                return _with_steps(model, trained)
    return report


def _with_steps(model: nn.Module, report: Report) -> Report:
    """Compare token by token in eval mode a model whose causal mask exists in training mode alone."""
    report = report._replace(notes=[*report.notes, _IN_TRAINING])
    if report.mistakes or report.formula is None:
        return report
    _, target, calls, _ = _working_calls(model)
    expected = report.formula({})
    try:
        output = output_of_steps(model, calls[0].run, target)
    except RuntimeError:  # shapes that do not fit
        return report._replace(mistakes=[_CACHED], difference=float("inf"))
    if output is None or output.shape != expected.shape:
        return report._replace(notes=[*report.notes, _NOT_STEPPED])
    difference = relative_difference(output, expected)
    if difference < TOLERANCE:
        return report
    restarted = report.formula({"steps": "each at position 0"})
    if relative_difference(output, restarted) < TOLERANCE:
        return report._replace(notes=[*report.notes, _RESTARTED])
    return report._replace(mistakes=[_CACHED], difference=difference)


def _checked(
    build: Any, model: nn.Module, arguments: Mapping[str, Any], roles: Mapping[str, str]
) -> Report:
    """Compare a model in the mode that it is in."""
    source, target, calls, outputs = _working_calls(model)
    if not outputs:
        return Report([_NOT_A_NUMBER], float("inf"), [])
    found = _traced(model, calls[0], roles)
    if found.is_applied:
        outputs = [_applied(found, output) for output in outputs]
    # The weights have their roles by this position.
    norms: dict[str, tuple[Any, ...]] = {
        "norm position": ("pre" if found.is_pre else "post",),
        "activation": _activations(found.operations),
        **subject.norm_options(model),
    }
    checked = _Subject(model, source, target, calls, outputs, found, norms)
    report = _first_mistakes(checked)
    if report is None:
        report = _numbers(checked, subject.heads_of(model, arguments))
    report = _with_notes(checked, report, build)
    if report.mistakes:
        return report
    with subject.DropoutOfMask() as dropout:
        calls[0].run()
    if dropout.is_found:
        return Report([_DROPPED_MASK], float("inf"), report.notes)
    asks_pre_norm = any(
        "norm" in name and (value is True or value == "pre") for name, value in arguments.items()
    )
    if asks_pre_norm and not any(note.startswith("pre-norm") for note in report.notes):
        return Report([_PRE], report.difference, report.notes)
    for mistake, difference in _with_cache_and_padding(model, source, target):
        if difference > TOLERANCE:
            return Report([mistake], difference, report.notes)
    return report


def _first_mistakes(checked: _Subject) -> Report | None:
    """Mistakes of the weights alone."""
    found = checked.roles
    if found.half_norms:
        explanation = f"no operation uses {', '.join(found.half_norms[:3])} of a normalisation"
        return Report([Mistake("norm", "§3.1", "half", explanation)], float("inf"), [])
    if found.has_one_table and (name := _unread_table(checked)):
        explanation = f"source and target are looked up in one table, and {name} is never read"
        return Report([Mistake("embeddings", "§3.4", "one", explanation)], float("inf"), [])
    for stack, table in found.tables.items():
        if len(table) > 1 and torch.equal(table, table[:1].expand_as(table)):
            explanation = f"every token of the {stack} gets the same position"
            return Report([Mistake("positions", "§3.5", "same", explanation)], float("inf"), [])
    if found.shared:
        explanation = f"one module is {found.shared[0]}: each has its own weights"
        return Report([Mistake("layers", "§3.1", "shared", explanation)], float("inf"), [])
    if found.unused_layers:
        explanation = f"{found.unused_layers[0].rstrip('.')} is never called"
        return Report([Mistake("layers", "§3.1", "unused", explanation)], float("inf"), [])
    for stack, sublayers in found.sublayers.items():
        if not sublayers:
            explanation = f"the {stack} has no layers: no sublayer reads its embeddings alone"
            return Report([Mistake("layers", "§3.1", "none", explanation)], float("inf"), [])
    return Report([_TIED], float("inf"), []) if found.tied_to_source else None


def _unread_table(checked: _Subject) -> str | None:
    """The name of an embedding of words in which nothing is looked up."""
    parameters = dict(checked.model.named_parameters())
    read = [parameters[name] for name in checked.roles.looked_up]
    for name, part in checked.model.named_modules():
        if not isinstance(part, nn.Embedding) or not part.weight.requires_grad:
            continue
        is_of_words = part.num_embeddings in (subject.SOURCE_TOKENS, subject.TARGET_TOKENS)
        if is_of_words and not any(part.weight is each for each in read):
            return name
    return None


def _activations(operations: frozenset[str]) -> tuple[str, ...]:
    """The right activations whose operations occur."""
    options = [option for operation, option in _OF_OPERATION if operation in operations]
    return ("relu", *dict.fromkeys(options))


def _numbers(checked: _Subject, named_heads: Sequence[int]) -> Report:
    """Compare the outputs, with the number of heads that the code names first, then with the one that it uses."""
    found = checked.roles
    width = len(found.tensors["model.encoder.embed_tokens.weight"][0])
    all_heads = [each for each in dict.fromkeys((*named_heads, found.heads)) if width % each == 0]
    report = Report([UNKNOWN], float("inf"), [])
    for heads in all_heads:
        report = _compare(checked, _reference(checked, heads))
        if report.mistakes != [UNKNOWN]:
            break
    mistakes = report.mistakes
    if mistakes == [UNKNOWN]:
        mistakes = _local(checked, _reference(checked, all_heads[0]))
        if not mistakes and not found.repeated:
            mistakes = [UNKNOWN]
    if found.repeated:
        mistakes = [_REPEATED, *mistakes]
    return report._replace(mistakes=mistakes)


def _reference(checked: _Subject, heads: int) -> Reference:
    found = checked.roles
    return Reference(
        found.tensors,
        heads,
        subject.PAD,
        tables=found.tables,
        large_epsilon=subject.large_epsilon(checked.model),
    )


def _local(checked: _Subject, reference: Reference) -> list[Mistake]:
    """The mistakes by place, for the way to call the model that explains most."""
    best: list[Mistake] | None = None
    for call, output in zip(checked.calls, checked.outputs, strict=True):
        found = _traced(
            checked.model, call, {"output_layer": checked.roles.output_name.rpartition(".")[0]}
        )
        if found.is_applied:
            found.flow["decoder"] = _states(call, checked)
        places = Places(found, reference, checked.source, checked.target, checked.norms)
        mistakes = local_mistakes(list(places.differences()))
        mistakes += _of_output(found, reference, output, places)
        if best is None or _weight(mistakes) < _weight(best):
            best = mistakes
    return best or []


def _weight(mistakes: Sequence[Mistake]) -> tuple[int, int]:
    return sum(each.option is None for each in mistakes), len(mistakes)


def _states(call: Call, checked: _Subject) -> Tensor:
    states = subject.logits_of(call.run(), *checked.target.shape)
    assert states is not None
    return states


def _of_output(found: Roles, reference: Reference, output: Tensor, places: Places) -> list[Mistake]:
    """Mistakes of the output layer, for the states that it reads."""
    states = found.flow.get("decoder")
    states = None if states is None else places.oriented(states, "decoder")
    if states is None:
        return []
    scales = [each for each in MISTAKES if each.place == "output scale"]
    for mistake in (None, *scales):
        logits = reference.output(states, {mistake.place: mistake.option} if mistake else {})
        for name, transform in _OUTPUTS.items():
            expected = transform(logits)[:, : output.shape[1]]
            if expected.shape == output.shape and relative_difference(output, expected) < TOLERANCE:
                return [each for each in (mistake, _OUTPUT_MISTAKES.get(name)) if each]
    return [UNKNOWN._replace(place="output layer", section="§3.4")]


def _traced(model: nn.Module, call: Call, given: Mapping[str, str]) -> Roles:
    with Trace(model, {"source": call.source, "target": call.target}) as trace:
        call.run()
    return roles_of(trace, model, given)


def _applied(found: Roles, states: Tensor) -> Tensor:
    """The logits of the decoder's states, by the output layer that forward does not call."""
    return functional.linear(
        states, found.tensors["lm_head.weight"], found.tensors.get("lm_head.bias")
    )


def _with_notes(checked: _Subject, report: Report, build: Any) -> Report:
    """Add what a right model leaves to its caller: the output layer, and the convention of masks."""
    found = checked.roles
    notes = list(report.notes)
    mistakes = list(report.mistakes)
    if found.is_applied:
        module = found.output_name.rpartition(".")[0]
        notes.append(
            f"forward gives the decoder's states (B, T, d_model): {module} was applied to them"
        )
    encodings = [name for name, note in _MASKS.items() if note in notes]
    mistake = _mistake_of_masks(build, encodings[0]) if encodings else None
    if mistake is not None:
        mistakes.append(mistake)
    unused = [name for name in found.unused if name not in found.filled]
    if unused and not mistakes:
        notes.append(f"no operation uses {', '.join(unused[:3])}{' …' if len(unused) > 3 else ''}")
    return report._replace(mistakes=mistakes, notes=notes)


def _mistake_of_masks(build: Any, encoding: str) -> Mistake | None:
    """What is wrong if the masks come from the functions next to the code, and attention reads `encoding`."""
    own = own_convention(build)
    if own is None:
        return None
    if own.is_shifted:
        explanation = (
            f"{own.function} does not mark a position and the earlier ones: its diagonal is off"
        )
        return Mistake("causal mask", "§3.2.3", "own function", explanation)
    encoding = "visible" if encoding == "number" else encoding
    if encoding == "added" or own.encoding == encoding:
        return None
    explanation = (
        f"{own.function} marks the {own.encoding} keys, and attention takes them for the {encoding} "
        "ones: an inverted mask"
    )
    return Mistake("masks", "§3.2.3", "inverted", explanation)


def _with_cache_and_padding(
    model: nn.Module, source: Tensor, target: Tensor
) -> Iterator[tuple[Mistake, float]]:
    """Mistakes that only calls with Hugging Face's arguments show, with the difference of the logits."""
    if (
        not {"input_ids", "attention_mask", "past_key_values"}
        <= inspect.signature(model.forward).parameters.keys()
    ):
        return

    def run(ids: Tensor, target: Tensor, **more: Any) -> Any:
        return model(
            input_ids=ids,
            attention_mask=ids.ne(subject.PAD).long(),
            decoder_input_ids=target,
            **more,
        )

    logits = run(source, target).logits
    steps = []
    cache = None
    left = torch.stack([row.roll(int(row.eq(subject.PAD).sum())) for row in source])
    yield _PADDED, relative_difference(run(left, target).logits, logits)
    try:
        for token in target.split(1, dim=1):
            output = run(source, token, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output.logits)
        yield _CACHED, relative_difference(torch.cat(steps, dim=1), logits)
    except RuntimeError:  # keys and values of shapes that do not fit
        yield _CACHED, float("inf")


def _batch(model: nn.Module, lengths: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A source (3, S) with padding, and a decoder input (3, T) without."""
    generator = torch.Generator().manual_seed(1)
    sizes = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)]
    size = min([each for each in sizes if each > subject.EOS + 2], default=subject.SOURCE_TOKENS)
    size = min(size, subject.SOURCE_TOKENS)
    source, target = (
        torch.randint(subject.EOS + 1, size, (3, length), generator=generator) for length in lengths
    )
    for row, length in enumerate((lengths[0] - 1, lengths[0] - 2, lengths[0] - 3)):
        source[row, length:] = subject.PAD  # in each, so that an inverted mask shows something
    return source, target


def _working_calls(model: nn.Module) -> tuple[Tensor, Tensor, list[Call], list[Tensor]]:
    """The source, the target, every way to call the model that works, and its output.

    Some models fix the length of a sentence. It is read from the message of the error.
    """
    lengths = [(7, 5), (5, 5)]
    first_errors: list[BaseException] = []
    for pair in lengths:
        errors: list[BaseException] = []
        source, target = _batch(model, pair)
        calls = []
        outputs: list[Tensor] = []
        is_finite = True
        random: tuple[Tensor, Tensor] | None = None
        for call in subject.calls(model, source, target):
            try:
                output, again = (subject.logits_of(call.run(), *target.shape) for _ in range(2))
            except Exception as error:
                errors.append(error)
                continue
            if output is None or again is None:
                continue
            if not bool(torch.isfinite(output).all()):
                is_finite = False
            elif torch.equal(output, again) and any(torch.equal(output, each) for each in outputs):
                continue  # another encoding of the same masks
            elif torch.equal(output, again):
                calls.append(call)
                outputs.append(output)
            else:
                random = output, again
        if not outputs and random is not None:
            subject.require_equal(*random)
        if outputs or not is_finite:
            return source, target, calls, outputs
        first_errors = first_errors or errors
        fixed = {
            int(number)
            for error in errors
            for number in re.findall(r"size of tensor b \((\d+)\)", str(error))
        }
        for length in sorted(fixed):
            if 5 < length <= 500 and (length, length) not in lengths:
                lengths.append((length, length))
    reason = subject.describe_failure(first_errors)
    raise UserError(f"forward cannot be called with (source, target) and masks: {reason}")


def _formula(
    reference: Reference,
    source: Tensor,
    target: Tensor,
    choice: Mapping[str, Any],
    transform: Callable[[Tensor], Tensor],
    more: Mapping[str, Any],
) -> Tensor:
    return transform(reference(source, target, {**choice, **more}))


def _compare(checked: _Subject, reference: Reference) -> Report:
    smallest = float("inf")
    source = checked.source
    target = checked.target
    pairs = list(zip(checked.calls, checked.outputs, strict=True))
    for choice, mistake in choices({each.place for each in MISTAKES}, checked.norms):
        try:
            logits = reference(source, target, choice)
        # Shapes that this mistake does not allow, or a part that the model lacks.
        except (RuntimeError, KeyError):
            continue
        for name, transform in _OUTPUTS.items():
            expected = transform(logits)
            for call, output in pairs:
                if output.shape[-1] != expected.shape[-1]:
                    continue
                difference = relative_difference(output, expected[:, : output.shape[1]])
                if not mistake and name not in _OUTPUT_MISTAKES:
                    smallest = min(smallest, difference)
                if difference < TOLERANCE:
                    mistakes = [each for each in (mistake, _OUTPUT_MISTAKES.get(name)) if each]
                    table = {"positions": "table"} if reference.tables else {}
                    notes = notes_of(choice | table, mistake, output=name)
                    if call.encoding:
                        notes.append(_MASKS[call.encoding])
                    smallest = smallest if mistakes else difference
                    formula = partial(_formula, reference, source, target, choice, transform)
                    return Report(mistakes, smallest, notes, formula)
    return Report([UNKNOWN], smallest, [])
