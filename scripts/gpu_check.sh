#!/usr/bin/env bash
# scripts/gpu_check.sh [overrides]   Unattended check of the Triton back end on a CUDA machine, ten minutes at most after set-up:
# tests of the compiled kernels, then decode speed of QEvict against full caches at Llama-3.1-8B's shape (random weights, nothing is
# downloaded) for 8K and 32K tokens, one sequence and as many as fit. Everything is written to results/gpu-check, the last thing is
# summary.txt. Overrides are run.py's. Environment: MINUTES, MODEL, CONTEXTS, BATCHES, TESTS; ANY_DEVICE=1 goes through the motions
# without a GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
out=results/gpu-check
python=.venv/bin/python
minutes=${MINUTES:-10} model=${MODEL:-random-llama-3.1-8b} contexts=${CONTEXTS:-8192 32768} tests=${TESTS:-tests/test_triton.py}

[ -f .venv/.stamp ] || ./setup.sh || { echo "gpu_check.sh: setup.sh failed" >&2; exit 1; }
rm -rf $out && mkdir -p $out
$python - >$out/machine.txt <<'PY' || exit 1
import torch, triton
print("torch", torch.__version__, "triton", triton.__version__, "CUDA", torch.version.cuda)
if torch.cuda.is_available():
    gpu = torch.cuda.get_device_properties(0)
    print(gpu.name, f"sm_{gpu.major}{gpu.minor}", f"{gpu.total_memory >> 30} GiB", f"{gpu.multi_processor_count} multiprocessors")
PY
cat $out/machine.txt
gib=$(sed -n 's/.* \([0-9]*\) GiB.*/\1/p' $out/machine.txt)
if [ -z "$gib" ] && [ -z "${ANY_DEVICE:-}" ]; then
  echo "gpu_check.sh: torch sees no CUDA device: check the driver and that torch is a CUDA build" >&2
  exit 1
fi

end=$((SECONDS + 60 * minutes))
failed=0
step() { # name, most seconds, command: its output goes to a file; what is left of the time bounds it
  local name=$1 most=$2 left=$((end - SECONDS))
  shift 2
  if [ $left -lt 20 ]; then echo "$name: not run, the time is up" | tee -a $out/steps.txt; failed=1; return; fi
  local began=$SECONDS code=0
  timeout -k 10 $((left < most ? left : most)) "$@" >$out/$name.txt 2>&1 || code=$?
  case $code in 0) code=done ;; 124 | 137) code="out of time" ;; *) code="failed ($code), see $out/$name.txt" ;; esac
  [ "$code" = done ] || failed=1
  echo "$name: $code, $((SECONDS - began)) s" | tee -a $out/steps.txt
}
speed() { # name, context, batch, budgets, overrides: one table
  local name=$1 context=$2 batch=$3 budgets=$4
  shift 4
  step "$name" 300 $python scripts/efficiency_curves.py growth --methods qevict --budgets $budgets --contexts "$context" \
    --out "$out/$name" "model=$model" "task.batch=$batch" cache.dtype=bfloat16 "results_dir=$out/runs" "$@"
}

: >$out/steps.txt
step tests 300 $python -m pytest $tests -p no:cacheprovider --durations=5
for context in $contexts; do
  # four full caches at a time (128 KiB per token), 20 GiB for weights and workspace
  most=$(((${gib:-0} - 20) * 8192 / (4 * context)))
  many=1
  while [ $((2 * many)) -le $most ]; do many=$((2 * many)); done
  for batch in $(printf '%s\n' ${BATCHES:-1 $many} | sort -nu); do
    speed "speed-$context-$batch" "$context" "$batch" "0.05 0.2" backend=auto "$@"
  done
done
speed "reference-${contexts%% *}-1" "${contexts%% *}" 1 0.05 backend=reference 'task.baselines=[fullkv]' "$@"

{
  cat $out/machine.txt $out/steps.txt
  tail -n 1 $out/tests.txt
  for table in $out/speed-*.txt $out/reference-*.txt; do
    [ -f "$table" ] && echo && basename "$table" .txt && cat "$table"
  done
} >$out/summary.txt
cat $out/summary.txt
exit $failed
