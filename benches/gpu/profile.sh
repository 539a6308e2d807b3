#!/usr/bin/env bash
# Measures modules of published models on a CUDA device into profiles of the cost model, in at most 9 minutes.
#
#   profile.sh [BINARY]     # BINARY: dflop, built with `--features cuda`; ./dflop if it is not given
#
# SigLIP-so400m with Qwen2.5-7B and with Llama-3-8B, InternViT-300M and 6B, Whisper-large: two layers of each module,
# scaled to all. Variables:
#
#   OUT                directory of the profiles, ./gpu-profiles if it is not set
#   DEVICE             cuda:0 if it is not set
#   RUN_ON             `gpu`, or `stand-in`: a miniature model for a second
#   SECONDS_MAX        time for everything, 530 if it is not set
#
# Exit status: 0 if every model has a profile, 1 otherwise. `dflop plan --profile` and the simulator read the files,
# one per model; for the project they go to costmodel/profiles/.

set -u

binary=${1:-./dflop}
OUT=${OUT:-./gpu-profiles}
DEVICE=${DEVICE:-cuda:0}
SECONDS_MAX=${SECONDS_MAX:-530}
case ${RUN_ON:-gpu} in
    gpu)
        models=(llava-ov-qwen2.5-7b llava-ov-llama3-8b internvl3-8b internvl2.5-qwen2.5-72b qwen2-audio-7b)
        size=(--tokens-max 16384 --layers 2)
        ;;
    stand-in)
        models=(tiny)
        size=(--tokens-max 64 --layers 1)
        ;;
    *)
        echo "profile.sh: RUN_ON is gpu or stand-in, not $RUN_ON" >&2
        exit 1
        ;;
esac

SECONDS=0
mkdir -p "$OUT" || exit 1
failed=0
for index in "${!models[@]}"; do
    model=${models[$index]}
    # what is left, in equal shares; the round in progress is completed, which takes some seconds more
    share=$(((SECONDS_MAX - SECONDS) / (${#models[@]} - index)))
    measured=$((share > 30 ? share - 20 : 1))
    [ "${RUN_ON:-gpu}" = stand-in ] && measured=1
    echo "--- $model (about $measured s)"
    if timeout -k 5 "$((share > 10 ? share : 10))" "$binary" profile --model "$model" --device "$DEVICE" \
        "${size[@]}" --seconds-max "$measured" --out "$OUT" --json >"$OUT/$model.json" 2>"$OUT/$model.log"; then
        cat "$OUT/$model.json"
    else
        echo "$model: no profile, see $OUT/$model.log:" >&2
        tail -n 3 "$OUT/$model.log" >&2
        failed=1
    fi
done
echo "${#models[@]} models in $SECONDS s, status $failed"
exit "$failed"
