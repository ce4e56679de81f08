"""Compare each sublayer of a model with the paper for the vectors that it gets itself, and name what differs there."""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .blocks import STACKS
from .mistakes import MISTAKES, Mistake
from .reference import ALLOWED, Reference
from .report import UNKNOWN
from .roles import ROLE_WORDS, Roles, Sublayer

TOLERANCE = 1e-4

_IN_ATTENTION = ("heads", "attention scale", "softmax", "mask value", "attention output")
_SUBLAYERS = {
    "self_attn": "self-attention",
    "cross_attn": "cross-attention",
    "final": "feed-forward",
}


class Difference(NamedTuple):
    """A mistake, or None for an unknown one, and where it is."""

    mistake: Mistake | None
    where: str
    section: str


class Places:
    """The comparison of the parts of one model.

    Args:
        roles: its weights, and the vectors of one call.
        reference: the paper's formulas with these weights.
        source: the source (B, S) of the call.
        target: the decoder's input (B, T).
        norms: the options of normalisations, as of `subject.norm_options`.
    """

    def __init__(
        self,
        roles: Roles,
        reference: Reference,
        source: Tensor,
        target: Tensor,
        norms: Mapping[str, tuple[Any, ...]],
    ) -> None:
        self.roles = roles
        self.reference = reference
        decoder = roles.sublayers["decoder"]
        if decoder and target.shape[1] not in decoder[0].stream.shape[:-1]:
            target = target[:, :-1]  # the model leaves out the last token itself
        self.ids = {"encoder": source, "decoder": target}
        self.visible = source.ne(reference.pad_token_id)
        products = itertools.product(norms["norm"], norms["epsilon"])
        self.norms = [{"norm": kind, "epsilon": epsilon} for kind, epsilon in products]

    def differences(self) -> Iterator[Difference]:
        """What differs, from the source's embeddings to the decoder's last layer."""
        for stack in STACKS:
            yield from self._embeddings(stack)
            yield from self._layers(stack)

    def _embeddings(self, stack: str) -> Iterator[Difference]:
        sublayers = self.roles.sublayers[stack]
        if not sublayers:
            return
        vectors = self.oriented(sublayers[0].stream, stack)

        def expected(choice: Mapping[str, Any]) -> Tensor:
            if choice.get("inputs") == "shifted inside":
                return self.reference.shifted(self.ids[stack], choice)
            return self.reference.embed(self.ids[stack], stack, choice)

        places = ["embedding scale", "positions"]
        if f"model.{stack}.embedding_norm.weight" in self.reference.weights:
            places.append("embeddings")
        right = [{"positions": option} for option in ALLOWED["positions"]]
        right = [
            choice | norm for choice in right for norm in (self.norms if len(places) == 3 else [{}])
        ]
        if stack == "decoder":
            right += [choice | {"inputs": "shifted inside"} for choice in right]
        mistakes = self._explain(vectors, stack, expected, right, places)
        where = f"the {stack}'s embeddings and positions"
        yield from _as_differences(mistakes, where, "§3.4 and §3.5")

    def _layers(self, stack: str) -> Iterator[Difference]:
        sublayers = self.roles.sublayers[stack]
        roles = (
            ("self_attn", "cross_attn", "final") if stack == "decoder" else ("self_attn", "final")
        )
        for number in sorted({each.number for each in sublayers}):
            present = {each.role for each in sublayers if each.number == number}
            for role in roles:
                if role not in present:
                    yield Difference(
                        _listed("sublayers", f"no {_SUBLAYERS[role]}"),
                        f"{stack} layer {number + 1}",
                        "",
                    )
            order = [each.role for each in sublayers if each.number == number]
            if "final" in order and order[-1] != "final":
                yield Difference(_EARLY_FEED_FORWARD, f"{stack} layer {number + 1}", "")
        if stack == "decoder" and self.roles.is_swapped:
            yield Difference(_listed("sublayers", "cross-attention first"), "the decoder", "")
        for index, sublayer in enumerate(sublayers):
            following = sublayers[index + 1] if index + 1 < len(sublayers) else None
            yield from self._sublayer(stack, sublayer, following)

    def _sublayer(
        self, stack: str, sublayer: Sublayer, following: Sublayer | None
    ) -> Iterator[Difference]:
        at = f"model.{stack}.layers.{sublayer.number}."
        layer = f"{stack} layer {sublayer.number + 1}"
        stream = self.oriented(sublayer.stream, stack)
        x = self.oriented(sublayer.x, stack)
        output = self.oriented(sublayer.output, stack)
        if stream is None or x is None:
            return
        first = self.roles.sublayers[stack][0]
        if (
            sublayer.number > 0
            and sublayer.stream is not first.stream
            and torch.equal(sublayer.stream, first.stream)
        ):
            yield Difference(_OLD_INPUT, layer, "")
            return
        if sublayer.role == "cross_attn" and (option := self._memory(sublayer)) is not None:
            yield Difference(option, layer, "")
        if output is not None:
            mistakes = self._function(stack, sublayer, at, x, output)
            section = "§3.3" if sublayer.role == "final" else "§3.2"
            yield from _as_differences(mistakes, f"{layer}, {ROLE_WORDS[sublayer.role]}", section)
            yield from self._connection(stack, sublayer, following, (stream, x, output))

    def _memory(self, sublayer: Sublayer) -> Mistake | None:
        memory = sublayer.memory
        if memory is None:
            return None
        if sublayer.reads_itself:
            return _listed("memory", "the decoder itself")
        streams = [each.stream for each in self.roles.sublayers["encoder"]]
        for number, stream in enumerate(streams):
            if torch.equal(memory, stream):
                return _INNER_MEMORY if number else _listed("memory", "the embeddings")
        return None

    def _function(
        self, stack: str, sublayer: Sublayer, at: str, x: Tensor, output: Tensor
    ) -> list[Mistake] | None:
        reference = self.reference
        if sublayer.role == "final":
            right: list[dict[str, Any]] = [
                {"activation": option} for option in ALLOWED["activation"]
            ]

            def feed_forward(choice: Mapping[str, Any]) -> Tensor:
                return reference.feed_forward(x, at, choice)

            return self._explain(output, stack, feed_forward, right, ("activation", "feed-forward"))
        crosses = sublayer.role == "cross_attn"
        is_causal = stack == "decoder" and not crosses
        where = "in cross-attention" if crosses else "in the encoder"
        memory = x
        if crosses and sublayer.memory is not None:
            read = self.oriented(sublayer.memory, "decoder" if sublayer.reads_itself else "encoder")
            memory = x if read is None else read

        def attention(choice: Mapping[str, Any]) -> Tensor:
            mask = reference.causal_mask(x.shape[1], choice)
            if not is_causal:
                mask = self.visible[:, None, None]
                option = choice.get("padding")
                mask = {"ignored": torch.ones_like(mask), "inverted": ~mask}.get(str(option), mask)
                if choice.get("causality") == where:
                    mask = mask & reference.causal_mask(x.shape[1], {})
            if crosses and sublayer.reads_itself:
                mask = torch.ones(1, dtype=torch.bool)
            return reference.attention(x, memory, mask, f"{at}{sublayer.role}.", choice)

        right = [{"heads": option} for option in ALLOWED["heads"]]
        masks = ("causal mask",) if is_causal else ("padding", "causality")
        places = (*_IN_ATTENTION, *masks)
        return self._explain(output, stack, attention, right, places)

    def _connection(
        self,
        stack: str,
        sublayer: Sublayer,
        following: Sublayer | None,
        vectors: tuple[Tensor, Tensor, Tensor],
    ) -> Iterator[Difference]:
        """Compare the residual connection and the normalisations around a sublayer."""
        stream, x, output = vectors
        at = f"model.{stack}.layers.{sublayer.number}."
        place = f"{at}{sublayer.role}_layer_norm"
        reference = self.reference
        layer = f"{stack} layer {sublayer.number + 1}"
        where = f"{layer}, {ROLE_WORDS[sublayer.role]}"
        unknown = (
            f"{layer}, the residual connection or normalisation of {ROLE_WORDS[sublayer.role]}"
        )
        has_norm = f"{place}.weight" in reference.weights
        if self.roles.is_pre and has_norm:
            mistakes = self._explain(
                x,
                stack,
                lambda choice: reference.norm(stream, place, choice),
                self.norms,
                ("norm", "epsilon"),
            )
            yield from _as_differences(mistakes, where, "§3.1", unknown)
        after = following.stream if following is not None else self.roles.flow.get(stack)
        after = None if after is None else self.oriented(after, stack)
        if after is None:
            return

        def expected(choice: Mapping[str, Any]) -> Tensor:
            options = {"none": torch.zeros(()), "of the norm": x}
            residual = options.get(str(choice.get("residual")), stream)
            if self.roles.is_pre:
                total = residual + output
            elif choice.get("residual") == "outside the norm":
                total = stream + reference.norm(output, place, choice)
            else:
                total = reference.norm(residual + output, place, choice)
            return total if following is not None else reference.final_norm(total, stack, choice)

        if not self.roles.is_pre and not has_norm:
            yield Difference(_listed("norm", "none"), where, "§3.1")
            return
        places = ["residual"]
        if not self.roles.is_pre:
            places += ["norm", "epsilon"]
        if following is None:
            places.append("final norm")
        mistakes = self._explain(after, stack, expected, self.norms, places)
        if mistakes is None and following is None and self._is_computed(stack, expected):
            yield Difference(_CHANGED[stack], "", "")
            return
        yield from _as_differences(mistakes, where, "§3.1", unknown)

    def _is_computed(self, stack: str, expected: Callable[[Mapping[str, Any]], Tensor]) -> bool:
        """True if the right output of a stack is among the vectors after it, so that its reader is wrong."""
        vectors = [self.oriented(each, stack) for each in self.roles.after[stack]]
        return any(
            self._is_close(each, stack, expected, choice)
            for each in vectors
            if each is not None
            for choice in self.norms
        )

    def _explain(
        self,
        numbers: Tensor | None,
        stack: str,
        expected: Callable[[Mapping[str, Any]], Tensor],
        right: Sequence[Mapping[str, Any]],
        places: Collection[str],
    ) -> list[Mistake] | None:
        """The mistakes at these places, at most one at each, that give the numbers. None if no such mistakes do."""
        if numbers is None:
            return []
        listed = [[each for each in MISTAKES if each.place == place] for place in places]
        for count in range(min(len(listed), 2) + 1):
            for group in itertools.combinations(listed, count):
                for mistakes in itertools.product(*group):
                    options = {each.place: each.option for each in mistakes}
                    if any(
                        self._is_close(numbers, stack, expected, {**choice, **options})
                        for choice in right
                    ):
                        return list(mistakes)
        return None

    def _is_close(
        self,
        numbers: Tensor,
        stack: str,
        expected: Callable[[Mapping[str, Any]], Tensor],
        choice: Mapping[str, Any],
    ) -> bool:
        try:
            other = expected(choice)
        # Shapes that this mistake does not allow, or a part that the model lacks.
        except (RuntimeError, KeyError):
            return False
        if other.shape != numbers.shape:
            return False
        difference = (numbers - other).abs()
        if stack == "encoder" and difference.shape[:2] == self.visible.shape:
            difference = difference[self.visible]  # vectors of padding do not matter
            numbers = numbers[self.visible]
        return float(difference.max()) < TOLERANCE * max(1.0, float(numbers.abs().max()))

    def oriented(self, vectors: Tensor, stack: str) -> Tensor | None:
        """Vectors as (B, T, D), if they are a sentence's."""
        batch, length = self.ids[stack].shape
        if vectors.ndim == 3 and vectors.shape[:2] == (batch, length):
            return vectors
        if vectors.ndim == 3 and vectors.shape[:2] == (length, batch):
            return vectors.transpose(0, 1)
        if vectors.ndim == 2 and len(vectors) == batch * length:
            return vectors.view(batch, length, -1)
        return None


_OLD_INPUT = Mistake(
    "layers",
    "§3.1",
    "old input",
    "the layer reads the embeddings, not the output of the layer before",
)


_INNER_MEMORY = Mistake(
    "memory",
    "§3.2.3",
    "inner",
    "cross-attention reads an inner layer of the encoder, not the encoder's output",
)


_EARLY_FEED_FORWARD = Mistake(
    "sublayers",
    "§3.1",
    "feed-forward early",
    "the feed-forward network is not the last sublayer",
)
# Stack -> the mistake of what reads its output.
_CHANGED = {
    "encoder": Mistake(
        "memory",
        "§3.2.3",
        "changed",
        "the encoder's output is right, and cross-attention in the decoder reads other vectors",
    ),
    "decoder": Mistake(
        "output layer",
        "§3.4",
        "changed",
        "the decoder's output is right, and the output layer reads other vectors",
    ),
}


def _listed(place: str, option: str) -> Mistake:
    return next(each for each in MISTAKES if (each.place, each.option) == (place, option))


def _as_differences(
    mistakes: list[Mistake] | None, where: str, section: str, unknown: str = ""
) -> Iterator[Difference]:
    if mistakes is None:
        yield Difference(None, unknown or where, section)
    for mistake in mistakes or ():
        yield Difference(mistake, where, section)


def local_mistakes(differences: Sequence[Difference]) -> list[Mistake]:
    """The mistakes of `Places.differences`, each once with all its places."""
    wheres: dict[Mistake, list[str]] = {}
    found: list[Mistake] = []
    for mistake, where, section in differences:
        if mistake is None:
            found.append(UNKNOWN._replace(place=where, section=section))
        elif mistake in wheres:
            wheres[mistake].append(where)
        else:
            wheres[mistake] = [where]
            found.append(mistake)
    located = []
    for mistake in found:
        if places := [each for each in wheres.get(mistake, ()) if each]:
            listed = "; ".join(dict.fromkeys(places[:4]))
            more = f"; and {len(places) - 4} more" if len(places) > 4 else ""
            mistake = mistake._replace(explanation=f"{mistake.explanation}, in {listed}{more}")
        located.append(mistake)
    return located
