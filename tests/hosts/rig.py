"""Several hosts on one machine, for programs that cannot tell them from machines of their own.

    with Rig(folder, hosts=2) as rig:
        rig.start("node0", ["deepspeed", "--hostfile", str(rig.hostfile("node0", "node1")), …], log)

A host is a set of namespaces (network, host name, IPC, processes, mounts) on one bridge, with an sshd, its own
/etc/hosts, /run and /dev/shm, and `folder/local`, which it does not share. It ends with this process.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "tests" / room) for room in ("launch", "faults")]

from forked_runs import Finished, ForkedRuns  # noqa: E402
from tiny_run import QUICKSTART, TINY  # noqa: E402

PACKAGES = {  # a program of each Debian package that the tests need → the package
    "sshd": "openssh-server",
    "pdsh": "pdsh",
    "slurmctld": "slurm-wlm",
    "munged": "munge",
    "mpirun.openmpi": "openmpi-bin",
    "mpirun.mpich": "mpich",
    "ip": "iproute2",
}
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # hosts that are on the same cores must not spin
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"]),
    "PYTHONDONTWRITEBYTECODE": "1",
}
KINDS = ("--net", "--uts", "--ipc", "--pid", "--mount")
NAMESPACES = (*KINDS, "--fork", "--kill-child", "--mount-proc")
# The first process of a host, which reaps what others leave.
HOST = """set -e
hostname "$NAME"
ip link set lo up
mount -t tmpfs tmpfs /run; mkdir -p /run/sshd /run/munge /run/lock
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs "$FOLDER/local"
mount --bind "$FOLDER/hosts.$NAME" /etc/hosts
mount --bind "$FOLDER/ssh_config" /etc/ssh/ssh_config
/usr/sbin/sshd -f "$FOLDER/sshd_config"
echo up >"$FOLDER/up.$NAME"
sleep infinity & wait"""
SSHD = """HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
UseDNS no
PasswordAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
"""
SSH = """Host *
  User root
  IdentityFile {folder}/key
  UserKnownHostsFile {folder}/known_hosts
  BatchMode yes
  ConnectTimeout 5
  ServerAliveInterval 5
  ServerAliveCountMax 3
  LogLevel ERROR
"""
SLURM = """ClusterName=rig
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
KillWait=10
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={hosts} CPUs=2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=30
PartitionName=high Nodes=ALL PriorityTier=10
"""


def lacking() -> str:
    """Why there can be no rig here; nothing where there can."""
    if os.geteuid() != 0:
        return "hosts are namespaces, which need root"
    path = ENVIRONMENT["PATH"]
    if packages := sorted({name for program, name in PACKAGES.items() if not shutil.which(program, path=path)}):
        return f"apt-get install {' '.join(packages)}"
    asked = "ip link add b0 type bridge && ip link add v0 type veth peer name v1 && mount -t tmpfs tmpfs /run"
    tried = subprocess.run(["unshare", *NAMESPACES, "sh", "-c", asked], capture_output=True, text=True, check=False)
    return f"no namespaces for hosts: {tried.stderr.strip()}" if tried.returncode else ""


def until(condition: Callable[[], Any], seconds: float, pause: float = 0.3) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s")
        time.sleep(pause)
    return value


def enter(first: int) -> None:
    """Go on, in a child, on the host whose first process is `first`; this process ends as the child does."""
    system = ctypes.CDLL(None, use_errno=True)
    here = Path.cwd()
    handles = [os.open(f"/proc/{first}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "ipc", "pid", "mnt")]
    for handle in handles:
        if system.setns(handle, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(handle)
    os.chdir(here)
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)


class Rig:
    """Hosts `node0`, `node1` and so on, at 10.77.0.1 and so on; they share `folder`."""

    def __init__(self, folder: Path, hosts: int) -> None:
        self.folder = folder
        self.hosts = [f"node{number}" for number in range(hosts)]
        self.first: dict[str, int] = {}
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:
            holder.kill()
        for holder in self._holders:
            holder.wait()

    def _begin(self) -> None:
        (self.folder / "local").mkdir(parents=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / "key"], check=True)
        key = (self.folder / "key.pub").read_text()
        (self.folder / "known_hosts").write_text(f"node*,10.77.0.* {key}")
        (self.folder / "sshd_config").write_text(SSHD.format(folder=self.folder))
        (self.folder / "ssh_config").write_text(SSH.format(folder=self.folder))
        forwarded = ("DS_ACCELERATOR", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
        (self.folder / "deepspeed_env").write_text("".join(f"{name}={ENVIRONMENT[name]}\n" for name in forwarded))
        self._switch = self._hold("unshare", "--net", "sleep", "infinity")
        until(lambda: _network(self._switch.pid) != _network(os.getpid()), 20, 0.02)
        self._ip("link", "add", "switch", "type", "bridge")
        self._ip("link", "set", "switch", "up")
        for number, name in enumerate(self.hosts):
            self.resolve(name)
            words = {"NAME": name, "FOLDER": str(self.folder)}
            self.first[name] = first = _only_child(self._hold("unshare", *NAMESPACES, "bash", "-c", HOST, **words).pid)
            self._ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(first))
            self._ip("link", "set", name, "master", "switch", "up")
            self.run(name, "ip", "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            self.run(name, "ip", "link", "set", "eth0", "up")
        for name in self.hosts:
            until((self.folder / f"up.{name}").exists, 30, 0.02)

    def _hold(self, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        words = ["setpriv", "--pdeathsig", "KILL", *command]
        self._holders.append(holder := subprocess.Popen(words, env=os.environ | ENVIRONMENT | variables))
        return holder

    def _ip(self, *words: str) -> None:
        subprocess.run(["nsenter", "-t", str(self._switch.pid), "--net", "ip", *words], check=True)

    def resolve(self, host: str, **addresses: str) -> None:
        """Write `host`'s /etc/hosts, where all have their addresses but for those that are given."""
        told = {name: f"10.77.0.{number + 1}" for number, name in enumerate(self.hosts)} | addresses
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in told.items())]
        (self.folder / f"hosts.{host}").write_text("\n".join(lines) + "\n")

    def hostfile(self, *hosts: str, slots: int = 1) -> Path:
        path = self.folder / f"hostfile.{'.'.join(hosts)}"
        path.write_text("".join(f"{host} slots={slots}\n" for host in hosts))
        return path

    def start(self, host: str, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command on a host, in the repository; what it prints goes to the end of `log`."""
        with log.open("ab") as output:
            return subprocess.Popen(self._entered(host, command), env=self._environment(), stdout=output, stderr=output)

    def run(
        self, host: str, *command: str, check: bool = True, timeout: float = 240.0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._entered(host, command),
            env=self._environment() | variables,
            capture_output=True,
            text=True,
            check=check,
            timeout=timeout,
        )

    def _entered(self, host: str, command: Sequence[str]) -> list[str]:
        return ["nsenter", "-t", str(self.first[host]), *KINDS, f"--wd={REPOSITORY}", *command]

    def _environment(self) -> dict[str, str]:
        own = {"DS_ENV_FILE": str(self.folder / "deepspeed_env"), "PYTHONPATH": str(REPOSITORY)}
        return os.environ | ENVIRONMENT | own | {"SLURM_CONF": str(self.folder / "slurm" / "slurm.conf")}

    def processes(self, host: str) -> dict[str, list[psutil.Process]]:
        found: dict[str, list[psutil.Process]] = {}
        for process in psutil.process_iter():
            try:
                here = os.readlink(f"/proc/{process.pid}/ns/pid") == os.readlink(f"/proc/{self.first[host]}/ns/pid")
                words = {Path(word).name for word in process.cmdline()[:4]} if here else set()
            except (OSError, psutil.Error):  # it has just ended, or the host has
                continue
            if kind := next((kind for program, kind in PROGRAMS.items() if program in words), None):
                found.setdefault(kind, []).append(process)
        return found

    def kill(self, host: str, kind: str, number: signal.Signals = signal.SIGKILL) -> None:
        for process in self.processes(host)[kind]:
            process.send_signal(number)

    def cut(self, host: str) -> None:
        self._ip("link", "set", host, "down")

    def mend(self, host: str) -> None:
        self._ip("link", "set", host, "up")

    def switch_off(self, host: str) -> None:
        """End all that the host runs, at once and for good; its connections are reset."""
        os.kill(self.first.pop(host), signal.SIGKILL)

    def start_slurm(self, *hosts: str) -> None:
        """Bring up Slurm over hosts, with the partitions `low` and `high`, which takes nodes from the other."""
        folder = self.folder / "slurm"
        (folder / "state").mkdir(parents=True)
        (key := folder / "munge.key").write_bytes(os.urandom(128))
        key.chmod(0o600)
        text = SLURM.format(first=hosts[0], folder=folder, hosts=",".join(hosts))
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for host in hosts:
            (folder / f"spool.{host}").mkdir()
            files = {"log-file": f"munged.{host}.log", "seed-file": f"munge.seed.{host}", "key-file": key.name}
            options = [f"--{option}={folder / name}" for option, name in files.items()]
            self.run(host, "munged", "--force", "--pid-file=/run/munge/munged.pid", *options)
            if host == hosts[0]:
                self.run(host, "slurmctld")
            self.run(host, "slurmd")
        idle = ("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D")
        until(lambda: self.run(hosts[0], *idle, check=False).stdout.strip() == str(len(hosts)), 60)


# A program's name among the first words of its command line → what it is to a run.
PROGRAMS = {
    "deepspeed.launcher.launch": "launch.py",
    "deepspeed": "deepspeed",
    "torchrun": "agent",
    "train.py": "rank",
    "pdsh": "pdsh",
}


def _network(process: int) -> str:
    return os.readlink(f"/proc/{process}/ns/net")


def _only_child(process: int) -> int:
    children = Path(f"/proc/{process}/task/{process}/children")
    return int(until(children.read_text, 20, 0.02))


FSDP = {"infra.distributed_type": "fsdp", "infra.offload_optimizer": "none"}
DEEPSPEED = {"infra.distributed_type": "deepspeed"}
SETTINGS = TINY | {"data.num_lanes": 4, "training.logging_steps": 1, "infra.start_timeout_minutes": 1}

# Changes of a run's arguments for one that is to be ended.
ENDLESS = {
    "training__num_train_steps": 100_000,
    "training__lr_scheduler_type": "constant",
    "training__save_steps": 20,
    "training__eval_samples": 0,
    "training__logging_steps": 5,
    "infra__distributed_timeout_minutes": 1,
}


def words(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in settings.items()]


def arguments(folder: Path, engine: Mapping[str, Any] = FSDP, **changes: Any) -> list[str]:
    """The words of train.py for a run of six steps; `changes` use `__` for the dot."""
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    return ["--config", QUICKSTART, *words(SETTINGS | engine | changed | {"infra.output_dir": folder})]


def run(
    rig: Rig,
    forked: ForkedRuns,
    hosts: Mapping[str, int],
    own: Sequence[str],
    *,
    on: Mapping[str, Sequence[str]] | None = None,
    variables: Mapping[str, Any] | None = None,
    unset: Sequence[str] = (),
) -> Finished:
    """Run train.py with arguments of one's `own` on so many ranks of each host, as torchrun would start it. `on`:
    further arguments of a host. `variables`: instead of torchrun's, but for those that are `unset`."""
    places: list[dict[str, Any]] = []
    world_size = sum(hosts.values())
    for number, (host, here) in enumerate(hosts.items()):
        for local in range(here):
            place = {"RANK": len(places), "LOCAL_RANK": local, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": here}
            place |= {"GROUP_RANK": number, "GROUP_WORLD_SIZE": len(hosts), "TORCHELASTIC_RUN_ID": "forked"}
            place |= {"MASTER_ADDR": next(iter(hosts)), "MASTER_PORT": 29400, **(variables or {})}
            is_alone = world_size == 1 and not variables
            told = {} if is_alone else {name: value for name, value in place.items() if name not in unset}
            more = list((on or {}).get(host, ()))
            places.append({"first": rig.first[host], "variables": told, "arguments": more, "seconds": 240})
    return forked.run(list(own), places=places)


def start(rig: Rig, typed: str, *hosts: str, log: Path) -> list[subprocess.Popen[bytes]]:
    """Type a command on the first of the hosts, or torchrun's on each; log.HOST is what it prints."""
    typing = hosts if typed.startswith("torchrun") else hosts[:1]
    return [rig.start(host, ["bash", "-c", typed], log.with_name(f"{log.name}.{host}")) for host in typing]


def told(folder: Path) -> dict[str, Any]:
    file = folder / "run.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-????????"))
