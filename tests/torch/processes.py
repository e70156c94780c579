"""Two processes that work together, as under torchrun."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def two_processes(job, *args):
    """Runs ``job(*args)``, a function of a module, in two processes of one group; raises what one of them raises."""
    with tempfile.TemporaryDirectory() as folder:
        # A file, not a port: a port that was free a moment ago may be taken by then.
        spawn(_process, (str(Path(folder) / "store"), job, *args), nprocs=2)


def _process(rank, store, job, *args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    job(*args)  # where it raises the group stays: the other's error, of a group that is gone, would be told first
    dist.barrier()  # neither leaves while the other is still at work
    dist.destroy_process_group()
    # A model in shards keeps the group, and Gloo's threads, alive. One that lets go of a tensor while Python shuts down
    # aborts the process (pytorch/pytorch#179291), so there is no shutting down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
