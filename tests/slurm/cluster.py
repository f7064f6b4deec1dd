"""A real SLURM on this host for the tests: `python tests/slurm/cluster.py up | down | run -- CMD`, as root, on Debian.

Four `slurmd` on loopback ports stand for four nodes of 8 CPUs and 4 GPUs (null devices, so they can be handed out and
nothing can run on them). Everything but munge's key lies below $SLURM_TEST_DIR; the commands find their cluster by
$SLURM_CONF, so a SLURM that this host has already is left alone. `up --accounting` adds slurmdbd with MariaDB.

Partitions: `gpu` (default, one node), `work` (three), `high` (preempts `work` by requeueing), `far` (a node on another
host, which is down). Tests of jobs keep to `gpu`, tests of runs to `work`, and so go side by side.
"""

import argparse
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(os.environ.get("SLURM_TEST_DIR", "/tmp/rlmake-slurm"))
NODES = 4
BASE = int(os.environ.get("SLURM_TEST_PORT", "26800"))
CTLD, DBD, SQL, SLURMD = BASE, BASE + 1, BASE + 2, BASE + 10
PACKAGES = ["slurm-wlm", "munge"]
ACCOUNTING = ["slurmdbd", "mariadb-server"]


def conf(host: str, accounting: bool) -> str:
    """slurm.conf. Finished jobs stay known for half an hour: the tests count them."""
    if accounting:
        records = [
            "AccountingStorageType=accounting_storage/slurmdbd", f"AccountingStorageHost={host}",
            f"AccountingStoragePort={DBD}", "AccountingStorageEnforce=associations",
            "JobAcctGatherType=jobacct_gather/linux",
        ]  # fmt: skip
    else:
        records = ["AccountingStorageType=accounting_storage/none", "JobAcctGatherType=jobacct_gather/none"]
    last = SLURMD + NODES - 1
    lines = [
        "ClusterName=rlmaketest", f"SlurmctldHost={host}", "SlurmUser=root", "SlurmdUser=root",
        "AuthType=auth/munge", "CryptoType=crypto/munge", f"SlurmctldPort={CTLD}",
        f"StateSaveLocation={ROOT}/state", f"SlurmctldPidFile={ROOT}/run/ctld.pid",
        f"SlurmdPidFile={ROOT}/run/slurmd.%n.pid", f"SlurmdSpoolDir={ROOT}/spool/%n",
        f"SlurmctldLogFile={ROOT}/log/ctld.log", f"SlurmdLogFile={ROOT}/log/slurmd.%n.log",
        "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "MpiDefault=none", "SwitchType=switch/none",
        "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core_Memory", "DefMemPerCPU=100", "GresTypes=gpu",
        "SlurmdParameters=config_overrides", "SchedulerParameters=sched_interval=2,bf_interval=2,requeue_delay=5",
        "ReturnToService=2", "MinJobAge=1800", "KillWait=12", "InactiveLimit=0", "SlurmdTimeout=60",
        "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE", "JobRequeue=1", *records,
        f"NodeName=node[1-{NODES}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{SLURMD}-{last}] CPUs=8 Sockets=1 "
        "CoresPerSocket=8 ThreadsPerCore=1 RealMemory=8000 Gres=gpu:4 State=UNKNOWN",
        f"NodeName=far1 NodeHostname=elsewhere NodeAddr=127.0.0.1 Port={last + 1} CPUs=8 RealMemory=8000 State=DOWN",
        f"PartitionName=gpu Nodes=node{NODES} Default=YES MaxTime=INFINITE State=UP PriorityTier=1",
        f"PartitionName=work Nodes=node[1-{NODES - 1}] MaxTime=INFINITE State=UP PriorityTier=1",
        f"PartitionName=high Nodes=node[1-{NODES - 1}] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF",
        "PartitionName=far Nodes=far1 MaxTime=60 State=UP",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def run(*command: str, check: bool = True, **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, check=check, capture_output=True, text=True, timeout=600, **options)


def install(accounting: bool) -> None:
    """Debian's packages, unless their programs are there."""
    wanted = [] if shutil.which("slurmctld") and shutil.which("munged") else list(PACKAGES)
    if accounting and not (shutil.which("slurmdbd") and shutil.which("mariadbd")):
        wanted += ACCOUNTING
    if wanted:
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "update", "-q", env=env)
        run("apt-get", "install", "-y", "-q", "--no-install-recommends", *wanted, env=env)


def wait(ready, what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            sys.exit(f"{what}: not there after {seconds:g} s; see {ROOT}/log")
        time.sleep(0.1)


def daemon(name: str, *command: str) -> None:
    """Start a daemon in a session of its own and note its pid."""
    with open(ROOT / "log" / f"{name}.out", "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    with open(ROOT / "pids", "a") as pids:
        print(process.pid, file=pids)


def munge() -> None:
    def answers() -> bool:
        return run("munge", "-n", check=False).returncode == 0

    if answers():
        return
    for folder, mode in (("/run/munge", 0o755), ("/var/lib/munge", 0o711), ("/etc/munge", 0o700),
                         ("/var/log/munge", 0o700)):  # fmt: skip
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.chown(folder, "munge", "munge")
        os.chmod(folder, mode)
    key = Path("/etc/munge/munge.key")
    if not key.is_file() or not key.stat().st_size:
        key.write_bytes(os.urandom(1024))
    shutil.chown(key, "munge", "munge")
    key.chmod(0o400)
    daemon("munged", "runuser", "-u", "munge", "--", shutil.which("munged") or "munged", "--foreground")
    wait(answers, "munge")


def database(host: str) -> None:
    """MariaDB and slurmdbd, with one account `lab` of the user who runs this."""
    folder, sock = ROOT / "mysql", ROOT / "mysql.sock"
    folder.mkdir()
    shutil.chown(folder, "mysql", "mysql")
    ROOT.chmod(0o777)
    run("mariadb-install-db", "--user=mysql", f"--datadir={folder}", "--skip-test-db")
    daemon("mariadbd", shutil.which("mariadbd") or "mariadbd", "--no-defaults", "--user=mysql", f"--datadir={folder}",
           f"--socket={sock}", f"--port={SQL}", "--bind-address=127.0.0.1", f"--pid-file={folder}/pid",
           "--innodb-buffer-pool-size=128M", "--innodb-lock-wait-timeout=900")  # fmt: skip
    sql = ["mariadb", "--no-defaults", f"--socket={sock}", "-e"]
    wait(lambda: run(*sql, "select 1", check=False).returncode == 0, "mariadb", 60)
    grants = "create database slurm; " + "".join(
        f"create user slurm@'{at}' identified by 'slurm'; grant all on slurm.* to slurm@'{at}'; "
        for at in ("127.0.0.1", "localhost")
    )
    run(*sql, grants)
    file = ROOT / "etc" / "slurmdbd.conf"
    file.write_text(
        f"AuthType=auth/munge\nDbdHost={host}\nDbdPort={DBD}\nSlurmUser=root\nLogFile={ROOT}/log/dbd.log\n"
        f"PidFile={ROOT}/run/dbd.pid\nStorageType=accounting_storage/mysql\nStorageHost=127.0.0.1\n"
        f"StoragePort={SQL}\nStorageUser=slurm\nStoragePass=slurm\nStorageLoc=slurm\n"
    )
    file.chmod(0o600)
    daemon("slurmdbd", "slurmdbd", "-D")
    wait(lambda: run("sacctmgr", "-n", "show", "cluster", check=False).returncode == 0, "slurmdbd", 60)
    run("sacctmgr", "-i", "add", "cluster", "rlmaketest", check=False)
    run("sacctmgr", "-i", "add", "account", "lab", "Cluster=rlmaketest")
    run("sacctmgr", "-i", "add", "user", "root", "Account=lab", "DefaultAccount=lab")


def up(accounting: bool) -> None:
    down()
    install(accounting)
    host = socket.gethostname()
    for name in ("etc", "state", "log", "run", "dev", *(f"spool/node{i}" for i in range(1, NODES + 1))):
        (ROOT / name).mkdir(parents=True, exist_ok=True)
    os.environ["SLURM_CONF"] = str(ROOT / "etc" / "slurm.conf")
    for i in range(4):
        os.mknod(ROOT / "dev" / f"nvidia{i}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    (ROOT / "etc" / "gres.conf").write_text(f"NodeName=node[1-{NODES}] Name=gpu File={ROOT}/dev/nvidia[0-3]\n")
    (ROOT / "etc" / "cgroup.conf").write_text("CgroupAutomount=no\n")
    (ROOT / "etc" / "slurm.conf").write_text(conf(host, accounting))
    munge()
    if accounting:
        database(host)
    daemon("slurmctld", "slurmctld", "-D")
    for i in range(1, NODES + 1):
        daemon(f"slurmd{i}", "slurmd", "-D", "-N", f"node{i}")

    def idle() -> bool:
        return run("sinfo", "-h", "-N", "-p", "gpu,work", "-o", "%t", check=False).stdout.split() == ["idle"] * NODES

    wait(idle, "idle nodes", 60)
    print(f"export SLURM_CONF={os.environ['SLURM_CONF']}")


def down() -> None:
    """End what `up` started, by pid, and remove its folder."""
    conf_file = ROOT / "etc" / "slurm.conf"
    if conf_file.is_file():
        os.environ["SLURM_CONF"] = str(conf_file)
        run("scancel", "-u", str(os.getuid()), check=False)
    pids = [int(line) for line in (ROOT / "pids").read_text().split()] if (ROOT / "pids").is_file() else []
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in reversed(pids):
            try:
                os.killpg(pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + 8
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.1)
    shutil.rmtree(ROOT, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["up", "down", "run"])
    parser.add_argument("--accounting", action="store_true")
    own, _, command = " ".join(sys.argv[1:]).partition(" -- ")
    args = parser.parse_args(own.split())
    if args.action == "up":
        up(args.accounting)
    elif args.action == "down":
        down()
    else:
        os.environ["SLURM_CONF"] = str(ROOT / "etc" / "slurm.conf")
        sys.exit(subprocess.run(command, shell=True, check=False).returncode)


if __name__ == "__main__":
    main()
