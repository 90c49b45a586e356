"""`sharder launch --engine ray`: one process on each host of a Ray cluster, started again on the hosts that are left.

Plain actors, one for each host, start the process as the local engine does; this driver asks them how it goes, and decides by the
same rules (`sharder.launch.elastic`). A host is gone when Ray says so, or when its actor does not answer. Every attempt has a port of
its own, and the processes of the one before are ended first: those of a lost host live on for a while, and must meet nobody.

Ray (extra `ray`) is imported inside the functions.
"""

import os
import random
import sys
import time
from pathlib import Path

from sharder.config import UserError
from sharder.launch import elastic
from sharder.launch.processes import Launch, free_port
from sharder.launch.supervisor import Journal, Options, policy_of
from sharder.launch.watch import Limits, Watch
from sharder.lock import InUse, take_lock
from sharder.stop import PREEMPTED

POLL_S = 0.2
ANSWER_S = 3.0
"""How long an actor may take to answer; it does nothing else."""
HEALTH = {
    "RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "1000", "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "0",
}  # fmt: skip
"""For the head's environment, when it is started: a lost host is noticed after 2 s instead of 13 (measured with Ray 2.60)."""


class Host:
    """An actor: the process of one attempt on this host."""

    def address(self) -> tuple[str, int]:
        """Of this host, with a free port."""
        import ray

        return ray.util.get_node_ip_address(), free_port()

    def start(self, arguments: list[str], index: int, count: int, coordinator: str, log_dir: str) -> None:
        self.launch = Launch(arguments, Path(log_dir))
        self.launch.open()
        # Ray sets variables for its own processes, which are not for ours.
        for name in [n for n in os.environ if n.startswith("RAY_")]:
            del os.environ[name]
        self.worker = self.launch.start_one(index, count, coordinator)
        self.watch = Watch(self.launch, [self.worker], Limits())

    def look(self) -> dict:
        """Whether and how the process has ended, and its step."""
        self.watch.look()
        code, beat = self.worker.process.poll(), self.worker.beat()
        return {
            "code": code, "step": beat.step if beat else 0, "phase": beat.phase if beat else "start-up",
            "lines": self.worker.last_lines() if code else [],
        }  # fmt: skip

    def signal(self, number: int) -> None:
        self.worker.signal(number)

    def stop(self) -> None:
        """Ends the process and everything that it started."""
        if hasattr(self, "launch"):
            self.launch.kill([self.worker])
            self.launch.close()


class Gang:
    """The hosts of one attempt."""

    def __init__(self, arguments: list[str], nodes: list[dict], log_dir: Path):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.nodes = nodes
        remote = ray.remote(max_restarts=0, max_concurrency=1, num_cpus=0)(Host)
        apart = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
        self.hosts = [remote.options(scheduling_strategy=strategy).remote() for strategy in apart]
        ip, port = ray.get(self.hosts[0].address.remote(), timeout=60)
        count, coordinator = len(nodes), f"{ip}:{port}"
        ray.get([h.start.remote(arguments, i, count, coordinator, str(log_dir)) for i, h in enumerate(self.hosts)], timeout=60)

    def look(self) -> tuple[list[dict | None], int | None]:
        """How each process does, None where its host does not answer; and the first such host."""
        import ray

        asked = [host.look.remote() for host in self.hosts]
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        found = []
        for node, reference in zip(self.nodes, asked):
            try:
                found.append(ray.get(reference, timeout=ANSWER_S) if node["NodeID"] in alive else None)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError, ray.exceptions.RaySystemError):
                found.append(None)
        return found, next((i for i, f in enumerate(found) if f is None), None)

    def signal(self, number: int) -> None:
        for host in self.hosts:
            host.signal.remote(number)

    def end(self) -> None:
        """Ends all processes; the hosts that do not answer are left to find out by themselves."""
        import ray

        ray.wait([host.stop.remote() for host in self.hosts], num_returns=len(self.hosts), timeout=ANSWER_S)
        for host in self.hosts:
            ray.kill(host)


class Driver:
    """Of one launch."""

    def __init__(self, arguments: list[str], options: Options, run_dir: Path, address: str):
        self.arguments, self.options, self.run_dir, self.address = arguments, options, run_dir, address
        self.journal = Journal(run_dir)

    def run(self) -> int:
        try:
            import ray
        except ImportError:
            raise UserError("--engine ray needs Ray: pip install 'sharder-jax[ray]'.") from None
        try:
            ray.init(address=self.address, logging_level="warning", log_to_driver=False)
        except ConnectionError as error:
            raise UserError(
                f"there is no Ray cluster at {self.address!r} ({error}): start one with `ray start --head`."
            ) from None
        try:
            return self._attempts()
        finally:
            ray.shutdown()

    def nodes(self) -> list[dict]:
        """Hosts that are alive and have a processor for us, in a fixed order."""
        import ray

        return sorted((n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) >= 1), key=lambda n: n["NodeID"])

    def _attempts(self) -> int:
        policy = policy_of(self.options, self.run_dir)
        state, action = elastic.begin(policy, len(self.nodes()))
        self.journal.write("launch", processes=action.processes, supervisor=os.getpid())
        while True:
            ended = self._attempt(action.processes, policy, state)
            policy = policy_of(self.options, self.run_dir)
            state, action = elastic.after(policy, state, ended, len(self.nodes()), random.random())
            if isinstance(action, elastic.Finish):
                self.journal.write("closed", code=action.code, why=action.why or None)
                print(f"giving up: {action.why}." if action.why else "", end="", file=sys.stderr, flush=True)
                return action.code
            print(
                f"starting again on {action.processes} host(s){f': {action.why}' if action.why else ''}.",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(action.delay_s)

    def _attempt(self, count: int, policy: elastic.Policy, state: elastic.State) -> elastic.Ended:
        import signal

        self.journal.write("spawn", processes=count)
        log_dir = self.run_dir.absolute() / "logs"
        gang = Gang(self.arguments, self.nodes()[:count], log_dir)
        step, growing = 0, False
        try:
            while True:
                found, lost = gang.look()
                step = max([step, *(f["step"] for f in found if f)])
                codes = [f and f["code"] for f in found]
                failed = lost if lost is not None else next((i for i, code in enumerate(codes) if code), None)
                if failed is not None or all(code == 0 for code in codes):
                    return self._ended(found, failed, step, growing)
                _, resize = elastic.look(policy, state, elastic.Capacity(time.time(), len(self.nodes()), step))
                if resize is not None and not growing:
                    growing = True
                    gang.signal(signal.SIGTERM)
                time.sleep(POLL_S)
        finally:
            gang.end()
            self.journal.flush()

    def _ended(self, found: list[dict | None], failed: int | None, step: int, growing: bool) -> elastic.Ended:
        at = time.time()
        if failed is None:
            self.journal.write("ended", step=step, code=0, failed_at=at, culprit=None)
            return elastic.Ended(at, 0, step)
        facts = found[failed]
        code = 1 if facts is None else facts["code"]
        what = "is lost with its host" if facts is None else f"ended with code {code}"
        culprit = {"process": failed, "what": what, "phase": facts["phase"] if facts else "step", "step": step}
        self.journal.write("ended", step=step, code=code, failed_at=at, culprit=culprit)
        print(f"process {failed} of {len(found)} {what}, step {step}.", file=sys.stderr, flush=True)
        for line in facts["lines"] if facts else []:
            print(f"  {line}", file=sys.stderr)
        error = facts["lines"][-1].strip() if facts and facts["lines"] and code > 0 else ""
        return elastic.Ended(at, code if code in (2, PREEMPTED) else 1, step, failed, "" if growing else error)


def launch(arguments: list[str], options: Options, run_dir: Path, address: str) -> int:
    """Runs `sharder <arguments>` on the hosts of a Ray cluster until it is done; returns the exit code. Raises UserError."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    try:
        lock = take_lock(run_dir / "logs" / "supervisor.lock")
    except InUse as holder:
        raise UserError(f"{run_dir} is supervised by {holder}: wait for it, stop it, or choose another --run-dir.") from None
    try:
        return Driver(arguments, options, run_dir, address).run()
    finally:
        lock.close()
