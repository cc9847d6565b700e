#!/usr/bin/env bash
# What a machine with a GPU is asked first, in three commands of under ten minutes each:
#
#   benchmarks/gpu_day.sh 1    correctness: kernels on the device, the whole loop, training, certificates
#   benchmarks/gpu_day.sh 2    speed: matrix products, decoding beside its floor, each kernel's time, training
#   benchmarks/gpu_day.sh 3    memory and race checkers, training on texts of many lengths, the quickstart
#
# It needs no network and no installation, but PyTorch, Triton, transformers and accelerate with Python 3.12. Packages
# that the machine lacks lie as wheels in wheels/, which git ignores. Fetch them where there is a network, by
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp -d wheels \
#     --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
#     pydantic==2.14.3 pydantic-core==2.50.4 annotated-types typing-inspection
#
# Logs go to gpu_day/, or to $OUT, as they come. Sections come in the order of their value, each in a process of its own
# under its own time limit, so that a crash costs one section. All of them end within the part's limit: what is left when
# a section begins is the most that it gets. The last lines say how each ended. REHEARSAL=N runs on a CPU what a CPU can
# run, on tiny shapes, with N times the time.
set -uo pipefail
cd "$(dirname "$0")/.."
part=${1:?give a part: 1, 2 or 3}
out=${OUT:-gpu_day}
rehearsal=${REHEARSAL:-}
part_limit=$((570 * ${rehearsal:-1})) # seconds
mkdir -p "$out"
exec > >(tee "$out/part_$part.txt") 2>&1

packages=$out/packages
if compgen -G "wheels/*.whl" >/dev/null && ! python3 -c "import pydantic" 2>/dev/null; then
  packages=$(mktemp -d)
  python3 -m pip install -q --no-index --no-deps --no-compile --target "$packages" wheels/*.whl
fi
export PYTHONPATH=$PWD/.typing:$packages${PYTHONPATH:+:$PYTHONPATH} PATH=$PATH:/usr/local/cuda/bin
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
ended=()

section() { # section SECONDS COMMAND...: one tool under its own limit, with its time and its exit status
  local limit=$(($1 * ${rehearsal:-1})) left=$((part_limit - SECONDS)) start=$SECONDS status
  shift
  printf '\n=== %s\n' "$*"
  limit=$((limit < left ? limit : left))
  if ((limit < 10)); then
    ended+=("not run, for no time was left: $*")
    return
  fi
  timeout -k 5 "$limit" "$@"
  status=$?
  ended+=("exit $status after $((SECONDS - start)) of $limit s: $*")
  printf '=== %s\n' "${ended[-1]}"
}

pick() { if [ "$rehearsal" ]; then echo "$1"; else echo "$2"; fi; } # what a CPU can run, or the real size

tests() { # tests SECONDS REHEARSED ARGUMENTS...: with what needs a GPU; in a rehearsal those that REHEARSED names
  local limit=$1 rehearsed=$2
  shift 2
  if [ "$rehearsal" ]; then
    section "$limit" python3 -m pytest -q "$@" -k "$rehearsed"
  else
    section "$limit" python3 -m pytest -q $processes "$@" -m "not engine and not long"
  fi
}

processes=$(python3 -c "import xdist" 2>/dev/null && echo "-n 8") # most of the time kernels are compiled
draftsmith="python3 -m draftsmith.recipes.cli.main"
target=recipes/tiny_python prompts=benchmarks/results/held_out_40.jsonl

git log --oneline -1 2>/dev/null
command -v nvidia-smi >/dev/null && nvidia-smi
python3 -c "import torch, triton, transformers; print(torch.__version__, triton.__version__, transformers.__version__)"

case $part in
1)
  tests 200 "training_loss or switch" tests/inference/test_loop_on_kernels.py
  tests 180 "half_precision or documents or forms or draw" \
    tests/models/test_{attention_kernel,cache_kernels,cut_kernels,llama_kernels,divergence_kernels}.py \
    tests/models/test_{fused,slots,unrolled_attention}.py tests/inference/test_round_kernels.py
  tests 80 "greedy" tests/inference/test_verify_kernels.py
  tests 100 "medusa and True" tests/models/test_autocast.py tests/train/test_host_waits.py
  # Of a certificate 16,000 tokens a mode are drawn in batches of 32: on a core of a CPU half a minute for ngram, and
  # minutes for lookahead's trees.
  section 150 $draftsmith evaluate --target $target $(pick "" "--drafter lookahead") --drafter ngram --prompts $prompts \
    --certify --repeats 1 --temperature 0 1 --batch-size $(pick 1 "1 8") --num-prompts $(pick 2 40) --out "$out/certify"
  [ "$rehearsal" ] || section 300 python3 -m pytest -q $processes -m long tests/inference/test_loop_on_kernels.py
  ;;
2)
  tiny=$(pick --tiny "") few=$(pick "--max-new-tokens 8 --repeats 1" "")
  decoding="python3 benchmarks/decoding_gpu.py $tiny $few"
  section 220 $decoding --settings $(pick 16:1:0 "512:1:0 512:1:1 4096:1:0 32768:1:0")
  section 80 $decoding --settings $(pick 16:1:0 512:1:0) --profile $(pick 2 20)
  section 100 python3 benchmarks/training_gpu.py $tiny
  section 120 $decoding --settings $(pick 16:2:0 "512:8:0 512:64:0 4096:8:1")
  section 150 $decoding --target qwen3_30b_a3b --settings $(pick 16:2:0 "512:1:0 512:8:0")
  if [ "$rehearsal" ]; then
    printf '\nTables of single kernels are measured on a GPU only.\n'
  else
    section 40 python3 benchmarks/products.py
    section 60 python3 benchmarks/acceptance_kernels.py
    section 60 python3 benchmarks/attention_kernel.py
  fi
  ;;
3)
  checked=(python3 -m pytest -q -x tests/models/test_llama_kernels.py tests/models/test_cache_kernels.py)
  if command -v compute-sanitizer >/dev/null; then
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # each tensor's memory is then its own, so that its ends are seen
    section 110 compute-sanitizer --tool memcheck --error-exitcode 9 "${checked[@]}"
    section 110 compute-sanitizer --tool racecheck --error-exitcode 9 "${checked[@]}"
    unset PYTORCH_NO_CUDA_MEMORY_CACHING
  else
    printf '\nThere is no compute-sanitizer here.\n'
  fi
  section 70 python3 benchmarks/training_gpu.py $(pick --tiny "--length 4096 --rows 2") --vary
  section 280 $draftsmith quickstart --minutes $(pick 1 3) --out "$out/quickstart"
  ;;
*) echo "give a part: 1, 2 or 3" && exit 2 ;;
esac

printf '\n'
printf '%s\n' "${ended[@]}"
