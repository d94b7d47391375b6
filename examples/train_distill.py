"""Distills the ResNet of train_vision.py into a network with a quarter of its parameters, in Flax Linen.

python examples/train_distill.py --out /tmp/run --devices 8                # student: 98.1%, teacher: 99.4%
python examples/train_distill.py --out /tmp/labels --devices 8 --soft 0    # the same student with labels: 98.1%

The student sees no label: it learns from the probabilities of the teacher. `--soft 0.5` gives it both.
Teacher and student are two parts of one tree of variables. The teacher is frozen: it is sharded and gathered like the
student, but has neither gradients nor optimizer state, and its BatchNorm statistics stay as they are. It is trained
first, into DIR/teacher, or taken from a run of train_vision.py with --teacher.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
from typing import Any

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import train_vision

import zerojax
from zerojax import processes

TEMPERATURE = 1.0
TEACHER = train_vision.MODELS["resnet"]


class Student(nn.Module):
    width: int = 64

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(self.width // 4, (3, 3), strides=2)(images))
        x = nn.relu(nn.Dense(self.width)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


STUDENT = Student()


def trained_teacher(args: argparse.Namespace) -> Any:
    """The variables of a ResNet on the host. It is trained here, unless its run is complete."""
    folder = args.teacher or args.out / "teacher"
    options = ["--out", str(folder), "--steps", str(args.teacher_steps), "--stage", str(args.stage), "--resume"]
    teacher_args = train_vision.parse(options)
    train_vision.train(teacher_args)
    pieces, zero = train_vision.job(teacher_args), zerojax.Zero(zerojax.make_mesh(), args.stage)
    with zero.checkpoints(folder / "checkpoints") as checkpoints:
        state, _ = checkpoints.resume(zero.init(pieces.model, pieces.optimizer))
    return jax.tree.map(np.asarray, state.model())


def model_of(teacher: Any) -> dict[str, Any]:
    """One tree of variables. The student has parameters only."""
    student = STUDENT.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))
    return {
        "params": {"teacher": teacher["params"], "student": student["params"]},
        "batch_stats": {"teacher": teacher["batch_stats"]},
    }


def logits_of_teacher(variables: Any, images: jax.Array) -> jax.Array:
    own = {name: variables[name]["teacher"] for name in ("params", "batch_stats")}
    return TEACHER.apply(own, images, train=False)


def logits_of_student(variables: Any, images: jax.Array) -> jax.Array:
    return STUDENT.apply({"params": variables["params"]["student"]}, images)


def loss_fn(soft: float, variables: Any, batch: dict[str, jax.Array], key: jax.Array) -> Any:
    """Cross entropy with the teacher's softened probabilities, and with the labels (arXiv 1503.02531)."""
    images = train_vision.shifted(batch["images"], key)
    logits, of_teacher = logits_of_student(variables, images), logits_of_teacher(variables, images)
    hard = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
    probabilities = jax.nn.softmax(of_teacher / TEMPERATURE)
    softened = TEMPERATURE**2 * optax.softmax_cross_entropy(logits / TEMPERATURE, probabilities).mean()
    agreement = jnp.mean(logits.argmax(-1) == of_teacher.argmax(-1))
    return (1 - soft) * hard + soft * softened, {"agreement": agreement}


def test_loss_fn(variables: Any, batch: dict[str, jax.Array]) -> Any:
    logits, labels = logits_of_student(variables, batch["images"]), batch["labels"]
    right = lambda logits: jnp.mean(logits.argmax(-1) == labels)
    metrics = {"accuracy": right(logits), "teacher_accuracy": right(logits_of_teacher(variables, batch["images"]))}
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), metrics


def job(args: argparse.Namespace) -> common.Job:
    data, test = train_vision.load()
    schedule = optax.warmup_cosine_decay_schedule(0, 1e-2, args.steps // 10, args.steps)
    return common.Job(
        model=model_of(trained_teacher(args)),
        loss_fn=functools.partial(loss_fn, args.soft),
        optimizer=optax.adamw(schedule),
        batch=functools.partial(train_vision.batch, data, args.batch),
        zero_options={"frozen": ["teacher/*"]},
        test_loss_fn=test_loss_fn,
        test=test,
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = common.parser(__doc__, steps=300)
    add = parser.add_argument
    add("--batch", type=int, default=128, metavar="N", help="images per step (default: 128)")
    add("--soft", type=float, default=1.0, metavar="X", help="weight of the teacher; 0: only labels (default: 1)")
    add("--teacher", type=pathlib.Path, metavar="DIR", help="a run of train_vision.py (default: DIR/teacher)")
    add("--teacher-steps", type=int, default=300, metavar="N", help="its steps (default: 300)")
    return parser.parse_args(arguments)


def train(args: argparse.Namespace) -> dict[str, float]:
    """Trains, or continues to, and returns the loss and the accuracies on the test set."""
    common.start(args)
    pieces, rows = job(args), processes.own_rows(args.batch)
    zero = zerojax.Zero(zerojax.make_mesh(), args.stage, args.precision, **pieces.zero_options)
    state, evaluate = zero.init(pieces.model, pieces.optimizer), common.tester(zero, pieces)
    state = zerojax.fit(
        zero,
        state,
        zero.train_step(pieces.loss_fn, remat=args.remat),
        lambda i: jax.tree.map(lambda a: a[rows], pieces.batch(i)),
        args.steps,
        args.out,
        evaluate=evaluate,
        evaluate_every=100,
        config={"batch": args.batch, "soft": args.soft, "steps": args.steps},
        checkpoints={"every": 50},
    )
    return evaluate(state)


def main() -> None:
    result = train(parse())
    print(f"test set of 359 images: student {result['accuracy']:.1%}, teacher {result['teacher_accuracy']:.1%}")


if __name__ == "__main__":
    main()
