"""MERIT in JAX: a small language model with optax, its weights and batches sharded over all devices.

    python examples/optax_train.py
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/optax_train.py

The second line makes eight devices of one CPU. Needs jax and optax: pip install '.[jax]'.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from merit_optim.jax import merit

VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 64, 64, 4, 2, 16, 32
Params = dict[str, Any]


@jax.jit
def init(key: Array) -> Params:
    """Return the weights; those of the layers are stacked, so that the model scans over them."""
    shapes = {
        "query_key_value": (LAYERS, WIDTH, 3 * WIDTH),
        "output": (LAYERS, WIDTH, WIDTH),
        "up": (LAYERS, WIDTH, 4 * WIDTH),
        "down": (LAYERS, 4 * WIDTH, WIDTH),
    }
    keys = iter(jax.random.split(key, len(shapes) + 2))
    layers = {name: 0.05 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    return {
        "embedding": 0.05 * jax.random.normal(next(keys), (VOCABULARY, WIDTH)),
        "layers": {
            **layers,
            "attention_norm": jnp.ones((LAYERS, WIDTH)),
            "mlp_norm": jnp.ones((LAYERS, WIDTH)),
        },
        "norm": jnp.ones(WIDTH),
        "head": 0.05 * jax.random.normal(next(keys), (WIDTH, VOCABULARY)),
    }


def normalized(x: Array, scale: Array) -> Array:
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def block(x: Array, weights: dict[str, Array]) -> Array:
    projected = normalized(x, weights["attention_norm"]) @ weights["query_key_value"]
    query, key, value = jnp.split(projected.reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + mixed.reshape(x.shape) @ weights["output"]
    return x + jax.nn.gelu(normalized(x, weights["mlp_norm"]) @ weights["up"]) @ weights["down"]


def loss_of(params: Params, tokens: Array) -> Array:
    """Return the mean loss of predicting each token from those before it."""
    x = params["embedding"][tokens[:, :-1]]
    x, _ = jax.lax.scan(lambda x, weights: (block(x, weights), None), x, params["layers"])
    logits = normalized(x, params["norm"]) @ params["head"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


@jax.jit
def batch(step: Array | int) -> Array:
    """Return sequences with a rule to learn: each token is 5 times the one before, plus 3."""
    tokens = [jax.random.randint(jax.random.key(step), (BATCH,), 0, VOCABULARY)]
    for _ in range(CONTEXT):
        tokens.append((5 * tokens[-1] + 3) % VOCABULARY)
    return jnp.stack(tokens, 1)


def view(params: Params) -> Params:
    """All dimensions form one matrix, except that the first one of the layers' weights stacks matrices."""
    return {**dict.fromkeys(params), "layers": jax.tree.map(lambda w: w.ndim - 1, params["layers"])}


def decays(params: Params) -> Params:
    """Matrices decay, the scales of the norms do not."""
    return {
        **dict.fromkeys(params, True),
        "norm": False,
        "layers": {k: "norm" not in k for k in params["layers"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with MERIT and optax.")
    parser.add_argument("--steps", type=int, default=40)
    num_steps = parser.parse_args().steps

    mesh = jax.make_mesh((jax.device_count(),), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))

    def split(*axes: str | None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*axes))  # type: ignore[no-untyped-call]  # missing in jax

    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-2, num_steps // 10, num_steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        merit(schedule, weight_decay=0.1, mask=decays, view=view),
    )

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Params, state: Any, tokens: Array) -> tuple[Params, Any, Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = init(jax.random.key(0))
    last_axis = jax.tree.map(lambda w: split(*[None] * (w.ndim - 1), "devices"), params)
    params = jax.device_put(params, last_axis)
    state = optimizer.init(params)  # the moments are split like their weights
    # Replicate the step counts, as a step does: otherwise the second step would be compiled again.
    state = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, split()), state)
    print(f"{jax.device_count()} devices, {sum(w.size for w in jax.tree.leaves(params)):,} parameters")
    for step in range(1, num_steps + 1):
        tokens = jax.device_put(batch(step), split("devices"))
        params, state, loss = train_step(params, state, tokens)
        if step % 10 == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
