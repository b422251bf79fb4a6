"""Worker processes that load images: how they hand over batches, and what happens when one fails.

torch packs batches in a separate thread, where a failure is printed and the batch is lost: the run waits for ever.
Here the worker packs them itself, so that a failure reaches the run; if memory cannot be shared (a small /dev/shm, a
socket path that is too long), the bytes go through the pipe.
"""

from __future__ import annotations

import atexit
import errno
import io
import logging
import multiprocessing
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sized
from contextlib import suppress
from functools import cache
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vbm_ptm.errors import UsageError, WorkerError

logger = logging.getLogger(__name__)

# How often, in seconds, a rank that waits for a batch checks whether it has been asked to stop.
_LOOK_SECONDS = 5.0

# Signals that terminals and batch systems also send to workers, though only the run decides what happens.
_FOR_THE_RUN = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")

_SHARING_HINTS = {
    "AF_UNIX path too long": "TMPDIR is too long for a socket: set it to a shorter path",
    "No usable temporary directory": "set TMPDIR to a folder that can be written to",
    "shared memory": "/dev/shm is too small: give it more (docker's shm-size, a mounted emptyDir of Kubernetes)",
}


class PartList(Sized, Protocol):
    """What each batch holds, in order."""

    def __iter__(self) -> Iterator[Any]: ...


class ImageLoader:
    """Loads batches in order, in worker processes or in this one.

    Each part is handed to the data set's ``__getitems__``, and what that returns is passed on.

    Args:
        dataset: Returns a batch for a part.
        parts: What the batches hold; requested again for every pass.
        num_workers: Processes; 0 for none.
        context: How they start; None for the platform's default.
        is_persistent: Whether workers stay for the next pass.
        pin_memory: Put batches into page-locked memory.
        limit_seconds: Longest time that a batch may take.
        on_wait: Called every few seconds while a batch is waited for; may raise.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        parts: PartList,
        *,
        num_workers: int,
        context: str | None,
        is_persistent: bool,
        pin_memory: bool,
        limit_seconds: float,
        on_wait: Callable[[], None],
    ) -> None:
        self._dataset = dataset
        self._parts = parts
        self._context = context
        self._is_persistent = is_persistent
        self._pin_memory = pin_memory
        self._limit = limit_seconds
        self._on_wait = on_wait
        self._loader = self._new_loader(num_workers)
        self._workers: list[BaseProcess] = []

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        return self._opened(self._start())

    def _new_loader(self, num_workers: int) -> DataLoader[Any]:
        return DataLoader(
            self._dataset,
            batch_sampler=self._parts,
            collate_fn=_Packer() if num_workers else _as_it_is,
            num_workers=num_workers,
            multiprocessing_context=self._context if num_workers else None,
            persistent_workers=self._is_persistent and num_workers > 0,
            timeout=min(_LOOK_SECONDS, self._limit) if num_workers else 0,
            # A loader draws a base seed when it is iterated; its own generator leaves the global one untouched.
            generator=torch.Generator(),
            pin_memory=self._pin_memory,
        )

    def _start(self) -> Iterator[Any]:
        """Start the workers, or continue without them if the system refuses."""
        if not self._loader.num_workers:
            return iter(self._loader)
        before = set(multiprocessing.active_children())
        try:
            # torch needs as many queues; if it cannot get them, it leaves a loader that cannot be shut down.
            context = multiprocessing.get_context(self._context)
            probes = [context.Queue() for _ in range(1 + self._loader.num_workers)]
            del probes
            with _signals_blocked():
                batches = iter(self._loader)
        except OSError as error:
            _warn_once(f"no worker processes can be started ({error}): images are loaded in the main process")
            self._loader = self._new_loader(0)
            return iter(self._loader)
        except RuntimeError as error:  # from a worker that has stayed since the last pass
            self._end_workers()
            raise _explained(error) from error
        started = [worker for worker in multiprocessing.active_children() if worker not in before]
        self._workers = started or self._workers  # those of the first pass may stay
        return batches

    def _opened(self, batches: Iterator[Any]) -> Iterator[Any]:
        waited = 0.0
        while True:
            try:
                batch = next(batches)
                if isinstance(batch, _Parcel):
                    batch = batch.open()
            except StopIteration:
                return
            except Exception as error:
                if not str(error).startswith("DataLoader timed out after"):
                    self._end_workers()
                    raise _explained(error) from error
            else:
                waited = 0.0
                yield batch
                continue
            waited += self._loader.timeout
            self._keep_waiting(waited)

    def _keep_waiting(self, waited: float) -> None:
        """Raise if a batch has not come for too long, or the run has been asked to stop."""
        try:
            self._on_wait()
            if waited >= self._limit:
                raise WorkerError(
                    f"the workers have delivered no images for {waited / 60:.3g} minutes: the file system does not "
                    "answer, or is slower than data.worker_timeout_minutes allows."
                )
        except BaseException:
            self._end_workers()
            raise

    def _end_workers(self) -> None:
        """End all workers, even stuck ones, which the program would otherwise wait for when it ends."""
        left = list(self._workers)
        while left:
            with suppress(RuntimeError):  # this is how torch reports that one has been killed
                while left:
                    left[-1].kill()
                    left[-1].join(_LOOK_SECONDS)
                    left.pop()


@atexit.register
def _end_what_is_left() -> None:
    """End workers that outlive their loader: they block SIGTERM, which Python would send them and then wait."""
    left = [child for child in multiprocessing.active_children() if child.daemon]
    while left:
        with suppress(RuntimeError):
            while left:
                left.pop().kill()


class _Parcel:
    """A batch as bytes that refer to shared memory or hold the pixels themselves.

    Args:
        content: The bytes.
        problem: Why memory is not shared; None where it is.
    """

    def __init__(self, content: bytes, problem: str | None) -> None:
        self.content = content
        self.problem = problem

    def open(self) -> Any:
        """Return the batch."""
        if self.problem:
            hint = next((hint for part, hint in _SHARING_HINTS.items() if part in self.problem), "")
            _warn_once(
                f"workers cannot share memory ({self.problem}): images go through pipes, which is slower"
                + f". {hint}" * bool(hint)
            )
        return ForkingPickler.loads(self.content)

    def pin_memory(self) -> Any:
        """Return the batch in page-locked memory; a loader calls this."""
        return _pinned(self.open())


def _pinned(batch: Any) -> Any:
    if isinstance(batch, tuple):
        values = [_pinned(value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return batch.pin_memory() if hasattr(batch, "pin_memory") else batch


class _Packer:
    """Packs batches in the worker; once sharing memory has failed, it is not tried again."""

    def __init__(self) -> None:
        self._problem: str | None = None

    def __call__(self, batch: Any) -> _Parcel:
        if self._problem is None:
            try:
                return _Parcel(bytes(ForkingPickler.dumps(batch)), None)
            except (OSError, RuntimeError) as error:
                self._problem = str(error)
        content = io.BytesIO()
        _PixelPickler(content).dump(batch)
        return _Parcel(content.getvalue(), self._problem)


class _PixelPickler(ForkingPickler):
    """Writes the numbers of tensors, not their places in shared memory."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def _as_it_is(batch: Any) -> Any:
    return batch


class _signals_blocked:  # noqa: N801 - used like a function
    """Blocks signals while workers start, which they inherit: there is no moment at which one could be interrupted."""

    def __enter__(self) -> None:
        if sys.platform != "win32":  # Windows cannot block signals
            numbers = [getattr(signal, name) for name in _FOR_THE_RUN]
            self._before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def __exit__(self, *_: object) -> None:
        if sys.platform != "win32":
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before)


def _explained(error: Exception) -> Exception:
    """Return what to raise for a failure of a worker, or in transit from it."""
    cause = str(error.__cause__)  # the cause of "exited unexpectedly"
    text = cause if cause.startswith("DataLoader worker") else str(error)
    ours = re.search(r"\nvbm_ptm\.errors\.(?:UsageError|UnreachableError): (.*)\Z", text, flags=re.DOTALL)
    if ours:  # about an image: what the worker said, without its traceback
        return UsageError(*ours[1].strip().splitlines())
    if getattr(error, "errno", None) == errno.EMFILE or "Too many open files" in text or "ancdata" in text:
        return WorkerError(
            "too many files are open: raise the limit (ulimit -n), or use fewer data.num_workers."
        )
    if isinstance(error, MemoryError) or "allocate memory" in text:
        reason = "memory was short"
    elif text.startswith("DataLoader worker") or "exited unexpectedly" in text:
        reason = text.splitlines()[0].removeprefix("DataLoader worker ").rstrip(". ")
    elif isinstance(error, ConnectionError | EOFError | FileNotFoundError) and "worker process" not in text:
        reason = f"it does not answer ({type(error).__name__})"
    else:
        return error
    what = "shared memory (/dev/shm)" if "Bus error" in text else "memory"
    return WorkerError(
        f"a worker process that loads images has failed: {reason}. Usually {what} is short: use fewer "
        "data.num_workers, or 0. The checkpoints are intact, and the run can be resumed."
    )


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message, extra={"is_of_rank": True})
