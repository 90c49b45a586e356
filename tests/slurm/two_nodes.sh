#!/bin/bash
# The script of `sharder launch --engine slurm`, submitted to a SLURM of two nodes on this machine: needs root and Debian's
# slurm-wlm and munge. A stand-in for `sharder` writes down how it was started, and ends as the case asks.
set -eu
sharder=$1
work=$(mktemp -d)
export SLURM_CONF=$work/slurm.conf
host=$(hostname)

start_cluster() {
  mount --make-rprivate /
  ip link set lo up
  ip link add veth0 type veth peer name veth1
  ip addr add 10.77.0.1/24 dev veth0
  ip link set veth0 up; ip link set veth1 up
  printf '127.0.0.1 localhost\n10.77.0.1 %s n0 n1\n' "$host" > "$work/hosts"
  mount --bind "$work/hosts" /etc/hosts
  mkdir -p /run/munge "$work/state" "$work/spool0" "$work/spool1"
  chown munge: /run/munge
  pgrep -x munged > /dev/null || runuser -u munge -- munged --pid-file="/run/munge/sharder.pid"
  cat > "$SLURM_CONF" <<CONF
ClusterName=two
SlurmctldHost=$host(10.77.0.1)
SlurmUser=root
SlurmctldPort=16817
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
MpiDefault=none
ReturnToService=2
SlurmdTimeout=30
KillWait=5
OverTimeLimit=0
MinJobAge=300
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool%n
SlurmdLogFile=$work/slurmd-%n.log
SlurmctldLogFile=$work/slurmctld.log
SlurmdPidFile=$work/slurmd-%n.pid
SlurmctldPidFile=$work/slurmctld.pid
NodeName=n0 NodeHostname=$host NodeAddr=10.77.0.1 Port=16820 CPUs=2
NodeName=n1 NodeHostname=$host NodeAddr=10.77.0.1 Port=16821 CPUs=2
PartitionName=all Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP
CONF
  slurmctld
  slurmd -N n0
  slurmd -N n1
  trap 'for f in "$work"/*.pid /run/munge/sharder.pid; do kill "$(cat "$f")" 2>/dev/null || true; done' EXIT
  for _ in $(seq 60); do [ "$(sinfo -h -t idle -o %D 2>/dev/null)" = 2 ] && return; sleep 1; done
  echo "the nodes did not come up"; cat "$work"/*.log; exit 1
}

stand_in() {  # what `sharder` does on a node
  mkdir -p "$work/bin"
  cat > "$work/bin/sharder" <<'PROGRAM'
#!/bin/bash
echo "$SLURM_RESTART_COUNT $JAX_COORDINATOR_ADDRESS $JAX_NUM_PROCESSES $JAX_PROCESS_ID $*" >> "$OUT/started"
trap 'echo "$JAX_PROCESS_ID" >> "$OUT/saved"; exit 75' TERM
case ${SLURM_RESTART_COUNT:-0}-$CASE in
  0-preempted) exit 75 ;;
  0-killed) [ "$JAX_PROCESS_ID" = 1 ] && kill -9 $$; sleep 300 & wait ;;
  0-limit) sleep 300 & wait ;;
  *-mend) exit 2 ;;
esac
PROGRAM
  chmod +x "$work/bin/sharder"
}

submit() {  # case, time limit
  mkdir -p "$work/$1"
  "$sharder" launch --engine slurm --processes 2 --time-limit "$2" --grace-s 50 -- train tiny_lm --run-dir "$work/$1/run dir" > "$work/$1/script"
  (cd "$work/$1" && PATH="$work/bin:$PATH" OUT="$work/$1" CASE=$1 sbatch --parsable --export=ALL "$work/$1/script" 2>"$work/$1/errors") || cat "$work/$1/errors" >&2
}

finish() {  # case, job, starts of processes, state
  [ -n "$2" ] || { echo "$1 was not submitted"; exit 1; }
  for _ in $(seq 240); do
    state=$(scontrol show job "$2" -o | grep -o 'JobState=[A-Z]*' || true)
    [ "$state" = "JobState=$4" ] && break
    # A requeued job is held back for a while; nobody waits for that here.
    scontrol update job "$2" StartTime=now 2>/dev/null || true
    sleep 1
  done
  [ "$state" = "JobState=$4" ] || { echo "$1: $state instead of $4"; scontrol show job "$2"; cat "$work/$1"/*; exit 1; }
  [ "$(wc -l < "$work/$1/started")" = "$3" ] || { echo "$1: not $3 starts"; cat "$work/$1/started"; exit 1; }
  echo "$1: $(wc -l < "$work/$1/started") starts, $state"
}

inside() {
  start_cluster
  stand_in
  job=$(submit preempted 10); finish preempted "$job" 4 COMPLETED
  ports=$(awk '{print $2}' "$work/preempted/started" | sort -u | wc -l)
  [ "$ports" = 2 ] || { echo "the second start had no address of its own"; exit 1; }
  job=$(submit killed 10); finish killed "$job" 4 COMPLETED
  job=$(submit mend 10); finish mend "$job" 2 FAILED
  job=$(submit limit 1); finish limit "$job" 4 COMPLETED
  [ "$(sort -u "$work/limit/saved" | wc -l)" = 2 ] || { echo "the signal before the time limit did not reach both"; exit 1; }
  echo "SLURM: as it should be"
}

if [ "${2:-}" = inside ]; then inside; else unshare -m -n "$0" "$sharder" inside; fi
