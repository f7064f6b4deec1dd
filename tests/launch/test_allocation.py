"""Which role is on which node, the step that starts it, and what its process finds there."""

import os
import signal
import stat
import subprocess
import sys

import pytest

from rlmake.config.deployment import MultiNode
from rlmake.core.errors import UserError
from rlmake.launch.allocation import Allocation


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job of four nodes, whose `scontrol` is a little script."""
    script = tmp_path / "scontrol"
    script.write_text(
        '#!/bin/sh\nif [ "$2" = hostnames ]; then printf "n1\\nn2\\nn3\\nn4\\n"; else\n'
        'for n in n1 n2 n3 n4; do echo "NodeName=$n NodeAddr=10.0.0.${n#n} State=IDLE"; done; fi\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-4]")


def test_inference_first_then_the_trainer(job):
    place = MultiNode(gpus_per_node=8, num_train_nodes=2, num_infer_nodes=1, num_infer_replicas=2)
    found = Allocation.of(place, managed=True)
    assert (found.inference, found.trainer, found.orchestrator) == (("n1", "n2"), ("n3", "n4"), "n3")
    assert found.master == ("10.0.0.3", 20123)
    place = MultiNode(gpus_per_node=8, num_train_nodes=2, num_infer_nodes=2, orchestrator_on_inference=True)
    assert Allocation.of(place, managed=True).orchestrator == "n2"
    alone = Allocation.of(MultiNode(gpus_per_node=0, num_train_nodes=4), managed=False)
    assert alone.inference == () and alone.trainer == ("n1", "n2", "n3", "n4") and alone.orchestrator == "n1"


def test_too_few_nodes_and_no_job(job, monkeypatch):
    place = MultiNode(gpus_per_node=8, num_train_nodes=4)
    with pytest.raises(UserError, match=r"5 nodes are wanted \(1 for inference\), SLURM job 123 has 4"):
        Allocation.of(place, managed=True)
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(UserError, match="runs in a SLURM job"):
        Allocation.of(place, managed=False)


def test_a_step_asks_for_its_node_and_gpus(job):
    found = Allocation.of(MultiNode(gpus_per_node=8, num_train_nodes=1), managed=False)
    step = found.srun("n1", ["x", "y"], [2, 3])
    assert step[0] == "srun" and {"--nodelist=n1", "--gres=gpu:8", "--overlap"} <= set(step)
    assert step[-4:] == ["2,3", "--", "x", "y"]
    assert "--gres=none" in found.srun("n1", ["x"])


def test_a_process_on_a_node_has_its_own_gpus_and_leaves_sigterm_to_the_launcher():
    """Its part of the step's GPUs, no launcher's mark, SIGTERM blocked, SIGUSR1 ignored until it has a handler."""
    probe = (
        "import os, signal; print(os.environ['CUDA_VISIBLE_DEVICES'], 'RLMAKE_LAUNCHER' in os.environ, "
        "signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []), "
        "signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN)"
    )
    command = [sys.executable, "-m", "rlmake.launch.node", "--gpus", "1,3", "--", sys.executable, "-c", probe]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "4,5,6,7", "RLMAKE_LAUNCHER": "1:1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["5,7", "False", "True", "True"]
    env["CUDA_VISIBLE_DEVICES"] = "0"
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr == "error: 2 GPUs are wanted here and SLURM gives 1\n"
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_components_over_nodes_know_their_allocation(job, tmp_path, monkeypatch):
    from rlmake.launch.attempt import allocate
    from rlmake.launch.nodes import NodeComponents

    monkeypatch.setattr(Allocation, "check_sees", lambda self, folder: None)
    found = Allocation.of(MultiNode(gpus_per_node=0, num_train_nodes=1), managed=True, beside_engines=True)
    assert found.orchestrator == found.inference[0] == "n1"
    components = NodeComponents.of(None, allocate(tmp_path), found)
    assert components.allocation is found and components._engines == {}
