"""Real worker processes that fail in every way, in places where memory cannot be shared."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vbm_ptm.data import workers
from vbm_ptm.data.workers import ImageLoader
from vbm_ptm.errors import TrainingInterrupted, UsageError, WorkerError

REPOSITORY = Path(__file__).parents[2]


class Batch(NamedTuple):
    images: Tensor
    rows: Tensor


class Images(Dataset[Tensor]):
    """Rows of a picture each; ``act`` is done where row 3 is loaded."""

    def __init__(self, act: Any = None, *, size: int = 8) -> None:
        self.act = act
        self.size = size

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        if self.act and 3 in rows:
            self.act()
        images = torch.stack([torch.full((3, self.size, self.size), float(row)) for row in rows])
        return Batch(images, torch.tensor(rows))


def loader_of(dataset: Images, **options: Any) -> ImageLoader:
    defaults: dict[str, Any] = {
        "num_workers": 2,
        "context": None,
        "is_persistent": False,
        "pin_memory": False,
        "limit_seconds": 60,
        "on_wait": lambda: None,
    }
    return ImageLoader(dataset, [[0, 1], [2, 3], [4], [5, 6]], **defaults | options)


def assert_brings_all(loader: ImageLoader) -> None:
    batches = list(loader)
    assert [batch.rows.tolist() for batch in batches] == [[0, 1], [2, 3], [4], [5, 6]]
    for batch in batches:
        assert isinstance(batch, Batch)
        assert batch.images[:, 0, 0, 0].tolist() == batch.rows.tolist()


@pytest.fixture(autouse=True)
def _every_warning() -> None:
    workers._warn_once.cache_clear()


@pytest.fixture(name="set_temporary_folder")
def temporary_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes TMPDIR a path of this many characters."""

    def make(length: int) -> None:
        root = tmp_path_factory.mktemp("t")
        folder = root / ("d" * (length - len(str(root)) - 1))
        folder.mkdir()
        assert len(str(folder)) == length
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr(tempfile, "tempdir", None)
        # What this process has made of TMPDIR before.
        monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]

    return make


@pytest.mark.parametrize(
    "length", [None, 78, *(pytest.param(n, marks=pytest.mark.slow) for n in (90, 120, 200))]
)
def test_image_loader__needs_no_short_temporary_folder(
    length: int | None, set_temporary_folder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    if length:
        set_temporary_folder(length)
    with caplog.at_level(logging.WARNING):
        assert_brings_all(loader_of(Images()))
    assert ("TMPDIR is too long for a socket" in caplog.text) == bool(length)
    assert len(caplog.records) == bool(length)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_image_loader__goes_on_whatever_way_workers_start(context: str, set_temporary_folder: Any) -> None:
    set_temporary_folder(120)
    assert_brings_all(loader_of(Images(), context=context, is_persistent=True))


SMALL_MEMORY = """
import sys
sys.path.insert(0, "tests/data")
from test_workers import Images, loader_of
total = sum(float(batch.images.mean()) for batch in loader_of(Images(size=1024)))  # 12 MB an image
print("total", total)
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", ["64m", "4k"])
def test_image_loader__goes_on_with_little_shared_memory(size: str) -> None:
    limit = f"mount -t tmpfs -o size={size} none /dev/shm"
    # Whoever is not root is it in a namespace of its own, where the system allows that.
    namespace = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    if subprocess.run([*namespace, "bash", "-c", limit], stderr=subprocess.DEVNULL).returncode:
        # Elsewhere a limit on files, here of 4 KiB, makes shared memory too small for an image.
        namespace, limit = [], "ulimit -f 4"
    done = subprocess.run(
        [*namespace, "bash", "-c", f'{limit} && "$@"', "bash", sys.executable, "-c", SMALL_MEMORY],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "total 12.5\n"
    assert "Traceback" not in done.stderr
    assert namespace or "cannot share memory" in done.stderr


def test_image_loader__says_why_memory_is_not_shared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Any) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", full)
    with caplog.at_level(logging.WARNING):
        assert_brings_all(loader_of(Images()))
        assert_brings_all(loader_of(Images()))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "No space left on device" in message
    assert "/dev/shm is too small" in message


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOMEM, errno.ENOSYS, errno.ENOSPC], ids=os.strerror)
def test_image_loader__goes_on_without_workers_where_none_can_be_started(
    code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fork", fail)
    loader = loader_of(Images(), is_persistent=True)
    with caplog.at_level(logging.WARNING):
        assert_brings_all(loader)
        assert_brings_all(loader)
    (message,) = [record.getMessage() for record in caplog.records]
    assert os.strerror(code) in message
    assert "in the main process" in message


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(3)


def break_bus() -> None:
    os.kill(os.getpid(), signal.SIGBUS)


def run_short() -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("act", "word"),
    [(kill_myself, "Killed"), (leave, "exit"), (break_bus, "/dev/shm"), (run_short, "memory was short")],
)
@pytest.mark.parametrize("is_persistent", [False, True])
def test_image_loader__ends_within_seconds_where_a_worker_fails(
    act: Any, word: str, is_persistent: bool
) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"data\.num_workers") as raised:
        list(loader_of(Images(act), is_persistent=is_persistent))
    assert word in str(raised.value)
    assert "Traceback" not in str(raised.value)
    assert time.monotonic() - started < 20


def test_image_loader__ends_where_a_worker_is_killed_from_outside() -> None:
    before = set(multiprocessing.active_children())
    batches = iter(loader_of(Images(lambda: time.sleep(2))))
    next(batches)
    (one, _) = set(multiprocessing.active_children()) - before
    assert one.pid is not None
    os.kill(one.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="Killed"):
        list(batches)


def test_image_loader__ends_where_a_worker_has_died_since_the_last_pass() -> None:
    def kill(worker: multiprocessing.process.BaseProcess) -> None:
        worker.kill()
        time.sleep(10)

    before = set(multiprocessing.active_children())
    loader = loader_of(Images(), is_persistent=True)
    assert_brings_all(loader)
    (one, _) = set(multiprocessing.active_children()) - before
    with pytest.raises(RuntimeError, match="Killed"):  # torch reports it wherever the main thread is
        kill(one)
    with pytest.raises(WorkerError, match=r"exited unexpectedly|Killed"):
        list(loader)


def refuse() -> None:
    raise UsageError("image 'a/b.png' is broken", "image 'c.png' is broken")


def fail() -> None:
    raise ValueError("a fault of the program")


def test_image_loader__passes_on_what_a_worker_says_of_an_image() -> None:
    with pytest.raises(UsageError) as raised:
        list(loader_of(Images(refuse)))
    assert raised.value.problems == ("image 'a/b.png' is broken", "image 'c.png' is broken")
    with pytest.raises(ValueError, match="a fault of the program"):
        list(loader_of(Images(fail)))


def test_image_loader__waits_for_a_batch_no_longer_than_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_LOOK_SECONDS", 0.3)
    with pytest.raises(WorkerError, match="worker_timeout_minutes"):
        list(loader_of(Images(lambda: time.sleep(9)), limit_seconds=1))
    assert_brings_all(loader_of(Images(lambda: time.sleep(1)), limit_seconds=30))


def test_image_loader__obeys_the_first_request_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise TrainingInterrupted(143, "stopped by SIGTERM")

    monkeypatch.setattr(workers, "_LOOK_SECONDS", 0.3)
    started = time.monotonic()
    with pytest.raises(TrainingInterrupted, match="SIGTERM"):
        list(loader_of(Images(lambda: time.sleep(9)), on_wait=stop))
    assert time.monotonic() - started < 20


def test_image_loader__keeps_signals_of_batch_systems_from_workers() -> None:
    before = set(multiprocessing.active_children())
    batches = iter(loader_of(Images(lambda: time.sleep(1))))
    for worker in set(multiprocessing.active_children()) - before:
        assert worker.pid is not None
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
            os.kill(worker.pid, signal.Signals[name])
    assert len(list(batches)) == 4
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
