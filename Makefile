# From a clean clone: `make demo` serves a model on Arm, `make test` tests everything.
# Both set up what they need; see scripts/env.sh.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The version of vLLM to work with: 0.32, or 0.33 (`make test VLLM=0.33`).
VLLM ?= 0.32
export VLLM
ENVIRONMENT := $(shell VLLM=$(VLLM) scripts/env.sh path)
ARCH := $(shell uname -m)
TOOLS := $(ENVIRONMENT)/tools/bin
NATIVE_SOURCES := $(shell find csrc -type f)
PACKAGE_SOURCES := $(shell find vllm_arm_cpu -name '*.py') pyproject.toml setup.py README.md LICENSE NOTICE
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
WHEEL := dist/vllm_arm_cpu-$(VERSION)-py3-none-manylinux_2_34_aarch64.whl

MODEL ?= examples/tiny-llama
PROMPT ?= In the beginning

.PHONY: help env shell libs wheel sdist install demo doctor test test-fast test-unit test-kernels test-integration \
	test-e2e test-numa test-upstream test-slow soak image-test bench-cost bench-step bench-sampler lint format clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

env: ## prepare the Arm environment (root on x86-64)
	@scripts/env.sh

shell: env install ## a shell on Arm, the package installed
	@scripts/arm.sh bash

prebuilt/libgomp.so.1 prebuilt/libmimalloc.so: scripts/build_libs.sh scripts/build_libgomp.sh scripts/build_mimalloc.sh
	@scripts/build_libs.sh prebuilt

libs: env prebuilt/libgomp.so.1 prebuilt/libmimalloc.so ## the libraries that are preloaded: LSE libgomp, mimalloc

$(WHEEL): $(NATIVE_SOURCES) $(PACKAGE_SOURCES) prebuilt/libgomp.so.1 prebuilt/libmimalloc.so scripts/build_wheel.sh scripts/check_wheel.py
	@scripts/build_wheel.sh

wheel: env ## build the wheel into dist/ and check it
	@$(MAKE) --no-print-directory $(WHEEL)

sdist: env libs ## the source distribution, which builds on aarch64
	@$(TOOLS)/python -m build --sdist --no-isolation --outdir dist . >build/sdist.log 2>&1 || { tail -n 20 build/sdist.log; exit 1; }

build/site/.installed: $(WHEEL)
	@scripts/install_wheel.sh $(WHEEL)

install: wheel ## install the wheel beside vLLM, for this clone
	@$(MAKE) --no-print-directory build/site/.installed

demo: install ## serve MODEL, ask for PROMPT, show doctor and times
	@scripts/demo.sh "$(MODEL)" "$(PROMPT)"

doctor: install ## what the package finds on this machine
	@scripts/arm.sh --timeout 300 vllm-arm-cpu doctor

test: install ## the whole test suite
	@scripts/test.sh all

test-fast: install ## unit and kernel tests only
	@scripts/test.sh fast

test-unit: env ## the Python parts that need no Arm code
	@scripts/test.sh unit

test-kernels: install ## the kernels on both tiers
	@scripts/test.sh kernels

test-integration: install ## vLLM in one process, on both tiers
	@scripts/test.sh integration

test-e2e: install ## vllm serve over HTTP
	@scripts/test.sh e2e

test-numa: install ## ranks on emulated machines with two and four NUMA nodes
	@scripts/test.sh numa

test-upstream: install ## vLLM's own tests on our platform
	@scripts/test.sh upstream

test-slow: install ## what takes minutes beyond that
	@scripts/test.sh slow

soak: install ## hundreds of requests over HTTP, many given up: nothing lost, nothing left (part of test-slow)
	@scripts/test.sh soak

image-test: env ## build the container image and test it
	@scripts/image_test.sh

bench-cost: install ## modelled cycles of the kernels, vLLM's own beside them
	@scripts/bench_cost.sh

bench-step: install ## instructions of a decode step of the whole engine, vLLM's own beside ours
	@scripts/bench_step.sh

bench-sampler: install ## instructions of sampling one token, vLLM's own beside ours
	@scripts/bench_step.sh sampler

lint: env ## ruff, mypy, clang-format
	@scripts/lint.sh

format: env ## let ruff and clang-format rewrite the sources
	@$(TOOLS)/ruff check --fix --quiet vllm_arm_cpu tests benchmarks scripts setup.py || true
	@$(TOOLS)/ruff format --quiet vllm_arm_cpu tests benchmarks scripts setup.py
	@clang-format-19 -i $$(find csrc -name '*.cc' -o -name '*.h')

clean: ## remove what was built here; the Arm environment stays
	rm -rf build dist prebuilt *.egg-info
