"""The examples of docs/how-to/cluster.md for Slurm, Kubernetes and Ray: read by what would read
them."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from isobit.config import load_config
from tests.runs import write_config

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "cluster.md").read_text(
    encoding="utf-8"
)


def block(title: str) -> str:
    found = re.search(rf'```\w+ title="{re.escape(title)}"\n(.*?)```', PAGE, re.DOTALL)
    assert found, title
    return found[1]


def overrides(words: list[str]) -> list[str]:
    """The keys that a command changes."""
    assert words[: words.index("train") + 1][-2:] == ["isobit", "train"]
    return [word for word in words[words.index("train") + 2 :] if "=" in word]


def launcher_takes(words: list[str]) -> Any:
    """torchrun's own reading of a command."""
    from torch.distributed.run import parse_args

    return parse_args(words)


def test_the_batch_script(tmp_path: Path) -> None:
    script = block("train.sbatch")
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    command = script.replace("\\\n", " ").partition("srun torchrun")[2]
    words = shlex.split(command)
    read = launcher_takes(words)
    assert (read.module, read.training_script, read.max_restarts) == (True, "isobit", 3)
    load_config(write_config(tmp_path, tmp_path), overrides(["isobit", *read.training_script_args]))
    assert set(re.findall(r"^#SBATCH --(\S+?)=", script, re.MULTILINE)) >= {
        "nodes",
        "ntasks-per-node",
        "signal",
    }


def test_the_job(tmp_path: Path) -> None:
    service, job = yaml.safe_load_all(block("train.yaml"))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][0] == "torchrun"
    read = launcher_takes(container["command"][1:])
    assert int(read.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(read.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    host = read.rdzv_endpoint.partition(":")[0]
    assert host == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    load_config(write_config(tmp_path, tmp_path), overrides(["isobit", *read.training_script_args]))


def test_the_ray_cluster(tmp_path: Path) -> None:
    cluster = yaml.safe_load(block("fleet.yaml"))
    assert cluster["kind"] == "RayCluster"
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    engines = workers["replicas"] * container["resources"]["limits"]["nvidia.com/gpu"]
    (command,) = re.findall(
        r"^isobit train run.yaml (.*fleet\.cluster.*)$", PAGE.replace("\\\n", " "), re.MULTILINE
    )
    (head,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert head["resources"]["limits"]["nvidia.com/gpu"] == 1  # the learner's, which Ray has not
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    assert (
        load_config(write_config(tmp_path, tmp_path), shlex.split(command)).fleet.engines == engines
    )


@pytest.mark.parametrize("wrong", ["--nproc-per-nodes 8", "--rdzv-endpoints x"])
def test_control_another_option_is_not_torchruns(wrong: str) -> None:
    with pytest.raises(SystemExit):
        launcher_takes([*shlex.split(wrong), "-m", "isobit", "train"])
