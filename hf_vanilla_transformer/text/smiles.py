"""SMILES of molecules and reactions, with RDKit: one canonical form, and spellings for `train --rewrite`."""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from random import Random
from typing import Any

from ..utils.errors import naming_extras

# An atom of the organic subset, which needs no brackets.
_BRACKETS = re.compile(r"\[(Br|Cl|[BCNOPSFI]|[cnops](?!H))(?:H\d?)?\]")
_ANY_BRACKETS = re.compile(r"\[[^\]]*\]")
_RING = re.compile(r"(?=(\d)(.*?)\1)")
_DOUBLE_BOND = re.compile(r"=[CN*]")
_RADIUS = 8  # bonds around an atom that its environment covers


def canonical(smiles: str) -> str:
    """The canonical SMILES, by which two spellings of a molecule are equal. Atom numbers (`[CH3:1]`) are left out.

    Raises:
        ValueError: the text is no SMILES.
    """
    write = _rdkit().MolToSmiles
    molecule = _molecule(smiles)
    if any(atom.GetAtomMapNum() for atom in molecule.GetAtoms()):
        for atom in molecule.GetAtoms():
            atom.SetAtomMapNum(0)
        molecule = _molecule(write(molecule))  # the numbers took part in the order of the atoms
    spelled: str = write(molecule)
    # Some versions of RDKit put atoms next to a metal into brackets: [CH3][Sn]. Training text has none of these.
    plain = _BRACKETS.sub(r"\1", spelled)
    return plain if plain == spelled or write(_molecule(plain)) == spelled else spelled


def looks_kekule(smiles: str) -> bool:
    """Return whether a SMILES looks like Kekulé's spelling, which canonical SMILES do not have: `C1=CC=CC=C1`.

    That is three double bonds within a ring, and no aromatic atom. It needs no RDKit, and takes some trienes for one.
    """
    atoms = _ANY_BRACKETS.sub("*", smiles)
    if re.search("[bcnops]", atoms):
        return False
    return any(len(_DOUBLE_BOND.findall(ring[2])) >= 3 for ring in _RING.finditer(atoms))


def random_root(source: str, target: str, draw: Random) -> tuple[str, str]:
    """Spell the source starting at a random atom, and the target with its atoms in the order of the source.

    Source: Zhong et al. 2022 (arXiv 2203.11444), whose targets share the first atom only.
    """
    product = _molecule(source)
    root = draw.randrange(product.GetNumAtoms())
    spelled: str = _rdkit().MolToSmiles(product, rootedAtAtom=root)
    private = product.GetPropsAsDict(includePrivate=True, includeComputed=True)
    return spelled, _in_order_of(source, target, private["_smilesAtomOutputOrder"])


def aligned(source: str, target: str, draw: Random) -> tuple[str, str]:
    """Spell the target with its atoms in the order of the source, which stays as it is.

    Most atoms of a product are in its reactants too. If both are spelt in the same order, a model need not learn
    another order of the same atoms. `draw` is not used: the spelling is the same in every epoch.

    Source: root alignment, Zhong et al. 2022 (arXiv 2203.11444). Here the order of all common atoms is aligned, and
    the atoms are found by their environments, because the text has no atom numbers.
    """
    return source, _aligned(source, target)


@lru_cache(maxsize=200_000)  # the pairs of a corpus, again in every epoch
def _aligned(source: str, target: str) -> str:
    return _in_order_of(source, target, range(_molecule(source).GetNumAtoms()))


def _in_order_of(source: str, target: str, atoms: Iterable[int]) -> str:
    """Return the target, spelt so that the atoms it shares with the source follow the source's order.

    Args:
        atoms: numbers of the source's atoms, in the order in which its text has them.
    """
    partners = _partners(source, target)
    reactants = _molecule(target)
    first = [partner for atom in atoms if (partner := partners[atom]) is not None]
    place = {atom: number for number, atom in enumerate(first)}
    others = [atom for atom in range(reactants.GetNumAtoms()) if atom not in place]

    def nearest(atom: int) -> int:
        neighbours = reactants.GetAtomWithIdx(atom).GetNeighbors()
        return min(
            (place[each.GetIdx()] for each in neighbours if each.GetIdx() in place),
            default=len(place),
        )

    order = [*first, *sorted(others, key=nearest)]
    spelled = _rdkit().MolToSmiles(_rdkit().RenumberAtoms(reactants, order), canonical=False)
    return spelled if canonical(spelled) == canonical(target) else target


@lru_cache(maxsize=200_000)
def _partners(source: str, target: str) -> tuple[int | None, ...]:
    """Return the number of the target's atom that each atom of the source comes from, None if there is none."""
    product = _molecule(source)
    common = _common_atoms(product, _molecule(target))
    return tuple(common.get(atom) for atom in range(product.GetNumAtoms()))


def _common_atoms(product: Any, reactants: Any) -> dict[int, int]:
    """The atoms of `reactants` that the atoms of `product` come from, by number.

    Atoms with the same environment are paired, the largest environments first, and then their neighbours.
    """
    of_product = _environments(product)
    of_reactants = _environments(reactants)
    pairs: dict[int, int] = {}
    taken: set[int] = set()

    def agreement(atom: int, other: int) -> int:
        """The largest radius at which two atoms have the same environment."""
        radius = 0
        while radius < _RADIUS and of_product[radius + 1][atom] == of_reactants[radius + 1][other]:
            radius += 1
        return radius

    def pair(atom: int, other: int) -> None:
        pairs[atom] = other
        taken.add(other)
        stack.append((atom, other))

    stack: list[tuple[int, int]] = []
    for radius in range(_RADIUS, 0, -1):
        for atom, environment in enumerate(of_product[radius]):
            if atom in pairs:
                continue
            for other, its in enumerate(of_reactants[radius]):
                if its == environment and other not in taken:
                    pair(atom, other)
                    break
            while stack:  # and the neighbours that are the same element
                left, right = stack.pop()
                for neighbour in _neighbours(product, left):
                    if neighbour in pairs:
                        continue
                    free = [
                        each
                        for each in _neighbours(reactants, right)
                        if each not in taken and of_product[0][neighbour] == of_reactants[0][each]
                    ]
                    if free:
                        pair(neighbour, max(free, key=partial(agreement, neighbour)))
    return pairs


def _environments(molecule: Any) -> list[list[int]]:
    """A hash of each atom's environment, by radius in bonds and atom, to compare within this process."""
    atoms = list(molecule.GetAtoms())
    last = [
        hash((atom.GetSymbol(), atom.GetFormalCharge(), atom.GetIsAromatic())) for atom in atoms
    ]
    rows = [last]
    for _ in range(_RADIUS):
        row = []
        for number, atom in enumerate(atoms):
            around = sorted(
                (bond.GetBondTypeAsDouble(), last[bond.GetOtherAtomIdx(number)])
                for bond in atom.GetBonds()
            )
            row.append(hash((last[number], *around)))
        rows.append(row)
        last = row
    return rows


def _neighbours(molecule: Any, atom: int) -> Iterator[int]:
    return (each.GetIdx() for each in molecule.GetAtomWithIdx(atom).GetNeighbors())


def _molecule(smiles: str) -> Any:
    chem = _rdkit()
    molecule = chem.MolFromSmiles(smiles)
    if molecule is None or not molecule.GetNumAtoms():
        raise ValueError(f"{smiles!r} is no SMILES")
    return molecule


def _rdkit() -> Any:
    """RDKit's module, without its log of invalid SMILES."""
    with naming_extras():
        from rdkit import Chem, RDLogger
    RDLogger.DisableLog("rdApp.*")  # type: ignore[attr-defined]
    return Chem
