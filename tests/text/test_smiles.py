"""SMILES: canonical forms, and spellings that are the same molecules."""

from difflib import SequenceMatcher
from random import Random

import pytest

Chem = pytest.importorskip("rdkit.Chem", reason="needs the extra `chemistry`")

from hf_vanilla_transformer.text.smiles import aligned, canonical, looks_kekule, random_root  # noqa: E402

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


def spellings_of(smiles: str) -> list[str]:
    """Spellings of a molecule: Kekulé's, one with atom numbers, one from another atom and one in a random order."""
    kekule, numbered, plain = (Chem.MolFromSmiles(smiles) for _ in range(3))
    Chem.Kekulize(kekule, clearAromaticFlags=True)
    for atom in numbered.GetAtoms():
        atom.SetAtomMapNum(atom.GetIdx() * 7 % 100 + 1)
    return [
        Chem.MolToSmiles(kekule, kekuleSmiles=True),
        Chem.MolToSmiles(numbered),
        Chem.MolToSmiles(plain, rootedAtAtom=plain.GetNumAtoms() - 1),
        Chem.MolToSmiles(plain, doRandom=True),
    ]


def test_all_spellings_of_a_molecule_have_one_canonical_form():
    for smiles in (side for pair in REACTIONS for side in pair):
        spelled = spellings_of(smiles)
        assert len({smiles, *spelled}) > 2
        assert {canonical(each) for each in spelled} == {Chem.CanonSmiles(smiles)}
    assert canonical("[CH3:1][C@H:2]([NH2:3])[C:4](=[O:5])[OH:6]") == Chem.CanonSmiles(
        "C[C@H](N)C(=O)O"
    )


@pytest.mark.parametrize(
    "smiles", ["CCCC[Sn](CCCC)(CCCC)c1ccccn1", "C[Mg]Br", "[Li]C", "C[Zn]C", "[CH2]C[Sn](C)(C)C"]
)
def test_atoms_next_to_metals_have_no_brackets_if_the_molecule_is_the_same(smiles):
    form = canonical(smiles)
    assert Chem.MolToInchi(Chem.MolFromSmiles(form)) == Chem.MolToInchi(Chem.MolFromSmiles(smiles))
    assert canonical(form) == form
    if "[CH2]" not in smiles:  # a radical
        assert not any(bracket in form for bracket in ("[C", "[c", "[Br"))


def test_kekule_spelling_is_seen_without_rdkit():
    for smiles in (
        "c1ccccc1",
        "CC(=O)Oc1ccccc1C(=O)O",
        "COc1cc2ncnc(Nc3ccc(F)c(Cl)c3)c2cc1OCCCN1CCOCC1",
    ):
        assert looks_kekule(spellings_of(smiles)[0]) and not looks_kekule(smiles)
    for smiles in ("C=CC=CC=CC1CC1", "O=C1C=CC(=O)C=C1", "C1CCCCC1", "[Na+].[Cl-]", ""):
        assert not looks_kekule(smiles)


def test_random_roots_are_spellings_of_the_same_molecules():
    for source, target in REACTIONS:
        spelled = {random_root(source, target, Random(seed)) for seed in range(10)}
        assert len(spelled) > 5
        assert all(
            same_molecules(one, source) and same_molecules(other, target) for one, other in spelled
        )
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
