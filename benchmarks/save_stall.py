"""How long a save of a 1 GB state blocks the loop, compared with a synchronous save by orbax; the cost of verifying.

python benchmarks/save_stall.py [MEGABYTES]     target: at most 5% of a synchronous save by orbax
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from dtrain.assembly.checksum import state_checksum
from dtrain.assembly.state import State
from dtrain.checkpoint import manifest
from dtrain.checkpoint.policy import Checkpoint
from dtrain.checkpoint.store import Store

ROUNDS = 5


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    keys = jax.random.split(jax.random.key(0), 10)
    arrays = {f"w{i}": jax.random.normal(key, (megabytes * 25, 1000)) for i, key in enumerate(keys)}
    state = jax.block_until_ready(State(jnp.int32(1), arrays, ()))
    stalls, whole, sync, checks = [], [], [], []
    with (
        tempfile.TemporaryDirectory(prefix="dtrain-stall-") as folder,
        ocp.StandardCheckpointer() as orbax,
        Store(Path(folder) / "ours", Checkpoint(keep=1)) as store,
    ):
        for number in range(ROUNDS + 1):
            start = time.perf_counter()
            found = state_checksum(number, state)
            store.save(number, state, {}, {}, found.checksum)
            stalls.append(time.perf_counter() - start)
            store.wait()
            whole.append(time.perf_counter() - start)

            start = time.perf_counter()
            manifest.check(Path(folder) / "ours" / str(number), 0, 1)
            checks.append(time.perf_counter() - start)

            start = time.perf_counter()
            orbax.save(Path(folder) / "orbax", state, force=True)
            orbax.wait_until_finished()
            sync.append(time.perf_counter() - start)
    middle = lambda times: statistics.median(times[1:])  # noqa: E731
    print(f"state of {megabytes} MB, median of {ROUNDS}")
    print(f"orbax, synchronous           {middle(sync):6.2f} s")
    print(f"dtrain, loop blocked         {middle(stalls):6.2f} s  {middle(stalls) / middle(sync):.1%} of it")
    print(f"dtrain, until committed      {middle(whole):6.2f} s")
    print(f"digests checked at restore   {middle(checks):6.2f} s")


if __name__ == "__main__":
    main()
