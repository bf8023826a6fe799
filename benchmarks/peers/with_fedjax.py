"""FedJAX's federated averaging, its clients one after another in compiled steps."""

from __future__ import annotations

from importlib.metadata import version
from itertools import pairwise

import fedjax
import jax
import jax.numpy as jnp
from baton import Task, turns
from fedjax.algorithms import fed_avg

task = Task.given()
x, y = task.arrays()
federation = fedjax.InMemoryFederatedData(
    {str(client): {"x": x[client], "y": y[client]} for client in range(task.clients)}
)


def initial(key: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    layers = []
    for before, after in pairwise(task.widths):
        key, use = jax.random.split(key)
        bound = before**-0.5
        layers.append((jax.random.uniform(use, (before, after), minval=-bound, maxval=bound), jnp.zeros(after)))
    return layers


def loss(params: list[tuple[jax.Array, jax.Array]], batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
    h = batch["x"]
    for weight, bias in params[:-1]:
        h = jax.nn.leaky_relu(h @ weight + bias)
    weight, bias = params[-1]
    logits = jax.nn.log_softmax(h @ weight + bias)
    return -jnp.take_along_axis(logits, batch["y"][:, None], axis=1).mean()


algorithm = fed_avg.federated_averaging(
    jax.grad(loss),
    client_optimizer=fedjax.optimizers.sgd(task.lr),
    server_optimizer=fedjax.optimizers.sgd(1.0),
    client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=task.batch, num_epochs=1),
)
state = algorithm.init(initial(jax.random.PRNGKey(0)))
sampler = fedjax.client_samplers.UniformGetClientSampler(federation, num_clients=task.clients, seed=0)

for rounds in turns(version("fedjax")):
    for _ in range(rounds):
        state, _ = algorithm.apply(state, sampler.sample())
    jax.block_until_ready(state.params)
