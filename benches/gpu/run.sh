#!/usr/bin/env bash
# Proves and measures the executor on a CUDA device in one call of at most 9 minutes.
#
#   run.sh [BINARY]        # BINARY: gpu-check, ./gpu-check if it is not given
#
# Needs the driver, NVRTC and cuBLASLt (as PyTorch's wheels bring them), Python 3 and, for the comparisons, PyTorch
# with CUDA. Builds nothing. Variables:
#
#   OUT                folder of results, ./gpu-results if it is not set
#   RUN_ON             `gpu`, or `stand-in`: small shapes and few steps, and no bounds on speed
#   STAND_IN           folder of the stand-ins of the CUDA libraries, for `RUN_ON=stand-in`
#   PYTHON             interpreter, python3 if it is not set
#   TORCH_DEVICE       `cuda`; `cpu` tries the PyTorch side without a GPU
#   SECONDS_MAX        time for everything, 530 if it is not set
#   PARTS              names of parts, separated by commas, that run alone (after `device`)
#   ROUNDS             how often ours and PyTorch's are measured in turn, 2 if it is not set
#
# What balancing gains is a call of its own, of at most 6 minutes: balanced.py.
#
# Writes every result as it comes to $OUT/results.jsonl, and the table to $OUT/table.txt. Exit status: 0 if all parts
# passed or were skipped, 1 if one failed or did not run, 3 if one only missed a bound on speed.

set -u

binary=${1:-./gpu-check}
OUT=${OUT:-./gpu-results}
RUN_ON=${RUN_ON:-gpu}
PYTHON=${PYTHON:-python3}
TORCH_DEVICE=${TORCH_DEVICE:-cuda}
SECONDS_MAX=${SECONDS_MAX:-530}
PARTS=${PARTS:-}
ROUNDS=${ROUNDS:-2}
here=$(cd "$(dirname "$0")" && pwd)

SECONDS=0
mkdir -p "$OUT" || exit 1
OUT=$(cd "$OUT" && pwd)
results=$OUT/results.jsonl
table=$OUT/table.txt
rm -f "$OUT"/*.jsonl "$OUT"/*.log "$table"
# compiled kernels stay in the folder of results; a second start of the program finds them
export XDG_CACHE_HOME=${XDG_CACHE_HOME:-$OUT/cache}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$OUT/cache/inductor}

size=()
libraries=(env)
# what lets ranks share a device
sharing=(env NCCL_MULTI_RANK_GPU_ENABLE=1)
threads=(env)
case $RUN_ON in
    gpu)
        # libraries that PyTorch brings, wherever its interpreter has them
        wheels=$("$PYTHON" -c 'import glob, sys
print(":".join(found for path in sys.path if path for found in sorted(glob.glob(path + "/nvidia/*/lib"))))')
        export DFLOP_CUDA_LIBRARY_PATH=${DFLOP_CUDA_LIBRARY_PATH:-$wheels}
        ;;
    stand-in)
        size=(--tiny)
        if [ -z "${STAND_IN:-}" ]; then
            echo "run.sh: RUN_ON=stand-in needs STAND_IN, the folder of its libraries" >&2
            exit 1
        fi
        # for the binary alone: PyTorch would find these libraries, too
        threads+=(CUDA_STAND_IN_STREAM_THREADS=1)
        sharing+=("${threads[@]:1}" CUDA_STAND_IN_NCCL_VERSION=23007 CUDA_STAND_IN_NCCL_SHARES_DEVICES=1)
        libraries=(env "LD_LIBRARY_PATH=$STAND_IN${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}")
        ;;
    *)
        echo "run.sh: RUN_ON is gpu or stand-in, not $RUN_ON" >&2
        exit 1
        ;;
esac

# All rows of the table, so that a run that is cut short shows what is missing.
parts=(
    device operations memcheck bandwidth
    gemm "gemm PyTorch" "gemm beside PyTorch"
    attention "attention PyTorch" "attention cuDNN" "attention beside PyTorch"
    parity "parity PyTorch"
    curve "curve PyTorch" "curve beside PyTorch"
    throughput "throughput cuDNN" "throughput PyTorch" "throughput beside PyTorch"
    profile nccl machines dflop.torch
)
declare -A status figure asked taken
for part in "${parts[@]}"; do
    status[$part]="not run"
    figure[$part]=""
    asked[$part]=""
    taken[$part]=0
done

# Keeps the worse of the status that a part has and a new one.
note() {
    local part=$1 new=$2 rank
    rank() {
        case $1 in
            "not run") echo 0 ;; passed) echo 1 ;; skipped) echo 2 ;; missed) echo 3 ;; *) echo 4 ;;
        esac
    }
    if [ "$(rank "$new")" -ge "$(rank "${status[$part]}")" ]; then
        status[$part]=$new
        figure[$part]=$3
        asked[$part]=$4
    fi
}

# Reads a field of the last summary in a file.
field() {
    grep '"summary":' "$2" 2>/dev/null | tail -n 1 | sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p"
}

# Whether a part is one of PARTS; the device always is.
wanted() {
    [ -z "$PARTS" ] || [ "$1" = device ] || [[ ",$PARTS," == *",$1,"* ]]
}

# Runs a part: name, most seconds, command. A part may run several times; the worst result stays.
run() {
    local part=$1 limit=$2 code start left found file
    shift 2
    if ! wanted "$part"; then
        note "$part" skipped "not asked for" ""
        return 4
    fi
    left=$((SECONDS_MAX - SECONDS - 3))
    if [ "$left" -lt 5 ]; then
        note "$part" failed "no time was left" ""
        return 1
    fi
    [ "$limit" -gt "$left" ] && limit=$left
    echo "--- $part (at most $limit s)"
    start=$SECONDS
    file=$OUT/last.jsonl
    # a result is in the file as soon as it is printed; a sanitizer prints other lines, too
    timeout -k 5 "$limit" "$@" 2> >(tee -a "$OUT/${part// /-}.log" >&2) |
        grep --line-buffered '^{' | tee -a "$results" >"$file"
    code=${PIPESTATUS[0]}
    cat "$file" >>"$OUT/${part// /-}.jsonl"
    taken[$part]=$((taken[$part] + SECONDS - start))
    found=$(field figure "$file")
    case $code in
        0) note "$part" passed "$found" "$(field asked "$file")" ;;
        3) note "$part" missed "$found" "$(field asked "$file")" ;;
        4) note "$part" skipped "$found" "$(field asked "$file")" ;;
        124 | 137) note "$part" failed "ended after $limit s" "an end" ;;
        *) note "$part" failed "${found:-ended with status $code}" "$(field asked "$file")" ;;
    esac
    return "$code"
}

# Prints the table and exits with the status of the whole run.
finish() {
    local part code=0
    trap - EXIT INT TERM
    for part in "${parts[@]}"; do
        case ${status[$part]} in
            passed | skipped) ;;
            missed) [ "$code" -eq 0 ] && code=3 ;;
            *) code=1 ;;
        esac
    done
    {
        printf '%-26s %-8s %7s  %s\n' part status seconds "figure (asked)"
        for part in "${parts[@]}"; do
            printf '%-26s %-8s %7d  %s\n' "$part" "${status[$part]}" "${taken[$part]}" \
                "${figure[$part]}${asked[$part]:+ (${asked[$part]})}"
        done
        printf 'ran on %s for %d s, status %d\n' "$RUN_ON" "$SECONDS" "$code"
    } | tee "$table"
    exit "$code"
}
trap finish EXIT
trap 'exit 1' INT TERM

# The PyTorch side, or the reason why there is none.
torch_reason=""
torch() {
    local part=$1 limit=$2
    shift 2
    if [ -n "$torch_reason" ]; then
        note "$part" skipped "$torch_reason" ""
        return 4
    fi
    run "$part" "$limit" "$PYTHON" "$here/pytorch_side.py" "$@" --device "$TORCH_DEVICE"
}

check() {
    local part=$1 limit=$2
    shift 2
    run "$part" "$limit" "${libraries[@]}" "$binary" "$@" "${size[@]+"${size[@]}"}"
}

compare() {
    run "$1 beside PyTorch" 15 "$binary" compare --set "$1" "${size[@]+"${size[@]}"}" "$OUT/$1.jsonl" \
        "$OUT/$1"-*.jsonl
}

# Ours, PyTorch's, and both again: a machine that slows down slows both.
alternate() {
    local name=$1 ours=$2 theirs=$3
    shift 3
    : >"$OUT/$name-PyTorch.jsonl"
    for ((round = 0; round < ROUNDS; round++)); do
        check "$name" "$ours" "${own[@]}"
        torch "$name PyTorch" "$theirs" "$name" "$@"
    done
}

# Memory checks of operations on small shapes, where a sanitizer is found and accepts the device.
memcheck() {
    local sanitizer
    if ! wanted memcheck; then
        note memcheck skipped "not asked for" ""
        return
    fi
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
    if [ -z "$sanitizer" ]; then
        note memcheck skipped "there is no compute-sanitizer" "no error of memory"
    elif ! timeout -k 5 40 "$sanitizer" --tool memcheck --error-exitcode 7 "$binary" device >"$OUT/memcheck.log" 2>&1
    then
        note memcheck skipped "compute-sanitizer does not accept the device, see memcheck.log" "no error of memory"
    else
        run memcheck 60 "$sanitizer" --tool memcheck --error-exitcode 7 "$binary" operations --small
    fi
}

IFS=, read -r -a asked_for <<<"$PARTS"
for name in "${asked_for[@]+"${asked_for[@]}"}"; do
    [ -n "${status[$name]+known}" ] && continue
    echo "run.sh: PARTS has no part \`$name\`" >&2
    exit 1
done

# The binary and the libraries first: nothing else can run without them.
check device 30 device || exit 1
torch_reason=$("$PYTHON" "$here/pytorch_side.py" probe --device "$TORCH_DEVICE" 2>>"$OUT/probe.log" |
    tee -a "$results" | grep '"skipped"' | sed -n 's/.*"figure":"\([^"]*\)".*/\1/p')
[ -n "$torch_reason" ] && echo "PyTorch: skipped: $torch_reason"
if ! command -v "$PYTHON" >/dev/null; then
    torch_reason="there is no $PYTHON"
fi

check operations 120 operations
memcheck
check bandwidth 45 bandwidth
"$binary" buckets "${size[@]+"${size[@]}"}" >"$OUT/buckets.json" 2>>"$OUT/buckets.log"

own=(gemm)
alternate gemm 40 40 --lists "$OUT/buckets.json"
compare gemm
own=(attention)
alternate attention 45 45 --lists "$OUT/buckets.json"

check parity 40 parity --write "$OUT/parity-model"
torch "parity PyTorch" 40 parity --folder "$OUT/parity-model"

check curve 45 train --set curve --write "$OUT/curve-model"
torch "curve PyTorch" 60 curve --folder "$OUT/curve-model"
: >>"$OUT/curve-PyTorch.jsonl"
compare curve

own=(train --set throughput --write "$OUT/throughput-model")
alternate throughput 50 120 --folder "$OUT/throughput-model"
check "throughput cuDNN" 80 train --set throughput --fastest
compare throughput

check profile 90 profile

run nccl 40 "${sharing[@]}" "${libraries[@]}" "$binary" nccl
# NCCL takes the ranks for two machines: no setting lets them share the device
run machines 40 "${threads[@]}" "${libraries[@]}" "$binary" machines

run dflop.torch 40 "$PYTHON" "$here/dflop_torch.py" --device "$TORCH_DEVICE"

# cuDNN's plans take long to build: last, and what is not ready is timed with our kernels
check "attention cuDNN" 80 attention --fastest
compare attention
