#!/usr/bin/env bash
# Starts a run again, by whatever launcher, when it has ended for a reason that passes.
#
#   scripts/supervise.sh RUN COMMAND ... --resume auto
#   scripts/supervise.sh output deepspeed --hostfile hostfiles/8gpu ds_encdec/train.py --resume auto
#
# RUN is infra.output_dir. Its run.json decides, since launchers make 1, or even 0, of what their ranks say. Again after 75
# (preempted), 143 and 137 (SIGTERM or SIGKILL before there was a run), 8 (hung), 9 (a rank was lost) and an end without a
# word; not after mistakes (2, 4, 5, 7, 10 ...), ranks that differ (11, since the host must be left out),
# `ds-encdec stop`, or a signal to this script, which hands it on; nor after two starts in a row that ended with 0 or 1
# before there was a run. Ranks that outlive their launcher are waited for.
#
# SUPERVISE_RESTARTS (10): most starts in a row without a new checkpoint. SUPERVISE_SECONDS (10): the wait before the
# second of them, doubled each time up to ten minutes.
set -uo pipefail

if [ $# -lt 2 ]; then sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2; exit 2; fi
run=$1 restarts=${SUPERVISE_RESTARTS:-10} first_wait=${SUPERVISE_SECONDS:-10}
shift
case " $* " in
    *" --resume auto "* | *" --resume=auto "*) ;;
    *) echo "error: the command lacks --resume auto, without which a second start would refuse the run" >&2; exit 2 ;;
esac

told() { # what run.json says: "STATE EXIT_CODE", and "stopped" where somebody wanted the end
    python3 - "$run/run.json" <<'PYTHON' 2>/dev/null || echo "none"
import json, sys
status = json.load(open(sys.argv[1]))
print(status["state"], status["exit_code"], "stopped" if "ds-encdec stop" in status["reason"] else "")
PYTHON
}
say() { echo "supervise: $*" >&2; }

# srun ends its tasks at once on SIGTERM, and passes SIGUSR1 on; the other launchers pass SIGTERM on.
case "$(basename "$1")" in srun) signal=USR1 ;; *) signal=TERM ;; esac
child='' signalled='' silent=0 without_progress=0 wait_seconds=$first_wait
trap 'signalled=1; [ -z "$child" ] || kill -"$signal" "$child" 2>/dev/null' TERM INT HUP
while :; do
    before=$(told; stat -c %i.%y "$run/run.json" 2>/dev/null) saved=$(ls "$run/checkpoints" 2>/dev/null)
    "$@" &
    child=$!
    while wait "$child"; code=$?; [ "$code" -gt 128 ] && kill -0 "$child" 2>/dev/null; do :; done
    child=''
    if [ -e "$run/.lock" ] && ! flock --nonblock "$run/.lock" true; then
        say "the launcher has ended (code $code), and the run goes on: waiting for it. ds-encdec stop $run ends it."
        until flock --nonblock "$run/.lock" true; do
            [ -z "$signalled" ] || touch "$run/stop" # nobody is left to hand a signal to
            sleep 2 &
            wait $! # which a signal ends
        done
        [ -z "$signalled" ] || rm -f "$run/stop" # it was for these ranks, not for the next start
    fi
    read -r state ending why < <(told)
    [ "$state" != running ] || { state=failed ending=9; } # killed before it could say so, at this start or an earlier one
    if [ "$before" = "$(told; stat -c %i.%y "$run/run.json" 2>/dev/null)" ]; then
        # This start said nothing: its code counts, but for those that tell nothing. ssh ends with 255; a launcher with 0
        # where it was killed, with 1 after a lost host, but after a mistake as well, which the second start makes again.
        [ "$code" -gt 1 ] || silent=$((silent + 1))
        case "$code:${ending:-}" in
            [01]:75 | [01]:8 | [01]:9 | 255:75 | 255:8 | 255:9) ;;
            0:*) [ "$state" = completed ] || ending=9 ;;
            *) ending=$code state=unknown why='' ;;
        esac
    else
        silent=0
    fi
    if [ "$state" = completed ]; then say "completed"; exit 0; fi
    if [ -n "$signalled" ] || [ "${why:-}" = stopped ]; then say "stopped as asked, code $ending"; exit "$ending"; fi
    case "$ending" in
        75 | 8 | 9 | 137 | 143) ;;
        *) say "ended with code $ending, which a second start would not mend"; exit "$ending" ;;
    esac
    if [ "$silent" -gt 1 ]; then
        say "two starts in a row ended before there was a run, the last with code $code: giving up"
        exit $((code ? code : 9))
    fi
    if [ "$saved" != "$(ls "$run/checkpoints" 2>/dev/null)" ]; then without_progress=0 wait_seconds=$first_wait; fi
    if [ $((without_progress += 1)) -gt "$restarts" ]; then
        say "$restarts starts in a row without a new checkpoint, the last with code $ending: giving up"
        exit "$ending"
    fi
    say "ended with code $ending; starting again in $wait_seconds s"
    sleep "$wait_seconds" &
    wait $!
    [ -z "$signalled" ] || exit "$ending"
    wait_seconds=$((wait_seconds * 2 > 600 ? 600 : wait_seconds * 2))
done
