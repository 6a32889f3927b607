#!/usr/bin/env bash
# Runs the tests: what needs no Arm code on this machine, the rest on Arm, two
# groups at a time. Each group has a time limit, a log in build/ and a line.
#
#   scripts/test.sh all | fast | unit | emulation | kernels | integration | e2e | numa | upstream | soak
#   scripts/test.sh slow | e2e-slow | integration-slow | upstream-slow | ray-slow
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cd "$PROJECT"
mkdir -p "$BUILD"
failed="$BUILD/test-failed"
rm -f "$failed"

# group NAME SECONDS COMMAND...: limits are for the slowest machines. Debian 13's QEMU 10 takes half as long again as Debian 12's.
group() {
    local name=$1 seconds=$2 log="$BUILD/test-$1.log" start=$SECONDS result=passed
    shift 2
    timeout -k 30 "$seconds" "$@" >"$log" 2>&1 </dev/null || result="FAILED ($?)"
    printf 'test: %-22s %-12s %4d s   %s\n' "$name" "$result" $((SECONDS - start)) \
        "$(grep -E '^=+ .*(passed|failed|error|no tests).*=+$|^[0-9]+ (passed|failed)' "$log" | tail -n 1 | tr -d '=')"
    [ "$result" = passed ] || { echo "$name" >>"$failed"; tail -n 80 "$log"; }
}

# Groups, long ones first.
two_at_a_time() {
    local part
    for part in "$@"; do
        [ "$(jobs -rp | wc -l)" -lt 2 ] || wait -n
        "$part" &
    done
    wait
}

# pytest on Arm, against the installed wheel; the sources come behind it.
on_arm() {
    local cpu=() settings=()
    [ "$HOST_ARCH" = aarch64 ] || cpu=(--cpu "$1")
    shift
    while [[ "$1" == *=* ]]; do settings+=("$1"); shift; done
    scripts/arm.sh "${cpu[@]}" env PYTHONPATH="$INSIDE/build/site:$INSIDE" "${settings[@]}" python3 -m pytest -p no:cacheprovider -m "${MARKED:-not slow}" "$@"
}
# vLLM's own tests of a suite (normal, whole) on Arm, all or those in FILE...; tests/upstream says which and how.
on_upstream() {
    local suite=$1 cpu=() folder
    shift
    [ "$HOST_ARCH" = aarch64 ] || cpu=(--cpu neoverse-v2)
    scripts/install_beside.sh upstream-site --require-hashes -r requirements/upstream-tests.lock || return
    folder=$("$TOOLS/bin/python" scripts/fetch_vllm_tests.py "$VENV" "$BUILD") || return
    "$TOOLS/bin/python" tests/upstream/hub.py "$BUILD/vllm-tests-hub"
    # `tests` is vLLM's package here: ours is not on the path.
    scripts/arm.sh "${cpu[@]}" env PYTHONPATH="$INSIDE/build/site:$INSIDE/tests/upstream:$INSIDE/build/upstream-site" LD_PRELOAD="$INSIDE/build/upstream-shim.so" \
        HF_HOME="$INSIDE/build/vllm-tests-hub" VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 VAC_LINEAR=vac \
        python3 -m pytest -p no:cacheprovider -p vac_upstream -c "$INSIDE/tests/upstream/pytest.ini" \
        --rootdir "$INSIDE/build/${folder##*/}" --confcutdir "$INSIDE/build/${folder##*/}" --suite "$suite" \
        "${@/#/$INSIDE/build/${folder##*/}/}"
}
export -f on_arm on_upstream fail
# Where arm.sh shows the clone.
INSIDE=/src
[ "$HOST_ARCH" != aarch64 ] || INSIDE=$PROJECT
export HOST_ARCH INSIDE TOOLS VENV BUILD
# A vLLM from source has no compiled ops to run beside.
[ "$VLLM_FROM" = wheel ] && UPSTREAM_OPS=1 || UPSTREAM_OPS=0
export UPSTREAM_OPS

unit() { group unit 900 "$TOOLS/bin/python" -m pytest -p no:cacheprovider tests/unit; }
# What only Arm code shows; and only its emulator: CPUs that are too old, instructions as they are executed.
emulation() {
    [ "$HOST_ARCH" = aarch64 ] || group emulation 900 "$TOOLS/bin/python" -m pytest -p no:cacheprovider tests/emulation
    group unit-on-arm 900 bash -c 'on_arm neoverse-v2 tests/unit'
}
kernels_v2() { group kernels-v2 1800 bash -c 'on_arm neoverse-v2 tests/kernels'; }
kernels_n1() { group kernels-n1 1800 bash -c 'on_arm neoverse-n1 tests/kernels'; }
# Once beside vLLM's own compiled ops, where it has any, once with them blocked.
# In parts of about the same length.
integration_files() {
    upstream_shim
    FILES="${*:2}" group "$1" 4200 bash -c 'on_arm neoverse-v2 LD_PRELOAD=$INSIDE/build/upstream-shim.so VAC_TEST_UPSTREAM_OPS=$UPSTREAM_OPS $FILES'
}
QUANTIZED=(tests/integration/test_{quantization,quantized_checkpoints,moe}.py)
MODELS=(tests/integration/test_{models,features,images,encoder,whisper}.py)
RANKS=(tests/integration/test_tensor_parallel.py)
integration_quantized() { integration_files integration-quantized "${QUANTIZED[@]}"; }
integration_models() { integration_files integration-models "${MODELS[@]}"; }
integration_ranks() { integration_files integration-ranks "${RANKS[@]}"; }
integration_rest() {
    integration_files integration-v2 tests/integration "${QUANTIZED[@]/#/--ignore=}" "${MODELS[@]/#/--ignore=}" "${RANKS[@]/#/--ignore=}"
}
integration_n1() {
    # Of the models what takes another path then.
    group integration-n1 2700 bash -c 'on_arm neoverse-n1 VAC_BLOCK_UPSTREAM_OPS=1 VAC_TEST_UPSTREAM_OPS=0 \
        tests/integration/test_generation.py \
        "tests/integration/test_models.py::test_against_transformers[deepseek-v3]" \
        "tests/integration/test_models.py::test_refused"'
}
# vLLM's own tests, on our platform and kernels.
upstream() {
    upstream_shim
    group upstream 5400 bash -c 'on_upstream normal'
}
upstream_attention() {
    upstream_shim
    group upstream-attention 1500 bash -c 'on_upstream normal tests/kernels/attention/test_cpu_attn.py'
}
# What takes minutes beyond the normal suite. Checkpoints with real weights, speech and Ray are fetched first.
slow() {
    upstream_shim
    slow_data
    two_at_a_time e2e_slow integration_slow upstream_slow ray_slow
}
slow_data() { group slow-data 1800 scripts/slow_data.sh; }
# A server for each kind of quantized checkpoint; servers that lose a process; the soak.
e2e_slow() { MARKED=slow group e2e-slow 9000 bash -c 'on_arm neoverse-v2 tests/e2e'; }
integration_slow() {
    MARKED=slow group integration-slow 7200 bash -c 'on_arm neoverse-v2 LD_PRELOAD=$INSIDE/build/upstream-shim.so VAC_TEST_UPSTREAM_OPS=$UPSTREAM_OPS tests/integration \
        --ignore=tests/integration/test_ray.py'
}
upstream_slow() { group upstream-slow 7200 bash -c 'on_upstream whole'; }
ray_slow() {
    MARKED=slow group ray-slow 2400 bash -c 'on_arm neoverse-v2 PYTHONPATH=$INSIDE/build/site:$INSIDE:$INSIDE/build/ray-site \
        tests/integration/test_ray.py'
}
soak() { MARKED=slow group soak 1800 bash -c 'on_arm neoverse-v2 tests/e2e/test_soak.py'; }
# vLLM's ops want a symbol of OpenBLAS that the torch on PyPI does not have; with
# this library they load. Nothing calls it.
upstream_shim() {
    local compiler=(gcc)
    [ "$HOST_ARCH" = aarch64 ] || compiler=(clang-19 --target=aarch64-linux-gnu "--sysroot=$ROOT" -fuse-ld=lld)
    # Another group may have it loaded.
    [ ! -e "$BUILD/upstream-shim.so" ] || return 0
    echo 'void abort(void); void sbgemm_(void) { abort(); }' | "${compiler[@]}" -shared -fPIC -x c -o "$BUILD/upstream-shim.so" -
}
# Full-system emulation of the machines named behind the time limit; the only part that a machine may be unable to run.
numa() {
    local reason
    reason=$(scripts/numa.sh missing)
    if [ -n "$reason" ]; then
        printf 'test: %-22s %-12s          %s\n' numa skipped "$reason"
    else
        group numa "$1" scripts/numa.sh run "${@:2}"
    fi
}
numa_two() { numa 1200 two; }
e2e() { group e2e 3600 bash -c 'on_arm neoverse-v2 tests/e2e'; }

case "${1:?}" in
unit | emulation | e2e | upstream | slow | soak) "$1" ;;
e2e-slow | integration-slow | upstream-slow | ray-slow)
    upstream_shim
    slow_data
    "${1/-/_}"
    ;;
numa) numa 2250 two four ;;
kernels) kernels_v2; kernels_n1 ;;
integration) integration_rest; integration_quantized; integration_models; integration_ranks; integration_n1 ;;
fast) unit; kernels_v2; kernels_n1 ;;
all)
    upstream_shim
    two_at_a_time e2e integration_rest integration_quantized integration_models integration_ranks kernels_v2 kernels_n1 \
        integration_n1 emulation upstream_attention numa_two unit
    ;;
*) fail "unknown group $1" "see the head of $0" ;;
esac
# The counts of all groups together, for those who read the last line only.
count() { cat "$BUILD"/test-*.log | grep -oE "^=+ .*=+$|^[0-9]+ (passed|failed|skipped).*" | grep -oE "[0-9]+ $1" | awk '{n += $1} END {print n + 0}'; }
if [ "$1" = all ]; then echo "$(count passed) passed, $(count failed) failed, $(count skipped) skipped"; fi
[ ! -s "$failed" ] || { echo "test: failed: $(tr '\n' ' ' <"$failed")"; exit 1; }
