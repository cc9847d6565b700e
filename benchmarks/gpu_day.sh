#!/usr/bin/env bash
# What a machine with a GPU is asked first, in two commands of at most seven minutes each:
#
#   benchmarks/gpu_day.sh 1    correctness of kernels, loop, training and certificates; first speeds and where time goes
#   benchmarks/gpu_day.sh 2    larger batches, a mixture of experts, each kernel's time, checkers of memory and races
#
# It needs no network and no installation, but PyTorch, Triton, transformers and accelerate with Python 3.12. Packages
# that the machine lacks lie as wheels in wheels/, which git ignores. Fetch them where there is a network, by
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp -d wheels \
#     --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
#     pydantic==2.14.3 pydantic-core==2.50.4 annotated-types typing-inspection
#
# Logs go to gpu_day/, or to $OUT, as they come. Each section is a process under its own time limit, so that a crash costs
# one section; what is left of the part when a section begins is the most that it gets. Checks run side by side, since
# compiling kernels takes most of their time; what is timed runs alone. The last lines say how each section ended.
# REHEARSAL=N runs on a CPU what a CPU can run, on tiny shapes, with N times the time.
set -uo pipefail
cd "$(dirname "$0")/.."
part=${1:?give a part: 1 or 2}
out=${OUT:-gpu_day}
rehearsal=${REHEARSAL:-}
part_limit=$((${LIMIT:-420} * ${rehearsal:-1})) # seconds
mkdir -p "$out"
work=$(mktemp -d)
exec > >(tee "$out/part_$part.txt") 2>&1

packages=$work/packages
if compgen -G "wheels/*.whl" >/dev/null && ! python3 -c "import pydantic" 2>/dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --target "$packages" wheels/*.whl
fi
export PYTHONPATH=$PWD/.typing:$packages${PYTHONPATH:+:$PYTHONPATH} PATH=$PATH:/usr/local/cuda/bin
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

section() { # section SECONDS COMMAND...: one tool under its own limit, with its time and its exit status
  local limit=$(($1 * ${rehearsal:-1})) left=$((part_limit - SECONDS)) start=$SECONDS status
  shift
  printf '\n=== %s\n' "$*"
  limit=$((limit < left ? limit : left))
  if ((limit < 10)); then
    echo "not run, for no time was left: $*" >>"$work/ended"
    return
  fi
  timeout -s INT -k 10 "$limit" "$@" # an interrupted pytest still tells what has failed
  status=$?
  echo "exit $status after $((SECONDS - start)) of $limit s: $*" >>"$work/ended"
}

pick() { if [ "$rehearsal" ]; then echo "$1"; else echo "$2"; fi; } # what a CPU can run, or the real size

processes=$(python3 -c "import xdist" 2>/dev/null && echo "-n $(pick 2 10)")
pytest="python3 -m pytest -q $processes -p no:cacheprovider --tb=short"
draftsmith="python3 -m draftsmith.recipes.cli.main"
target=recipes/tiny_python prompts=benchmarks/results/held_out_40.jsonl

command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
python3 -c "import torch, triton, transformers; print(torch.__version__, triton.__version__, transformers.__version__)"

case $part in
1)
  section 170 $pytest -m "not engine and not long$(pick " and not gpu" "")" $(pick "-k medusa" "") \
    tests/inference/test_loop_on_kernels.py \
    tests/models/test_{attention_kernel,cache_kernels,cut_kernels,llama_kernels,divergence_kernels,state_kernels}.py \
    tests/models/test_{fused,slots,unrolled_attention,autocast}.py tests/train/test_host_waits.py \
    tests/inference/test_{round,verify}_kernels.py &
  section 170 $draftsmith evaluate --target $target $(pick "" "--drafter lookahead") --drafter ngram --prompts $prompts \
    --certify --repeats 1 --temperature 0 1 --batch-size $(pick 1 "1 8") --num-prompts $(pick 2 40) \
    --out "$work/certify" >"$out/certify.txt" 2>&1 &
  section 170 $draftsmith quickstart --minutes 1 --out "$work/quickstart" >"$out/quickstart.txt" 2>&1 &
  wait %1 %2 %3
  tail -n 60 "$out/certify.txt" "$out/quickstart.txt"
  cp "$work/quickstart/report.html" "$out" 2>/dev/null
  tiny=$(pick --tiny "") few=$(pick "--max-new-tokens 8 --repeats 1" "")
  section 110 python3 benchmarks/decoding_gpu.py $tiny $few --settings $(pick 16:1:0 "512:1:0 512:1:1 4096:1:0")
  section 60 python3 benchmarks/decoding_gpu.py $tiny $few --settings $(pick 16:1:0 512:1:0) --profile $(pick 2 20)
  section 70 python3 benchmarks/training_gpu.py $tiny
  ;;
2)
  tiny=$(pick --tiny "") few=$(pick "--max-new-tokens 8 --repeats 1" "")
  section 90 python3 benchmarks/decoding_gpu.py $tiny $few --settings $(pick 16:2:0 "512:8:0 512:64:0 32768:1:0")
  section 120 python3 benchmarks/decoding_gpu.py $tiny $few --target qwen3_30b_a3b \
    --settings $(pick 16:2:0 "512:1:0 512:8:0")
  section 60 python3 benchmarks/training_gpu.py $(pick --tiny "--length 4096 --rows 2") --vary
  if [ "$rehearsal" ]; then
    printf '\nTables of single kernels are measured on a GPU only.\n'
  else
    section 40 python3 benchmarks/products.py
    section 60 python3 benchmarks/acceptance_kernels.py
    section 60 python3 benchmarks/attention_kernel.py
  fi
  checked=(python3 -m pytest -q -x -p no:cacheprovider tests/models/test_{llama,cache}_kernels.py)
  if command -v compute-sanitizer >/dev/null; then
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # each tensor's memory is then its own, so that its ends are seen
    section 100 compute-sanitizer --tool memcheck --error-exitcode 9 "${checked[@]}" &
    section 100 compute-sanitizer --tool racecheck --error-exitcode 9 "${checked[@]}" &
    wait %1 %2
  else
    printf '\nThere is no compute-sanitizer here.\n'
  fi
  ;;
*) echo "give a part: 1 or 2" && exit 2 ;;
esac

printf '\n'
cat "$work/ended"
