"""A real SLURM on this host for the tests, as root, on Debian:

    python tests/slurm/cluster.py run [--accounting] -- CMD    start it, run CMD in it, stop it, whatever happens
                                  up [--accounting] | exec -- CMD | down    the same in three steps

Six `slurmd` on loopback ports stand for six nodes of 8 CPUs and 4 GPUs (null devices, so they can be handed out and
nothing can run on them). Everything but munge's key lies below $SLURM_TEST_DIR; ports are free ones, and the commands
find their cluster by $SLURM_CONF, so a SLURM or a munge that this host has already is left alone. `--accounting` adds
slurmdbd with MariaDB, and a controller that forgets ended jobs at once.

All processes of the cluster, those of its jobs too, carry its $SLURM_CONF in their environment: by that they are found
and ended, also after a run that was killed.

Partitions: `gpu` (default, one node), `wide` (three), `solo` (two), `high` (preempts `solo` by requeueing), `far` (a
node on another host, which is down). Tests of jobs keep to `gpu`, of runs over several nodes to `wide`, of other runs
to `solo`, and so go side by side.
"""

import ctypes
import fcntl
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(os.environ.get("SLURM_TEST_DIR", "/tmp/rlmake-slurm"))
CONF = ROOT / "etc" / "slurm.conf"
PROLOG = ROOT / "prolog-fails"  # names of nodes, one a line, that can start no job
NODES = 6
WIDE, SOLO = range(1, 4), range(5, 7)
PORTS = range(11000, 19000)  # below those that the system gives away, and those of the ranks' rendezvous
PACKAGES = ["slurm-wlm", "munge"]
ACCOUNTING = ["slurmdbd", "mariadb-server"]


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as one:
            try:
                one.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    sys.exit("no free ports")


def conf(host: str, accounting: int | None) -> str:
    """slurm.conf. Ended jobs stay known for half an hour: the tests count them. `accounting`: slurmdbd's port; then
    they are forgotten after seconds."""
    if accounting:
        records = [
            "AccountingStorageType=accounting_storage/slurmdbd", "AccountingStorageHost=localhost",
            f"AccountingStoragePort={accounting}", "AccountingStorageEnforce=associations",
            "JobAcctGatherType=jobacct_gather/linux", "MinJobAge=2",
        ]  # fmt: skip
    else:
        records = ["AccountingStorageType=accounting_storage/none", "JobAcctGatherType=jobacct_gather/none",
                   "MinJobAge=1800"]  # fmt: skip
    ctld, far, *ports = free_ports(NODES + 2)
    size = "CPUs=8 Sockets=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=8000 Gres=gpu:4 State=UNKNOWN"
    nodes = [f"NodeName=node{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={p} {size}" for i, p in enumerate(ports, 1)]
    lines = [
        "ClusterName=rlmaketest", f"SlurmctldHost={host}(127.0.0.1)", "SlurmUser=root", "SlurmdUser=root",
        f"SlurmctldPort={ctld}", f"StateSaveLocation={ROOT}/state", f"SlurmctldPidFile={ROOT}/run/ctld.pid",
        f"SlurmdPidFile={ROOT}/run/slurmd.%n.pid", f"SlurmdSpoolDir={ROOT}/spool/%n",
        f"SlurmctldLogFile={ROOT}/log/ctld.log", f"SlurmdLogFile={ROOT}/log/slurmd.%n.log",
        "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "MpiDefault=none",
        "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core_Memory", "DefMemPerCPU=100", "GresTypes=gpu",
        "SlurmdParameters=config_overrides", "SchedulerParameters=sched_interval=2,bf_interval=2,requeue_delay=5",
        f"Prolog={ROOT}/etc/prolog", "ReturnToService=2", "KillWait=20", "InactiveLimit=0", "SlurmdTimeout=60",
        "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE", "JobRequeue=1", *records, *nodes,
        f"NodeName=far1 NodeHostname=elsewhere NodeAddr=127.0.0.1 Port={far} CPUs=8 RealMemory=8000 State=DOWN",
        "PartitionName=gpu Nodes=node4 Default=YES MaxTime=INFINITE State=UP PriorityTier=1",
        "PartitionName=wide Nodes=node[1-3] MaxTime=INFINITE State=UP PriorityTier=1",
        "PartitionName=solo Nodes=node[5-6] MaxTime=INFINITE State=UP PriorityTier=1",
        "PartitionName=high Nodes=node[5-6] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF",
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
        if not shutil.which("apt-get"):
            sys.exit(f"there is no apt-get here: install {', '.join(wanted)} by hand")
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "update", "-q", env=env)
        run("apt-get", "install", "-y", "-q", "--no-install-recommends", *wanted, env=env)


def wait(ready, what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            sys.exit(f"{what}: not there after {seconds:g} s; see {ROOT}/log")
        time.sleep(0.1)


def daemon(name: str, *command: str, tied: bool = False, user: str | None = None) -> None:
    """Start a daemon in a session of its own; `tied`: it ends with this process, even when that is killed."""
    die = ctypes.CDLL(None).prctl
    with open(ROOT / "log" / f"{name}.out", "ab") as log:
        subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=[] if user else None,
            preexec_fn=(lambda: die(1, signal.SIGTERM)) if tied else None,  # PR_SET_PDEATHSIG
        )


def munge(tied: bool) -> None:
    """Munge, unless it answers already."""

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
    daemon("munged", shutil.which("munged") or "munged", "--foreground", "--force", tied=tied, user="munge")
    wait(answers, "munge")


def database(tied: bool) -> int:
    """MariaDB and slurmdbd, with one account `lab` of the user who runs this. Returns slurmdbd's port."""
    folder, sock = ROOT / "mysql", ROOT / "mysql.sock"
    sql_port, port = free_ports(2)
    folder.mkdir()
    shutil.chown(folder, "mysql", "mysql")
    ROOT.chmod(0o777)
    run("mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={folder}", "--skip-test-db")
    daemon("mariadbd", shutil.which("mariadbd") or "mariadbd", "--no-defaults", "--user=mysql", f"--datadir={folder}",
           f"--socket={sock}", f"--port={sql_port}", "--bind-address=127.0.0.1", f"--pid-file={folder}/pid",
           "--innodb-buffer-pool-size=128M", "--innodb-lock-wait-timeout=900", tied=tied)  # fmt: skip
    sql = ["mariadb", "--no-defaults", f"--socket={sock}", "-e"]
    wait(lambda: run(*sql, "select 1", check=False).returncode == 0, "mariadb", 60)
    grants = "create database slurm; " + "".join(
        f"create user slurm@'{at}' identified by 'slurm'; grant all on slurm.* to slurm@'{at}'; "
        for at in ("127.0.0.1", "localhost")
    )
    run(*sql, grants)
    file = ROOT / "etc" / "slurmdbd.conf"
    file.write_text(
        f"DbdHost=localhost\nDbdPort={port}\nSlurmUser=root\nLogFile={ROOT}/log/dbd.log\n"
        f"PidFile={ROOT}/run/dbd.pid\nStorageType=accounting_storage/mysql\nStorageHost=127.0.0.1\n"
        f"StoragePort={sql_port}\nStorageUser=slurm\nStoragePass=slurm\nStorageLoc=slurm\n"
    )
    file.chmod(0o600)
    return port


def accounts(tied: bool) -> None:
    """slurmdbd, and in it the cluster, its account and this user."""
    daemon("slurmdbd", "slurmdbd", "-D", tied=tied)
    wait(lambda: run("sacctmgr", "-n", "show", "cluster", check=False).returncode == 0, "slurmdbd", 60)
    run("sacctmgr", "-i", "add", "cluster", "rlmaketest")
    run("sacctmgr", "-i", "add", "account", "lab", "Cluster=rlmaketest")
    run("sacctmgr", "-i", "add", "user", "root", "Account=lab", "DefaultAccount=lab")


def up(accounting: bool, tied: bool = False) -> None:
    if os.geteuid() != 0:
        sys.exit("a SLURM for tests is started as root")
    down()
    install(accounting)
    host = socket.gethostname().partition(".")[0]
    for name in ("etc", "state", "log", "run", "dev", *(f"spool/node{i}" for i in range(1, NODES + 1))):
        (ROOT / name).mkdir(parents=True, exist_ok=True)
    os.environ["SLURM_CONF"] = str(CONF)
    for i in range(4):
        os.mknod(ROOT / "dev" / f"nvidia{i}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    (ROOT / "etc" / "gres.conf").write_text(f"NodeName=node[1-{NODES}] Name=gpu File={ROOT}/dev/nvidia[0-3]\n")
    (ROOT / "etc" / "cgroup.conf").write_text("CgroupAutomount=no\n")
    prolog = ROOT / "etc" / "prolog"
    prolog.write_text(f'#!/bin/sh\n! grep -qsx "$SLURMD_NODENAME" {PROLOG}\n')
    prolog.chmod(0o755)
    munge(tied)
    CONF.write_text(conf(host, database(tied) if accounting else None))
    if accounting:
        accounts(tied)
    controller(tied=tied)
    for i in range(1, NODES + 1):
        daemon(f"slurmd{i}", "slurmd", "-D", "-N", f"node{i}", tied=tied)

    def idle() -> bool:
        return (
            run("sinfo", "-h", "-N", "-p", "gpu,wide,solo", "-o", "%t", check=False).stdout.split() == ["idle"] * NODES
        )

    wait(idle, "idle nodes", 60)


def controller(*options: str, tied: bool = False) -> None:
    """Start slurmctld, and wait until it answers."""
    daemon("slurmctld", "slurmctld", "-D", *options, tied=tied)
    wait(lambda: "is UP" in run("scontrol", "ping", check=False).stdout, "slurmctld", 60)


def members(name: str = "") -> Iterator[int]:
    """Pids of the cluster's processes, those of its jobs too; with `name` those of that program. Not ourselves, nor
    who called us."""
    ours, pid = {os.getpid()}, os.getpid()
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        ours.add(pid)
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or int(entry.name) in ours:
                continue
            if f"SLURM_CONF={CONF}".encode() not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            if not name or (entry / "comm").read_text().strip() == name:
                yield int(entry.name)
        except OSError:
            continue


def end(name: str = "", grace: float = 10.0) -> None:
    """End the cluster's processes, or those of one program: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in (found := list(members(name))):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + grace
        while found and time.monotonic() < deadline:
            time.sleep(0.1)
            found = list(members(name))


def down() -> None:
    """End all there is of the cluster, and remove its folder: first the nodes, or they restart what is cancelled."""
    for name in ("slurmctld", "slurmd", ""):
        end(name, grace=10.0 if name else 3.0)  # what supervises a job's step hears no SIGTERM
    shutil.rmtree(ROOT, ignore_errors=True)


def within(command: list[str], accounting: bool) -> int:
    """Run a command in a cluster of its own, which goes with it. Exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with open(ROOT.with_name(ROOT.name + ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another SLURM for tests runs on this host, in {ROOT}")
        process = None
        try:
            up(accounting, tied=True)
            process = subprocess.Popen(command)
            while True:
                try:
                    return process.wait()
                except KeyboardInterrupt:  # pytest has it too, and ends its tests
                    continue
        finally:
            if process is not None and process.poll() is None:
                process.terminate()
            down()


def main() -> None:
    own, _, command = ("\0".join(sys.argv[1:])).partition("\0--\0")
    action, *options = own.split("\0")
    words = command.split("\0")
    accounting = "--accounting" in options
    if action not in ("run", "up", "exec", "down") or set(options) - {"--accounting"} or (
        bool(command) != (action in ("run", "exec"))
    ):  # fmt: skip
        sys.exit(__doc__)
    if action == "run":
        sys.exit(within(words, accounting))
    if action == "up":
        up(accounting)
        print(f"export SLURM_CONF={CONF}")
    elif action == "exec":
        os.environ["SLURM_CONF"] = str(CONF)
        os.execvp(words[0], words)
    else:
        down()


if __name__ == "__main__":
    main()
