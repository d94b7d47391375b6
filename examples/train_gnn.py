"""Trains a graph network in Flax NNX that predicts how well molecules dissolve in water.

python examples/train_gnn.py --out /tmp/run --devices 8            # error 0.65; of the mean of the training set: 2.02

The 1282 molecules, with their measured solubility as log10(mol/l), come with datamol, split into 1025 to train on and
257 to test. A row of a batch is a pack of as many whole molecules as fit into a fixed number of atoms and bonds. Packs
have different numbers of molecules, so the loss is a `zerojax.Weighted`: the mean over the molecules of all devices.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import common
import datamol
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zerojax
from zerojax import processes

MOST_ATOMS, MOST_BONDS, MOST_MOLECULES = 96, 208, 16  # of a pack; a bond counts twice, once in each direction
ELEMENTS = ("C", "O", "N", "Cl", "S", "F", "Br", "I", "P")


class Molecule(NamedTuple):
    atoms: np.ndarray  # [atoms, features]
    bonds: np.ndarray  # [bonds, features]
    senders: np.ndarray  # [bonds]
    receivers: np.ndarray  # [bonds]
    solubility: float


def one_hot(value: Any, values: Iterable[Any]) -> list[bool]:
    return [value == each for each in values]


def molecule_of(mol: Any, solubility: float) -> Molecule:
    """The graph of a molecule of RDKit."""
    atoms = [
        [
            *one_hot(atom.GetSymbol(), ELEMENTS),
            *one_hot(atom.GetTotalNumHs(), range(4)),
            *one_hot(atom.GetDegree(), range(1, 5)),
            atom.GetFormalCharge(),
            atom.GetIsAromatic(),
            atom.IsInRing(),
        ]
        for atom in mol.GetAtoms()
    ]
    kinds = datamol.SINGLE_BOND, datamol.DOUBLE_BOND, datamol.TRIPLE_BOND, datamol.AROMATIC_BOND
    bonds = [[*one_hot(bond.GetBondType(), kinds), bond.GetIsConjugated(), bond.IsInRing()] for bond in mol.GetBonds()]
    ends = np.array([(bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()) for bond in mol.GetBonds()], np.int32)
    ends, features = ends.reshape(-1, 2), np.array(bonds, np.float32).reshape(-1, 6)
    senders, receivers = np.concatenate([ends, ends[:, ::-1]]).T
    return Molecule(np.array(atoms, np.float32), np.concatenate([features, features]), senders, receivers, solubility)


@functools.cache
def load() -> tuple[list[Molecule], list[Molecule]]:
    """(training set, test set)."""
    table = datamol.data.solubility()
    split: dict[str, list[Molecule]] = {"train": [], "test": []}
    for mol, solubility, part in zip(table["mol"], table["SOL"], table["split"], strict=True):
        split[part].append(molecule_of(mol, float(solubility)))
    return split["train"], split["test"]


def pack(molecules: list[Molecule]) -> dict[str, np.ndarray]:
    """Molecules side by side in one graph. Padding is atoms of no molecule, and bonds from the last atom to itself."""
    features = {"atoms": (MOST_ATOMS, molecules[0].atoms.shape[1]), "bonds": (MOST_BONDS, molecules[0].bonds.shape[1])}
    result = {name: np.zeros(shape, np.float32) for name, shape in features.items()}
    result |= {name: np.full(MOST_BONDS, MOST_ATOMS - 1, np.int32) for name in ("senders", "receivers")}
    result["molecule_of_atom"] = np.full(MOST_ATOMS, MOST_MOLECULES, np.int32)
    result |= {name: np.zeros(MOST_MOLECULES, np.float32) for name in ("solubility", "molecule_weights")}
    atom = bond = 0
    for i, each in enumerate(molecules):
        atoms, bonds = slice(atom, atom + len(each.atoms)), slice(bond, bond + len(each.bonds))
        result["atoms"][atoms], result["bonds"][bonds] = each.atoms, each.bonds
        result["senders"][bonds], result["receivers"][bonds] = each.senders + atom, each.receivers + atom
        result["molecule_of_atom"][atoms] = i
        result["solubility"][i], result["molecule_weights"][i] = each.solubility, 1
        atom, bond = atoms.stop, bonds.stop
    return result


def packs(molecules: Iterable[Molecule]) -> Iterator[dict[str, np.ndarray]]:
    """Packs of the molecules, in their order. The last atom of a pack is always padding."""
    chosen: list[Molecule] = []
    num_atoms = num_bonds = 0
    for each in molecules:
        num_atoms, num_bonds = num_atoms + len(each.atoms), num_bonds + len(each.bonds)
        if num_atoms >= MOST_ATOMS or num_bonds > MOST_BONDS or len(chosen) == MOST_MOLECULES:
            yield pack(chosen)
            chosen, num_atoms, num_bonds = [], len(each.atoms), len(each.bonds)
        chosen.append(each)
    if chosen:
        yield pack(chosen)


def stacked(packs: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return jax.tree.map(lambda *arrays: np.stack(arrays), *packs)


def batch(molecules: list[Molecule], rows: int, i: int) -> dict[str, np.ndarray]:
    """The batch of step i + 1: packs of molecules that are drawn without replacement."""
    order = np.random.default_rng(i).permutation(len(molecules))
    filled = packs(molecules[k] for k in order)
    return stacked(next(filled) for _ in range(rows))


class Layer(nnx.Module):
    """Each atom adds up messages of its neighbours, which depend on the neighbour and on the bond."""

    def __init__(self, width: int, bond_features: int, *, rngs: nnx.Rngs):
        self.bond = nnx.Linear(bond_features, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, pack: dict[str, jax.Array]) -> jax.Array:
        messages = nnx.relu(x[pack["senders"]] + self.bond(pack["bonds"]))
        received = jax.ops.segment_sum(messages, pack["receivers"], len(x))
        return x + self.down(nnx.relu(self.up(self.norm(x + received))))


class Model(nnx.Module):
    def __init__(self, width: int, layers: int, *, rngs: nnx.Rngs):
        atom_features, bond_features = (array.shape[1] for array in load()[0][0][:2])
        self.atom = nnx.Linear(atom_features, width, rngs=rngs)
        self.layers = nnx.List([Layer(width, bond_features, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.hidden = nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, 1, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, pack: dict[str, jax.Array]) -> jax.Array:
        """The solubility of each molecule of one pack. It adds up over atoms."""
        x = self.atom(pack["atoms"])
        for layer in self.layers:
            x = layer(x, pack)
        of_atoms = self.out(nnx.relu(self.hidden(self.norm(x))))[:, 0]
        return jax.ops.segment_sum(of_atoms, pack["molecule_of_atom"], MOST_MOLECULES + 1)[:-1]


def errors(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    """Prediction minus measurement, for [packs, molecules]."""
    names = "atoms", "bonds", "senders", "receivers", "molecule_of_atom"
    predicted = jax.vmap(model)({name: batch[name] for name in names})
    return predicted.astype(jnp.float32) - batch["solubility"]


def loss_fn(model: Model, batch: dict[str, jax.Array]) -> tuple[zerojax.Weighted, dict[str, Any]]:
    weights = batch["molecule_weights"]
    losses = optax.huber_loss(errors(model, batch), delta=1.0)
    num_molecules = jnp.sum(weights)
    return zerojax.Weighted(jnp.sum(weights * losses), num_molecules), {"molecules": zerojax.Weighted(num_molecules, 0)}


def test_loss_fn(model: Model, batch: dict[str, jax.Array]) -> tuple[zerojax.Weighted, dict[str, Any]]:
    weights, error = batch["molecule_weights"], errors(model, batch)
    mean = lambda values: zerojax.Weighted(jnp.sum(weights * values), jnp.sum(weights))
    return mean(error**2), {"absolute_error": mean(jnp.abs(error))}


def mean_predictor_error() -> float:
    """The root mean square error, on the test set, of predicting the mean of the training set."""
    mean = np.mean([each.solubility for each in load()[0]])
    return float(np.sqrt(np.mean([(each.solubility - mean) ** 2 for each in load()[1]])))


def job(args: argparse.Namespace) -> common.Job:
    molecules, test = load()
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, args.steps // 10, args.steps)
    return common.Job(
        model=functools.partial(Model, args.width, args.layers),
        loss_fn=loss_fn,
        optimizer=optax.adamw(schedule, weight_decay=1e-2),
        batch=functools.partial(batch, molecules, args.packs),
        step_options={"clip_norm": 1.0},
        test_loss_fn=test_loss_fn,
        test=stacked(packs(test)),
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = common.parser(__doc__, steps=400)
    parser.add_argument("--packs", type=int, default=16, metavar="N", help="rows of a batch (default: 16)")
    parser.add_argument("--width", type=int, default=64, metavar="N", help="width of the model (default: 64)")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="rounds of messages (default: 4)")
    return parser.parse_args(arguments)


def train(args: argparse.Namespace) -> dict[str, float]:
    """Trains, or continues to, and returns the errors on the test set, as log10(mol/l)."""
    common.start(args)
    pieces, rows = job(args), processes.own_rows(args.packs)
    zero = zerojax.Zero(zerojax.make_mesh(), args.stage, args.precision)
    state, test = zero.init(pieces.model, pieces.optimizer), common.tester(zero, pieces)

    def evaluate(state: zerojax.TrainState) -> dict[str, float]:
        metrics = test(state)
        return metrics | {"error": math.sqrt(metrics["loss"])}

    state = zerojax.fit(
        zero,
        state,
        zero.train_step(pieces.loss_fn, remat=args.remat, **pieces.step_options),
        lambda i: jax.tree.map(lambda a: a[rows], pieces.batch(i)),
        args.steps,
        args.out,
        evaluate=evaluate,
        evaluate_every=100,
        config={"packs": args.packs, "width": args.width, "layers": args.layers},
        checkpoints={"every": 50},
    )
    return evaluate(state)


def main() -> None:
    result = train(parse())
    print(f"{len(load()[1])} test molecules, root mean square error of log10(mol/l): {result['error']:.2f}")
    print(f"of the mean of the training set: {mean_predictor_error():.2f}")


if __name__ == "__main__":
    main()
