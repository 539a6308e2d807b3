"""Trains with JAX and Flax: a classifier on images without a copy, and a language model compiled once.

`Loader(array_type="jax")` delivers images as JAX arrays over the loader's memory, through DLPack. JAX
compiles again for every new shape, so images are padded to a fixed number, and `fixed:N` pads every
microbatch to the same number of tokens. A mask separates the samples of a microbatch.
"""

import dflop
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

DIRECTORY, COMPILED, IMAGES, SIDE, TOKENS, WIDTH = dflop.example.directory(), [], 32, 16, 1024, 32


class LanguageModel(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(640, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 640, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)

    def __call__(self, ids, positions):
        sample = jnp.cumsum(positions == 0, axis=-1)  # positions start from 0 with every sample
        mask = nnx.make_causal_mask(ids) * (sample[:, None, :, None] == sample[:, None, None, :])
        rows = self.embed(ids)
        return self.head(rows + self.attend(rows, mask=mask))


@nnx.jit
def update(model, optimizer, inputs, labels, weights):
    COMPILED.append(labels.shape)  # runs where JAX traces, not where it computes
    losses = lambda model: optax.softmax_cross_entropy_with_integer_labels(model(*inputs), labels)
    loss, gradients = nnx.value_and_grad(lambda model: (losses(model) * weights).sum())(model)
    optimizer.update(model, gradients)
    return loss


def images():
    settings = {"batch_size": 16, "read": dflop.Read(fields=["images", "cls"]), "array_type": "jax"}
    for batch in dflop.Loader(DIRECTORY / "shards", image=dflop.Image(size=SIDE), **settings):
        labels = np.repeat([int(name) for name in batch["cls"]], np.diff(batch.image_rows)[:, 0])
        missing = IMAGES - len(labels)
        padded = jnp.pad(batch["image"], [(0, missing)] + 3 * [(0, 0)]).reshape(IMAGES, -1)
        yield (padded,), np.pad(labels, (0, missing)), (np.arange(IMAGES) < len(labels)) / len(labels)


def texts():
    ds = dflop.Dataset(DIRECTORY / "shards")
    processor = dflop.Processor(length_buckets=f"fixed:{TOKENS}", dtype="none")
    settings = {"global_batch_size": 6, "steps": 12, "processor": processor, "array_type": "jax"}
    for step in dflop.BalancedLoader(ds, model=DIRECTORY / "model", **settings):
        (mb,) = step.microbatches
        labels = jnp.roll(mb["labels"], -1, axis=1)
        yield (mb["input_ids"], mb["position_ids"][0]), jnp.abs(labels), (labels >= 0) * mb.loss_scale_sum


if __name__ == "__main__":
    classifier, language_model = nnx.Linear(3 * SIDE**2, 8, rngs=nnx.Rngs(0)), LanguageModel(nnx.Rngs(0))
    for model, batches in [(classifier, images()), (language_model, texts())]:
        optimizer = nnx.Optimizer(model, optax.adam(5e-3), wrt=nnx.Param)
        print(type(model).__name__, *(f"{update(model, optimizer, *batch):.3f}" for batch in batches))
    print("compiled for labels of the shapes", *COMPILED)
