"""Folders that are given in a model's place: one line that says what they are, and which to
give."""

import shutil
from pathlib import Path

import pytest

from isobit.errors import IsobitError
from isobit.model import Model


def _refusal(folder: Path) -> str:
    with pytest.raises(IsobitError) as refused:
        Model.load(folder)
    (line,) = str(refused.value).splitlines()
    return line


def _cached(
    root: Path, base_model: Path, revisions: tuple[str, ...] = ("abc",), main: str | None = "abc"
) -> Path:
    """As `hf download` lays a model down without --local-dir: files are links to blobs."""
    model = root / "models--Qwen--Tiny"
    (model / "blobs").mkdir(parents=True)
    (model / "refs").mkdir()
    if main is not None:
        (model / "refs" / "main").write_text(main)
    for revision in revisions:
        snapshot = model / "snapshots" / revision
        snapshot.mkdir(parents=True)
        for number, file in enumerate(sorted(base_model.iterdir())):
            blob = model / "blobs" / f"{number:040x}"
            shutil.copy(file, blob)
            (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    return model


def test_a_snapshot_of_the_cache_is_a_model_and_what_is_around_it_leads_there(
    tmp_path: Path, base_model: Path
) -> None:
    model = _cached(tmp_path / "hub", base_model, ("abc", "def"))
    snapshot = model / "snapshots" / "abc"
    assert (
        Model.load(snapshot).config == Model.load(base_model).config
    )  # the control: what the lines lead to is read
    for folder in (tmp_path, tmp_path / "hub"):
        assert _refusal(folder).endswith(
            f"it is a cache of the Hub, with 1 models: give a snapshot in it, such as {snapshot}"
        )
    assert _refusal(model).endswith(f"it is a model in the Hub's cache: give {snapshot}")


def test_a_name_on_the_hub_is_the_snapshot_that_its_cache_calls_main(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing of that name is in the current folder; the cache is only read. The control is a
    name that it has not."""
    model = _cached(tmp_path / "huggingface" / "hub", base_model, ("abc", "def"))
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (
        ("XDG_CACHE_HOME", tmp_path),
        ("HF_HOME", tmp_path / "huggingface"),
        ("HF_HUB_CACHE", tmp_path / "huggingface" / "hub"),
    ):
        with monkeypatch.context() as only:
            only.setenv(name, str(value))
            assert Model.load("Qwen/Tiny").directory == model / "snapshots" / "abc"
            assert _refusal(Path("Qwen/Other")).startswith("model Qwen/Other: no such directory; ")
    assert _refusal(Path(f"Qwen/{'a' * 300}")).startswith("model Qwen/aaa")
    monkeypatch.setenv("HOME", str(tmp_path / "huggingface"))
    monkeypatch.setenv("HF_HUB_CACHE", "~/hub")
    assert Model.load("Qwen/Tiny").directory == model / "snapshots" / "abc"
    for main in (None, "newer"):  # of a download with --revision, or in the middle of one
        _cached(tmp_path / f"of {main}", base_model, ("abc",), main)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / f"of {main}"))
        assert _refusal(Path("Qwen/Tiny")).startswith("model Qwen/Tiny: no such directory; ")


def test_a_cache_in_which_nothing_is_named_main(tmp_path: Path, base_model: Path) -> None:
    model = _cached(tmp_path / "one", base_model, ("abc",), None)
    assert _refusal(model).endswith(f"give {model / 'snapshots' / 'abc'}")
    model = _cached(tmp_path / "none", base_model, (), None)
    assert _refusal(model).endswith("it is a model in the Hub's cache: it has no snapshot yet")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
def test_links_to_blobs_that_were_not_copied(tmp_path: Path, base_model: Path, name: str) -> None:
    snapshot = _cached(tmp_path, base_model) / "snapshots" / "abc"
    (snapshot / name).resolve().unlink()
    line = _refusal(snapshot)
    assert line.startswith(f"{snapshot / name}: a link to ../../blobs/")
    assert line.endswith(
        "which is not there; copy a snapshot of the Hub's cache with its links followed (cp -rL)"
    )


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
@pytest.mark.parametrize(
    ("pointer", "what"),
    [
        (
            "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            "a pointer of Git LFS",
        ),
        ("/annex/objects/SHA256E-s31390--f50d\n", "a pointer of git-annex"),
    ],
)
def test_pointers_in_the_place_of_files(
    tmp_path: Path, base_model: Path, name: str, pointer: str, what: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(base_model, folder)
    (folder / name).write_text(pointer)
    line = _refusal(folder)
    assert line.startswith(f"{folder / name}: cannot be read: {what}, not the file itself")


def test_runs_and_folders_of_checkpoints_lead_to_the_newest(
    tmp_path: Path, base_model: Path
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("steps: 20\n")
    assert _refusal(run).endswith("it is a run: it has no checkpoint yet")
    for step in ("step-000002", "step-000010"):
        shutil.copytree(base_model, run / "checkpoints" / step)
    newest = run / "checkpoints" / "step-000010"
    assert _refusal(run).endswith(f"it is a run: give its newest checkpoint, {newest}")
    assert _refusal(run / "checkpoints").endswith(f"the model is in {newest}")


def test_folders_of_other_trainers(tmp_path: Path, base_model: Path) -> None:
    for step in (9, 100):
        shutil.copytree(base_model, tmp_path / "trainer" / f"checkpoint-{step}")
    assert _refusal(tmp_path / "trainer").endswith(
        f"the model is in {tmp_path / 'trainer' / 'checkpoint-100'}"
    )
    shutil.copytree(base_model, tmp_path / "clone" / "weights")
    assert _refusal(tmp_path / "clone").endswith(
        f"the model is in {tmp_path / 'clone' / 'weights'}"
    )
    shutil.copytree(base_model, tmp_path / "clone" / "more")  # which of two is not for us to say
    assert _refusal(tmp_path / "clone").endswith(
        "config.json is missing; expected a Hugging Face model directory"
    )


@pytest.mark.parametrize(
    ("name", "what"), [("tiny.Q8_0.gguf", "GGUF"), ("consolidated.00.pth", "Meta's own format")]
)
def test_other_formats(tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / name).write_bytes(b"")
    assert f"; it has {what}" in _refusal(tmp_path)
