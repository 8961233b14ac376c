"""Real processes for tests of distributed code.

A few processes stay for all tests of a session. A job is a function of a test file, called on each rank with
its rank and the world's size; it has a process group of its own (gloo).
"""

import importlib.util
import itertools
import shutil
import sys
import tempfile
import traceback
from datetime import timedelta
from functools import cache
from multiprocessing import get_context
from pathlib import Path

SECONDS = 120  # that a job may take


class Ranks:
    """Processes that wait for jobs.

    The files by which the ranks of a job find each other stay until the end: a rank may still look at its
    own after it has answered, and torch waits minutes for one that was just removed.
    """

    def __init__(self, number):
        self.number, self.pipes, self.processes = number, [], []
        self.folder, self.jobs = "", itertools.count()

    def __call__(self, job, world, *args):
        """What each rank returned."""
        if not self.processes:
            self._start()
        file = sys.modules[job.__module__].__file__
        store = f"{self.folder}/{next(self.jobs)}"
        for rank in range(world):
            self.pipes[rank].send((file, job.__name__, rank, world, store, args))
        answers = []
        for pipe in self.pipes[:world]:
            if not pipe.poll(SECONDS):
                answers.append((False, f"no answer within {SECONDS} seconds"))
                break
            answers.append(pipe.recv())
        failed = {rank: told for rank, (good, told) in enumerate(answers) if not good}
        if failed:
            self.stop()
            raise AssertionError("\n".join(f"rank {rank}: {told}" for rank, told in failed.items()))
        return [told for _, told in answers]

    def _start(self):
        self.folder = tempfile.mkdtemp()
        context = get_context("spawn")
        for _ in range(self.number):
            ours, theirs = context.Pipe()
            process = context.Process(target=_wait_for_jobs, args=(theirs,), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def stop(self):
        """End the processes; the next job starts new ones."""
        for process in self.processes:
            process.kill()
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.pipes, self.processes = [], []


def _wait_for_jobs(pipe):
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            file, name, rank, world, store, args = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=SECONDS / 2),
            )
            answer = getattr(_module(file), name)(rank, world, *args)
            dist.barrier()
            pipe.send((True, answer))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@cache
def _module(file):
    sys.path.insert(0, str(Path(__file__).parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
