#!/usr/bin/env bash
# Builds the container image with buildah and tests it: user, health, doctor, an
# answer, the end, size, what may be written. No image registry is asked: the
# base images are made with mmdebstrap, once, and kept beside the environment.
#
#   scripts/image_test.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

IMAGE=localhost/vllm-arm-cpu
KEPT="$ENVIRONMENT/image"
LOG="$BUILD/image.log"

[ "$(id -u)" = 0 ] || fail "building and running an image needs root (mounts, namespaces)" "run it with sudo"
[ "$VLLM_FROM" = wheel ] || fail "the image is that of a vLLM which is published as a wheel" "run it without VLLM=$VLLM"
mkdir -p "$KEPT" "$BUILD"
: >"$LOG"
for tool in buildah mmdebstrap; do
    command -v "$tool" >/dev/null && continue
    command -v apt-get >/dev/null || fail "$tool is not installed" "install $tool"
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$tool"; } >>"$LOG" 2>&1 ||
        fail "$tool is not installed, and apt-get cannot install it; see build/image.log" "install $tool"
done

# Copies of whole layers where the file system knows no overlays.
storage=(--root "$KEPT/storage" --runroot "$KEPT/run" --storage-driver overlay)
buildah "${storage[@]}" info >>"$LOG" 2>&1 || storage=(--root "$KEPT/storage-vfs" --runroot "$KEPT/run-vfs" --storage-driver vfs)
in_storage() { local command=$1; shift; buildah "$command" "${storage[@]}" "$@"; }

# timed NAME COMMAND...: one line with its time; the output goes to the log.
timed() {
    local name=$1 start=$SECONDS
    shift
    "$@" >>"$LOG" 2>&1 || { tail -n 30 "$LOG" >&2; fail "$name failed; the whole output is in build/image.log"; }
    printf 'image: %-32s %4d s\n' "$name" $((SECONDS - start))
}

# base NAME ARCHITECTURE: makes the base image NAME, which is Debian's minimal one.
base() {
    local name=$1 architecture=$2 archive="$KEPT/$2-$GUEST_SUITE.tar" container variable
    if [ ! -e "$archive" ]; then
        mmdebstrap --arch="$architecture" --variant=minbase "$GUEST_SUITE" "$archive.new"
        mv "$archive.new" "$archive"
    fi
    container=$(in_storage from scratch)
    in_storage add --quiet "$container" "$archive" /
    in_storage config --arch "$architecture" --os linux --cmd /bin/bash "$container"
    # The stage that builds downloads as this machine does; the image is made from the other one.
    if [ "$name" = localhost/build-base ] && [ -n "${SSL_CERT_FILE:-}" ]; then
        in_storage add --quiet "$container" "$SSL_CERT_FILE" /etc/machine-certificates.crt
        for variable in SSL_CERT_FILE PIP_CERT; do
            in_storage config --env "$variable=/etc/machine-certificates.crt" "$container"
        done
    fi
    in_storage commit --quiet --format docker --rm "$container" "$name"
}
bases() {
    in_storage inspect --type image localhost/base >/dev/null 2>&1 || base localhost/base arm64
    in_storage inspect --type image localhost/build-base >/dev/null 2>&1 || base localhost/build-base "$(dpkg --print-architecture)"
}

build() {
    local cache
    # What `make env` has downloaded.
    cache=$("$TOOLS/bin/uv" cache dir)
    mkdir -p "$cache"
    in_storage bud --isolation chroot --pull-never --layers --format docker \
        --build-arg BASE=localhost/base --build-arg BUILD_BASE=localhost/build-base --volume "$cache:/root/.cache/uv" \
        --file "$PROJECT/docker/Dockerfile" --tag "$IMAGE" "$PROJECT"
}

timed "base images" bases
timed "docker/Dockerfile" build
container=$(in_storage from --pull-never "$IMAGE" 2>>"$LOG")
trap 'in_storage umount "$container" >/dev/null; in_storage rm "$container" >/dev/null' EXIT
in_storage inspect --type image "$IMAGE" >"$BUILD/image.json"
export VAC_TEST_IMAGE VAC_TEST_IMAGE_INSPECTED="$BUILD/image.json"
VAC_TEST_IMAGE=$(in_storage mount "$container")
cd "$PROJECT"
"$TOOLS/bin/python" -m pytest -p no:cacheprovider -rP tests/image
