#!/usr/bin/env bash
# What a machine with a GPU is asked first, in three commands of under ten minutes each:
#
#   benchmarks/gpu_day.sh 1    correctness: kernels on the device, the whole loop, certificates, autocast
#   benchmarks/gpu_day.sh 2    speed: matrix products, kernels, decoding, training, a profile
#   benchmarks/gpu_day.sh 3    memory and race checkers, training with shapes that vary, the quickstart
#
# It needs no network. Packages that the machine lacks (pydantic and what it needs, datasets for the quickstart) may lie
# as wheels in wheels/. Logs go to gpu_day/ or to $OUT as they come, most valuable first, and every tool has its own time
# limit, so that a crash costs one section. REHEARSAL=1 runs what a CPU can run, on tiny shapes.
set -uo pipefail
cd "$(dirname "$0")/.."
part=${1:?give a part: 1, 2 or 3}
out=${OUT:-gpu_day}
mkdir -p "$out"
log=$out/part_$part.txt
exec > >(tee "$log") 2>&1

if compgen -G "wheels/*.whl" >/dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/draftsmith_packages wheels/*.whl
  export PYTHONPATH=/tmp/draftsmith_packages${PYTHONPATH:+:$PYTHONPATH}
fi
python3 -c "import draftsmith.models" 2>/dev/null ||
  python3 -m pip install -q --no-build-isolation --no-deps --no-index -e .
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
rehearsal=${REHEARSAL:-}

section() { # section SECONDS COMMAND...: one tool under its own limit, with its time and its exit status
  local limit=$1 start=$SECONDS
  shift
  printf '\n=== %s\n' "$*"
  timeout -k 5 "$limit" "$@"
  printf '=== exit %d after %d s\n' $? $((SECONDS - start))
}

pick() { if [ "$rehearsal" ]; then echo "$1"; else echo "$2"; fi; } # what a CPU can run, or the real size
draftsmith="python3 -m draftsmith.recipes.cli.main"
target=recipes/tiny_python prompts=benchmarks/results/held_out_40.jsonl

git log --oneline -1 2>/dev/null
command -v nvidia-smi >/dev/null && nvidia-smi
python3 -c "import torch, triton, transformers; print(torch.__version__, triton.__version__, transformers.__version__)"

case $part in
1)
  kernels=(tests/models/test_{attention_kernel,cache_kernels,llama_kernels,divergence_kernels,fused}.py)
  section 130 python3 -m pytest -q tests/inference/test_loop_on_kernels.py
  section 100 python3 -m pytest -q "${kernels[@]}" -m "not engine and not long" $(pick "-k half_precision" "")
  section 50 python3 -m pytest -q tests/inference/test_verify_kernels.py -m "not engine and not long" $(pick "-k greedy" "")
  section 40 python3 -m pytest -q tests/models/test_autocast.py
  section 100 $draftsmith evaluate --target $target --drafter ngram --drafter lookahead --prompts $prompts \
    --certify --repeats 1 --temperature 0 1 --batch-size $(pick 1 "1 8") --num-prompts $(pick 2 40) --out "$out/certify"
  [ "$rehearsal" ] || section 140 python3 -m pytest -q -m long tests/inference/test_loop_on_kernels.py
  ;;
2)
  if [ "$rehearsal" ]; then
    section 100 python3 benchmarks/decoding_gpu.py --device cpu --layers 4 --context 16 --max-new-tokens 16 --repeats 1
  else
    for settings in "512 1 0" "512 1 1" "4096 1 0" "32768 1 0" "512 8 0" "512 64 0"; do
      read -r context batch temperature <<<"$settings"
      section 60 python3 benchmarks/decoding_gpu.py --context "$context" --batch-size "$batch" --temperature "$temperature"
    done
  fi
  section 50 python3 benchmarks/attention_kernel.py
  section 50 python3 benchmarks/acceptance_kernels.py
  section 100 python3 benchmarks/training.py --lengths $(pick 64 "512 2048") --unrolls $(pick 1 "1 4") \
    --rows $(pick 1 "1 8") --steps 3
  ;;
3)
  checked=(python3 -m pytest -q -x tests/models/test_llama_kernels.py tests/models/test_cache_kernels.py)
  if command -v compute-sanitizer >/dev/null; then
    section 100 compute-sanitizer --tool memcheck --error-exitcode 9 "${checked[@]}"
    section 120 compute-sanitizer --tool racecheck --error-exitcode 9 "${checked[@]}"
  fi
  section 300 $draftsmith quickstart --minutes $(pick 1 4) --out "$out/quickstart"
  ;;
*) echo "give a part: 1, 2 or 3" && exit 2 ;;
esac
