"""The peers, with the versions that run together on Python 3.11."""

from __future__ import annotations

import os

from benchmarks.peers.process import Peer

TORCH = os.environ.get("TORCH", "torch==2.13.0")  # as the Makefile has it
CORES = os.cpu_count() or 1

PEERS = [
    Peer(
        "flower",
        ((TORCH, "flwr[simulation]>=1.41,<1.43"),),
        settings={
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        },
    ),
    Peer(
        "pfl",
        ((TORCH, "pfl[pytorch]==0.6.0"),),
        # A process for each core is faster than one process with all of them.
        launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(CORES)),
        settings={"OMP_NUM_THREADS": "1"},
    ),
    # FedJAX is older than what JAX has since removed.
    Peer("fedjax", (("fedjax==0.0.17", "jax==0.4.34", "jaxlib==0.4.34", "dm-haiku==0.0.13", "optax==0.2.3"),)),
    # FedLab imports torchvision whatever it is used for; newer ones refuse a torch that they were not built for.
    Peer("fedlab", ((TORCH, "fedlab==1.3.0", "requests"), ("--no-deps", "torchvision==0.15.2"))),
]
