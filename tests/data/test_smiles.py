"""SMILES: canonical forms, and spellings that are the same molecules."""

from difflib import SequenceMatcher
from random import Random

import pytest

Chem = pytest.importorskip("rdkit.Chem", reason="needs the extra `chemistry`")

from hf_vanilla_transformer.data.smiles import aligned, canonical, random_root  # noqa: E402

#: products and reactants as in the literature of esterification, amidation and reduction
REACTIONS = [
    ("CC(=O)Oc1ccccc1C(=O)O", "CC(=O)OC(C)=O.O=C(O)c1ccccc1O"),
    ("CC(=O)Nc1ccc(O)cc1", "CC(=O)OC(C)=O.Nc1ccc(O)cc1"),
    ("O=C(O)/C=C/c1cnc(Cl)c(Cl)c1", "COC(=O)/C=C/c1cnc(Cl)c(Cl)c1"),
    ("C[C@H](N)C(=O)NCc1ccccc1", "C[C@H](NC(=O)OC(C)(C)C)C(=O)NCc1ccccc1"),
    ("COC(=O)COc1cccc2c1CCCCN2CCO", "COC(=O)CBr.OCCN1CCCCc2c(O)cccc21"),
]


def same_molecules(text: str, other: str) -> bool:
    """Whether two texts are the same molecules, by RDKit."""
    return Chem.CanonSmiles(text) == Chem.CanonSmiles(other)


def test_canonical_form_is_that_of_rdkit():
    for smiles in (side for pair in REACTIONS for side in pair):
        assert canonical(smiles) == Chem.CanonSmiles(smiles)
    for wrong in ("", "C(", "not a molecule", "c1ccc"):
        with pytest.raises(ValueError):
            canonical(wrong)


def test_random_roots_are_spellings_of_the_same_molecules():
    for source, target in REACTIONS:
        spelled = {random_root(source, target, Random(seed)) for seed in range(10)}
        assert len(spelled) > 5
        assert all(same_molecules(one, source) and same_molecules(other, target) for one, other in spelled)
        assert random_root(source, target, Random(3)) == random_root(source, target, Random(3))


def test_aligned_targets_follow_the_source():
    before = after = 0.0
    for source, target in REACTIONS:
        kept, spelled = aligned(source, target, Random(0))
        assert kept == source
        assert same_molecules(spelled, target)
        before += SequenceMatcher(None, source, target, autojunk=False).ratio()
        after += SequenceMatcher(None, source, spelled, autojunk=False).ratio()
    assert after > before
    assert aligned(*REACTIONS[2], Random(0))[1] == "O=C(OC)/C=C/c1cnc(Cl)c(Cl)c1"
