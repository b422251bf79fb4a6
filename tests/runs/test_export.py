"""Exported folders: whole, the same to the last bit, and usable where nothing else of the run is."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from huggingface_hub import ModelCard, constants

from vbm_ptm.errors import UsageError
from vbm_ptm.experiment import run
from vbm_ptm.runs.directory import RunDirectory
from vbm_ptm.runs.export import export, push
from vbm_ptm.runs.stored_learner import load, predict

Tree = dict[str, Any]


@pytest.fixture
def images(toy_folder: Path) -> list[Path]:
    return sorted((toy_folder / "test").rglob("0.png"))


@pytest.fixture
def finished(mean_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(mean_run, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("learner", ["slca", "s_iprompt"])
def test_export__predicts_bit_for_bit_without_run_data_or_weights(
    learner: str, toy_tree: Callable[..., Tree], images: list[Path], tiny_weights: Path, tmp_path: Path
) -> None:
    tree = toy_tree(learner)
    tree["trainer"] = {"max_steps_per_task": 1}
    tree["backbone"]["checkpoint"] = str(shutil.copy(tiny_weights, tmp_path / "weights.safetensors"))
    run(tree, output=tmp_path / "run")
    before = list(predict(tmp_path / "run", images, top_k=12))
    folder = export(tmp_path / "run", output=tmp_path / "exported")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "weights.safetensors").unlink()
    assert list(predict(folder, images, top_k=12)) == before
    assert str(tmp_path) not in "".join(file.read_text("latin1") for file in folder.iterdir())


def test_export__of_an_earlier_task_knows_its_classes_alone(finished: Path, images: list[Path]) -> None:
    folder = export(finished, task=0)
    assert folder == finished / "exported_task_1"
    (best,) = predict(folder, images[:1], top_k=12)
    assert [best] == list(predict(finished, images[:1], top_k=12, task=0))
    assert len(load(folder).class_names) == len(best.class_names) == 4
    with pytest.raises(UsageError, match="is an exported learner: only a run directory has other tasks"):
        load(folder, task=0)


def test_export__half_precision_is_half_as_large(finished: Path, images: list[Path]) -> None:
    whole = export(finished)
    half = export(finished, output=finished / "half", is_half=True)
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (half, whole)]
    assert sizes[0] < 0.6 * sizes[1]
    one, two = (list(predict(folder, images, top_k=1)) for folder in (half, whole))
    assert [image.class_names for image in one] == [image.class_names for image in two]
    assert one != two
    assert {tensor.dtype for tensor in load(half).learner.state_dict().values()} == {torch.float32}


def test_export__half_precision_is_refused_where_it_overflows(finished: Path) -> None:
    file = finished / "checkpoints/statistics/task_00.safetensors"
    tensors = {name: tensor + 1e6 for name, tensor in safetensors.torch.load_file(file).items()}
    content = safetensors.torch.save(tensors)
    file.write_bytes(content)
    for sums in finished.glob("checkpoints/task_*/SHA256SUMS"):
        lines = [
            f"{hashlib.sha256(content).hexdigest()}  {line[66:]}"
            if line.endswith("/task_00.safetensors")
            else line
            for line in sums.read_text().splitlines()
        ]
        sums.write_text("\n".join(lines) + "\n")
    with pytest.raises(UsageError, match="half precision cannot represent"):
        export(finished, is_half=True)
    assert not (finished / "exported").exists()


@pytest.mark.parametrize("content", [b"", None])
def test_load__verifies_the_weights(finished: Path, content: bytes | None) -> None:
    file = export(finished) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0" if content is None else content)
    with pytest.raises(UsageError, match="damaged: its SHA-256" if content is None else "missing or empty"):
        load(file.parent)


def test_load__says_what_is_wrong_with_the_description(finished: Path, tmp_path: Path) -> None:
    file = export(finished) / "config.json"
    values = json.loads(file.read_text())
    for change, message in (
        ({"format_version": 7}, "another version of vbm_ptm: format_version"),
        ({"class_names": None}, "class_names"),
        (None, "as a whole"),
    ):
        file.write_text("{" if change is None else json.dumps(values | change))
        with pytest.raises(UsageError, match=message):
            load(file.parent)
    with pytest.raises(UsageError, match=r"neither a run directory .* nor an exported learner"):
        load(tmp_path)


def test_export__says_at_once_where_nothing_can_be_written(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setattr("vbm_ptm.runs.export.restore_run", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(UsageError, match=r"x cannot be written: .*notes\.txt is a file"):
        export(finished, output=tmp_path / "notes.txt" / "x")


def test_export__leaves_what_is_there(finished: Path) -> None:
    folder = export(finished)
    (folder / "README.md").write_text("edited")
    with pytest.raises(UsageError, match="exists already"):
        export(finished)
    assert (folder / "README.md").read_text() == "edited"


def test_export__takes_weights_that_have_moved(finished: Path, tiny_weights: Path, tmp_path: Path) -> None:
    moved = shutil.copy(tiny_weights, tmp_path / "moved.safetensors")
    config = RunDirectory(finished).path / "config.yaml"
    config.write_text(config.read_text().replace(str(tiny_weights), str(tmp_path / "gone.safetensors")))
    with pytest.raises(UsageError, match=r"gone\.safetensors"):
        export(finished)
    assert export(finished, overrides=[f"backbone.checkpoint={moved}"]).is_dir()


@pytest.mark.slow
def test_model_card__is_metadata_that_the_hub_reads_and_code_that_runs(
    finished: Path, images: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = json.loads((finished / "result.json").read_text())
    folder = export(finished)
    card = ModelCard.load(folder / "README.md")
    metadata = card.data.to_dict()
    assert metadata["library_name"] == "vbm_ptm"
    assert metadata["pipeline_tag"] == "image-classification"
    assert metadata["base_model"] == "timm/test_vit.r160_in1k"
    assert metadata["license"] == "apache-2.0"
    assert "nearest_mean" in metadata["tags"]
    (measured,) = card.data.eval_results
    last = result["metrics"]["class_incremental"]["top1"]["last_accuracy"]
    assert measured.metric_value == pytest.approx(last)
    for text in (f"{last:.2f}", result["weights"]["sha256"], result["split_sha256"], "class_07"):
        assert text in card.text
    for name, version in result["versions"].items():
        assert f"{name} {version}" in card.text

    shutil.copy(images[3], folder / "photo.jpg")
    monkeypatch.chdir(folder)
    (code,) = re.findall("```python\n(.*?)```", card.text, re.DOTALL)
    printed = StringIO()
    with redirect_stdout(printed):
        exec(code, {})
    (best,) = predict(finished, images[3:4], top_k=3)
    assert printed.getvalue() == f"photo.jpg {best.class_names} {best.scores}\n"


class _Hub(BaseHTTPRequestHandler):
    """The part of the hub's interface that takes an upload of small files; what came is in ``files``."""

    server: _HubServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer: dict[str, Any] = {"url": f"http://{self.headers['Host']}/somebody/digits"}
        if self.headers["Authorization"] != "Bearer right":
            self.send_response(401)
            answer = {"error": "Invalid username or password."}
        else:
            self.send_response(200)
        if self.path.endswith("/create"):
            self.server.created.append(json.loads(body))
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            answer = {
                "files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
            }
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {"commitUrl": answer["url"] + "/commit/1", "commitOid": "1"}
        elif self.path.endswith("validate-yaml"):
            answer = {"errors": [], "warnings": []}
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _HubServer(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Hub)
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}


@pytest.fixture
def hub() -> Iterator[_HubServer]:
    server = _HubServer()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def online(hub: _HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.setenv("HF_TOKEN", "right")


@pytest.mark.usefixtures("online")
def test_push__uploads_the_folder_as_it_is(finished: Path, hub: _HubServer) -> None:
    folder = export(finished)
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text(f"{card}\nedited\n")
    assert push(folder, "somebody/digits") == f"http://127.0.0.1:{hub.server_port}/somebody/digits"
    assert hub.created == [{"name": "digits", "organization": "somebody", "visibility": "private"}]
    assert hub.files == {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.usefixtures("online")
def test_push__says_what_is_missing(
    finished: Path, hub: _HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = export(finished)

    def problem(repository: str = "somebody/digits") -> str:
        with pytest.raises(UsageError) as caught:
            push(folder, repository)
        (message,) = caught.value.problems
        assert "\n" not in message
        assert f"{folder} is ready to be pushed" in message
        return message

    assert "no/such/name: Repo id" in problem("no/such/name")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "somebody/digits: Client error '401 Unauthorized'" in problem()
    monkeypatch.delenv("HF_TOKEN")
    assert (
        f"no token for http://127.0.0.1:{hub.server_port}: run `hf auth login` or set HF_TOKEN" in problem()
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids uploading" in problem()
    assert hub.files == {}
    with pytest.raises(UsageError, match="is not an exported learner"):
        push(tmp_path, "somebody/digits")


@pytest.mark.slow
def test_load__imports_no_code_because_a_folder_says_so(
    toy_tree: Callable[..., Tree], images: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_of_mine.py").write_text(
        "from vbm_ptm.learners.nearest_mean import NearestMean\n\n\nclass Mine(NearestMean):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run(toy_tree("own_of_mine:Mine"), output=tmp_path / "run")
    folder = export(tmp_path / "run")
    assert "import own_of_mine  # the learner's own code" in (folder / "README.md").read_text()
    assert ModelCard.load(folder / "README.md").data.tags[-1] == "Mine"
    assert list(predict(folder, images)) == list(predict(tmp_path / "run", images))
    monkeypatch.delitem(sys.modules, "own_of_mine")
    with pytest.raises(UsageError, match="If you trust that code, `import own_of_mine`"):
        load(folder)
    assert "own_of_mine" not in sys.modules
